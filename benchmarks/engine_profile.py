"""Where the time of a run goes: each kind of kernel, sampling, Python between them, scheduling, text, idle cores.

    python benchmarks/engine_profile.py --rows 64 --dtype float32

The backend's operations are timed by a proxy that stands in for it while the engine is built; the engine itself runs
unchanged. Results go to `benchmarks/results/profile-DTYPE-ROWS.json` and `.md`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
from recorder import record
from subject import OtherShare
from workload import WORKLOAD, ModelShape, count_work, encode, read_rows

from paged_infer.config import DEMO_MODEL
from paged_infer.engine import build
from paged_infer.llm import LLM
from paged_infer.models.source import resolve_model
from paged_infer.types import SamplingParams

KINDS = {
    "attention": "attention",
    "rope_and_store": "rope + KV store",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "silu_mul": "SiLU·mul",
    "sample": "sampling",
}
MAKERS = {
    "make_linear": "layer GEMMs",
    "make_quantized": "layer GEMMs",
    "make_head": "LM head",
    "make_embedding": "embedding",
}


class Clock:
    """Seconds and calls by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time booked under `kind`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[kind] += time.perf_counter() - start
                self.calls[kind] += 1

        return call

    def clear(self) -> None:
        """Forget what was booked (loading, warm-up)."""
        self.seconds.clear()
        self.calls.clear()


class TimedOp:
    """A packed weight that books its calls; all else it is asked for comes from the weight."""

    def __init__(self, clock: Clock, kind: str, inner: Any) -> None:
        self._inner = inner
        self._call = clock.timed(kind, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimedBackend:
    """A backend that books the time of each operation; methods it does not know are booked under their own name."""

    def __init__(self, clock: Clock, inner: Any) -> None:
        self._clock = clock
        self._inner = inner

    def make_tied(self, weight: Any) -> tuple[TimedOp, TimedOp]:
        embedding, head = self._inner.make_tied(weight)
        return TimedOp(self._clock, "embedding", embedding), TimedOp(self._clock, "LM head", head)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in MAKERS:
            return lambda *args, **kwargs: TimedOp(self._clock, MAKERS[name], found(*args, **kwargs))
        if not callable(found) or name.startswith(("make_", "kv_", "_")):
            return found
        timed = self._clock.timed(KINDS.get(name, name), found)
        setattr(self, name, timed)
        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEMO_MODEL)
    add("--workload", type=Path, default=WORKLOAD)
    add("--rows", type=int)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--threads", type=int, default=os.cpu_count())
    add("--kv-gib", type=int, default=4)
    args = parser.parse_args()
    rows = read_rows(args.workload, args.rows)

    clock = Clock()
    make_backend = build.make_backend
    build.make_backend = lambda *a, **k: TimedBackend(clock, make_backend(*a, **k))
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, kv_cache_memory=args.kv_gib << 30)
    llm.generate(["Hello world, this is"] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    recorder = record(llm.engine)
    scheduler = llm.engine.scheduler
    scheduler.schedule = clock.timed("scheduling", scheduler.schedule)
    scheduler.update = clock.timed("updating sequences", scheduler.update)
    clock.clear()
    params = [SamplingParams(temperature=0, max_tokens=row["max_tokens"], ignore_eos=True) for row in rows]
    others = OtherShare()
    cpu, start = time.process_time(), time.perf_counter()
    llm.generate([row["prompt"] for row in rows], params)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    other_share = others()

    parts = dict(clock.seconds)
    kernels = sum(seconds for kind, seconds in parts.items() if kind not in ("scheduling", "updating sequences"))
    parts["runner and decoder, Python between kernels"] = sum(step.seconds for step in recorder.steps) - kernels
    parts["tokenising, requests, text, the rest"] = wall - sum(parts.values())
    source = resolve_model(args.model)
    outputs = [row["max_tokens"] for row in rows]
    work = count_work(ModelShape.of(source.config()), encode(rows, source.tokenizer_folder()), outputs)
    flops = {"layer GEMMs": work.linear, "LM head": work.head, "attention": work.attention}
    sizes = sorted(step.num_tokens for step in recorder.steps)
    lines = [
        f"# Profile: {len(rows)} rows of `{args.workload.name}`, {args.dtype}, {args.threads} threads",
        "",
        report.machine_line() + ".",
        "",
        f"{work.generated_tokens:,} tokens in {wall:.1f} s = {work.generated_tokens / wall:.1f} a second; "
        f"{len(recorder.steps)} steps of {sizes[len(sizes) // 2]} tokens at the median ({sizes[0]}–{sizes[-1]}), "
        f"at most {max(step.running for step in recorder.steps)} sequences at once; {cpu / wall:.2f} of "
        f"{args.threads} cores busy (waiting OpenMP threads included), so {1 - cpu / wall / args.threads:.0%} idle; "
        f"{other_share:.0%} of the machine's CPU time went to other processes.",
        "",
        report.table(
            ("part", "seconds", "share", "calls", "GFLOP/s"),
            [
                (
                    name,
                    f"{seconds:.2f}",
                    f"{seconds / wall:.1%}",
                    clock.calls.get(name, "–"),
                    f"{flops[name] / seconds / 1e9:.0f}" if name in flops else "–",
                )
                for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
            ],
        ),
    ]
    data = {
        "machine": report.machine(),
        "dtype": args.dtype,
        "threads": args.threads,
        "rows": len(rows),
        "wall_s": wall,
        "cpu_s": cpu,
        "other_share": other_share,
        "parts_s": parts,
        "calls": dict(clock.calls),
        "steps": len(recorder.steps),
        "work": asdict(work),
    }
    report.write(f"profile-{args.dtype}-{len(rows)}", data, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
