"""paged-infer against other engines on one workload file, in turns, on one machine.

    python benchmarks/throughput.py --rows 64 --rounds 2 --dtype float32 \\
        --peer transformers=PYTHON --peer vllm=PYTHON --peer openvino=PYTHON --openvino-model FOLDER

Every run is a fresh process in the peer's own environment, and each peer's run follows one of ours, so that a machine
that slows down slows both. Timed: tokenise + generate + detokenise. Runs during which other processes took more than
`--max-noise` of the CPU are tried again, and marked where the second try was no quieter. Results go to
`benchmarks/results/NAME.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import report
from limits import Limits
from model_folder import hf_folder
from subject import Measurement, Subject, SubjectFailed
from workload import WORKLOAD, ModelShape, Work, count_work, encode, read_rows

from paged_infer.config import DEMO_MODEL
from paged_infer.models.source import resolve_model

HERE = Path(__file__).resolve().parent
OWN = "paged-infer"
ADAPTERS: dict[str, list[str]] = {
    OWN: ["own.py"],
    "transformers": ["hf_generate.py"],
    "transformers-cb": ["hf_continuous.py"],
    "naive": ["hf_generate.py", "--batch-size", "1", "--order", "input"],
    "vllm": ["vllm_cpu.py"],
    "vllm-eager": ["vllm_cpu.py", "--eager"],
    "openvino": ["openvino_cb.py"],
    "llamacpp": ["llamacpp_http.py"],
}


@dataclass(frozen=True, slots=True)
class Run:
    """One turn: what was measured, and whether the machine was quiet meanwhile."""

    round: int
    against: str
    quiet: bool
    measurement: Measurement


def main() -> None:
    args = parse()
    rows = read_rows(args.workload, args.rows)
    source = resolve_model(args.model)
    outputs = [row["max_tokens"] for row in rows]
    work = count_work(ModelShape.of(source.config()), encode(rows, source.tokenizer_folder()), outputs)
    with tempfile.TemporaryDirectory() as scratch:
        workload = Path(scratch) / "workload.jsonl"
        workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
        subjects = {name: subject(args, name, where, workload) for name, where in args.peer.items()}
        own = subject(args, OWN, sys.executable, workload)
        limits = measure_limits(args)
        runs, failures = take_turns(args, own, subjects)
        limits = best(limits, measure_limits(args))
    data = {
        "machine": report.machine(),
        "workload": {"file": args.workload.name, "rows": len(rows), "work": asdict(work)},
        "dtype": args.dtype,
        "threads": args.threads,
        "limits": asdict(limits),
        "runs": [asdict(run) | {"rate": run.measurement.rate} for run in runs],
        "failures": failures,
    }
    text = render(args, len(rows), work, limits, runs, failures)
    report.write(args.name or f"throughput-{args.dtype}-{len(rows)}", data, text)
    print(text)
    if not runs:
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="short name, .gguf or Hugging Face folder (default: %(default)s)")
    add("--workload", type=Path, default=WORKLOAD)
    add("--rows", type=int, help="that many rows, evenly spread (default: all)")
    add("--rounds", type=int, default=1)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--threads", type=int, default=os.cpu_count())
    add("--kv-gib", type=int, default=4, help="memory for keys and values, for every engine that can be told")
    add("--engine", action="append", default=[], metavar="KEY=VALUE", help="an engine option for paged-infer")
    add("--peer", action="append", default=[], metavar="NAME=PYTHON_OR_URL", help=f"{', '.join(list(ADAPTERS)[1:])}")
    add("--openvino-model", help="the model's exported OpenVINO folder")
    add("--timeout", type=float, default=480, help="seconds after which a run is given up")
    add("--max-noise", type=float, default=0.05, help="share of the CPU others may take")
    add("--retries", type=int, default=1, help="more tries for a noisy run")
    add("--name", help="name of the result files")
    args = parser.parse_args()
    peers = {}
    for pair in args.peer:
        name, _, where = pair.partition("=")
        if name not in ADAPTERS or name == OWN or not where:
            parser.error(f"--peer {pair}: expected NAME=PYTHON_OR_URL with NAME one of {', '.join(list(ADAPTERS)[1:])}")
        if name == "openvino" and not args.openvino_model:
            parser.error("--peer openvino needs --openvino-model")
        peers[name] = where
    args.peer = peers
    return args


def subject(args: argparse.Namespace, name: str, where: str, workload: Path) -> Subject:
    """The process that runs an engine: `where` is its Python, or the address of its server."""
    script, *options = ADAPTERS[name]
    special = {OWN: args.model, "openvino": args.openvino_model, "llamacpp": where}
    model = special.get(name) or str(hf_folder(args.model))
    served = name == "llamacpp"
    command = [sys.executable if served else where, str(HERE / "peers" / script), *options]
    command += ["--model", model, "--workload", str(workload)]
    command += ["--dtype", args.dtype, "--threads", str(args.threads), "--kv-gib", str(args.kv_gib)]
    if name == OWN:
        command += [part for pair in args.engine for part in ("--engine", pair)]
    return Subject(name, command, server_port=urllib.parse.urlsplit(where).port if served else None)


def take_turns(args: argparse.Namespace, own: Subject, peers: dict[str, Subject]) -> tuple[list[Run], dict[str, str]]:
    """Ours, a peer, ours, the next peer, and so on for each round. A peer that fails once is not tried again."""
    runs: list[Run] = []
    failures: dict[str, str] = {}
    for number in range(1, args.rounds + 1):
        for turn, against in turns(own, peers):
            if turn.name in failures or against in failures:
                continue
            try:
                run = quiet_run(args, turn, number, against)
            except SubjectFailed as error:
                failures[turn.name] = str(error)
                print(f"{turn.name}: {error}", file=sys.stderr)
                continue
            runs.append(run)
            progress(run)
    return runs, failures


def turns(own: Subject, peers: dict[str, Subject]) -> Iterator[tuple[Subject, str]]:
    """Who runs, and for the comparison with whom."""
    if not peers:
        yield own, ""
    for name, peer in peers.items():
        yield own, name
        yield peer, name


def quiet_run(args: argparse.Namespace, turn: Subject, number: int, against: str) -> Run:
    """Measure, again while others are busy; the quietest try counts."""
    tries: list[Measurement] = []
    while len(tries) <= args.retries:
        tries.append(turn.measure(args.timeout))
        if tries[-1].other_share <= args.max_noise:
            break
    quietest = min(tries, key=lambda m: m.other_share)
    return Run(number, against, quietest.other_share <= args.max_noise, quietest)


def progress(run: Run) -> None:
    """One line on stderr."""
    m = run.measurement
    print(
        f"round {run.round} {m.engine}: {m.rate:.1f} tok/s, ready {m.ready_s:.1f} s, "
        f"{m.peak_rss / 2**20:.0f} MiB, others {m.other_share:.0%}",
        file=sys.stderr,
    )


def measure_limits(args: argparse.Namespace) -> Limits:
    """`limits.py` in a process of its own."""
    command = [sys.executable, str(HERE / "limits.py"), "--model", args.model]
    command += ["--dtype", args.dtype, "--threads", str(args.threads)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Limits(found["fma"], found["gemm"], {int(k): v for k, v in found["linears"].items()})


def best(a: Limits, b: Limits) -> Limits:
    """The higher of each figure."""
    fma = None if a.fma is None or b.fma is None else max(a.fma, b.fma)
    gemm = {k: max(v, b.gemm[k]) for k, v in a.gemm.items()}
    return Limits(fma, gemm, {k: max(v, b.linears[k]) for k, v in a.linears.items()})


def render(
    args: argparse.Namespace, num_rows: int, work: Work, limits: Limits, runs: list[Run], failures: dict[str, str]
) -> str:
    """The results as markdown."""
    engines = list(dict.fromkeys(run.measurement.engine for run in runs))
    lines = [
        f"# Throughput: {num_rows} rows of `{args.workload.name}`, {args.dtype}, {args.threads} threads",
        "",
        report.machine_line() + ".",
        "",
        f"{work.generated_tokens:,} tokens to generate; {work.shared_tokens:,} prompt tokens are in whole blocks that "
        f"an earlier row has too. With those shared: {work.total / 1e12:.2f} TFLOP ({work.linear / work.total:.0%} "
        f"layer GEMMs, {work.head / work.total:.0%} LM head, {work.attention / work.total:.0%} attention).",
        "",
        "Limits, GFLOP/s: " + "; ".join(limit_texts(limits)) + ". 'of limit' is the work above over the wall time over "
        "the fastest square GEMM.",
        "",
    ]
    table = []
    for engine in engines:
        chosen = pick([run for run in runs if run.measurement.engine == engine])
        measured = [run.measurement for run in chosen]
        wall = median(m.wall_s for m in measured)
        ratios = ratios_to(engine, runs)
        table.append(
            (
                f"{engine} {measured[0].version}",
                ", ".join(f"{k}={v}" for k, v in measured[0].settings.items()) or "–",
                f"{median(m.rate for m in measured):.1f}",
                "–" if not ratios else f"{median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})",
                f"{work.total / wall / 1e9 / limits.peak:.0%}",
                f"{median(m.ready_s for m in measured):.1f}",
                f"{max(m.peak_rss for m in measured) / 2**20:,.0f}",
                f"{max(m.other_share for m in measured):.0%}"
                + ("" if all(run.quiet for run in chosen) else " (noisy)"),
                len(chosen),
            )
        )
    header = ("engine", "settings", "generated tok/s", f"{OWN} is", "of limit", "ready s", "peak RSS MiB")
    lines.append(report.table((*header, "CPU of others", "runs"), table))
    lines += ["", *(f"- {name}: failed. {text.splitlines()[0]}" for name, text in failures.items())]
    return "\n".join(lines)


def pick(runs: list[Run]) -> list[Run]:
    """The quiet runs; all of them where none was quiet."""
    return [run for run in runs if run.quiet] or runs


def ratios_to(engine: str, runs: list[Run]) -> list[float]:
    """Our rate over the engine's, for each pair of turns."""
    pairs: dict[int, dict[str, Run]] = {}
    for run in runs:
        if run.against == engine:
            pairs.setdefault(run.round, {})[run.measurement.engine] = run
    whole = [pair for pair in pairs.values() if len(pair) == 2]
    quiet = [pair for pair in whole if all(run.quiet for run in pair.values())] or whole
    return [pair[OWN].measurement.rate / pair[engine].measurement.rate for pair in quiet]


def limit_texts(limits: Limits) -> list[str]:
    """Each limit in words."""
    texts = [] if limits.fma is None else [f"float32 FMA in registers {limits.fma:.0f}"]
    texts += [f"{name} square GEMM {rate:.0f}" for name, rate in limits.gemm.items()]
    return texts + [f"the engine's layer GEMMs at {n} tokens {rate:.0f}" for n, rate in limits.linears.items()]


if __name__ == "__main__":
    main()
