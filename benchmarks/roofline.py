"""How well the estimate of `plan --gpus` holds on a machine that is here: this one's CPU, by its own measured rates.

    python benchmarks/roofline.py [-m MODEL] [--threads N]

Measures what a matrix product and a read of memory reach here, forecasts three workloads from that, runs them, and
writes both. The same formulas serve for GPUs, with the rates of their data sheets.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import report
import torch
from paged_kernels.dispatch import make_backend

from paged_infer import LLM, SamplingParams
from paged_infer.config import DEMO_MODEL, cache_dir
from paged_infer.job.roofline import Machine, Workload, forecast
from paged_infer.models.source import resolve_model

WORKLOADS = {
    "long prompts": Workload(48, 256, 0, 2, 2),
    "long outputs": Workload(48, 16, 0, 64, 64),
    "both": Workload(48, 128, 0, 32, 32),
}
MAX_NUM_SEQS = 32
BATCHED_TOKENS = 512


def best_of(run, repeats: int = 5) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def this_machine(hidden: int, inner: int, threads: int) -> Machine:
    """Rates of a float32 product with the shapes of a model, by the kernel it runs on, and of reading memory."""
    backend = make_backend("cpu", torch.float32, threads=threads, cache_dir=cache_dir())
    weights = [torch.randn(2 * inner, hidden) for _ in range(8)]  # more than the caches hold
    linears = [backend.make_linear(weight) for weight in weights]

    def seconds_of(rows: int, repeats: int) -> float:
        x = torch.randn(rows, hidden)
        return best_of(lambda: [linear(x) for linear in linears], repeats) / len(linears)

    # seconds(m) = (m + half) / full rate, where half is the rows at which half of the rate is reached
    many, few = 512, 16
    seconds = seconds_of(many, 5), seconds_of(few, 20)
    per_row = (seconds[0] - seconds[1]) / (many - few)
    half = max(0.0, seconds[1] / per_row - few)
    flops = 2 * hidden * len(weights[0]) / per_row
    large = torch.randn(64 << 20)
    bandwidth = large.nbytes / best_of(large.sum)
    return Machine("this CPU", 64 << 30, bandwidth, flops, 1e9, step_seconds=1e-3, half_rate_rows=half, dtype_bytes=4)


def measured(llm: LLM, load: Workload, vocab_size: int) -> float:
    choose = random.Random(7)
    prompts = [[choose.randrange(5, vocab_size) for _ in range(int(load.prompt_tokens))] for _ in range(load.rows)]
    params = SamplingParams(max_tokens=int(load.max_output_tokens), ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=DEMO_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model).config()
    machine = this_machine(model.hidden_size, model.intermediate_size, arguments.threads)
    print(
        f"{machine.flops / 1e9:.0f} GFLOP/s (half with {machine.half_rate_rows:.0f} rows), "
        f"{machine.bandwidth / 1e9:.1f} GB/s",
        file=sys.stderr,
    )
    found = {}
    with LLM(
        arguments.model,
        device="cpu",
        dtype="float32",
        threads=arguments.threads,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BATCHED_TOKENS,
        prefix_caching=False,
    ) as llm:
        measured(llm, Workload(4, 16, 0, 4, 4), model.vocab_size)
        for name, load in WORKLOADS.items():
            expected = forecast(
                model, machine, load, 1, 1, 1, max_num_seqs=MAX_NUM_SEQS, prefill_tokens=BATCHED_TOKENS
            ).seconds
            seconds = measured(llm, load, model.vocab_size)
            found[name] = {"forecast": expected, "measured": seconds, "ratio": expected / seconds}
            print(f"{name:14} forecast {expected:6.2f} s, measured {seconds:6.2f} s, ratio {expected / seconds:.2f}")
    rows = [
        [name, *(f"{each[kind]:.2f}" for kind in ("forecast", "measured", "ratio"))] for name, each in found.items()
    ]
    table = report.table(["workload", "forecast, s", "measured, s", "ratio"], rows)
    report.write(
        "roofline",
        {"machine": report.machine(), "model": arguments.model, "threads": arguments.threads, "found": found},
        f"# Forecast and measured\n\n{report.machine_line()}.\n{arguments.model} in float32, "
        f"{arguments.threads} thread(s): {machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s.\n"
        f"`python benchmarks/roofline.py`\n\n{table}",
    )


if __name__ == "__main__":
    main()
