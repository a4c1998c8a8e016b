"""How fast this machine multiplies: in registers, in torch's GEMM, and in the engine's own linears.

    python benchmarks/limits.py --dtype float32 --threads 2

Prints one JSON object. All figures are GFLOP/s, the best of many short attempts (a busy neighbour only ever slows).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from workload import ModelShape

from paged_infer.config import DEMO_MODEL
from paged_infer.models.source import resolve_model

SQUARE = 2048
STEP_TOKENS = (64, 256, 512)
"""Batch sizes at which the engine's linears are timed: decode steps and full token budgets."""


@dataclass(frozen=True, slots=True)
class Limits:
    """GFLOP/s by kind.

    Attributes:
        fma: float32 multiply-adds in registers, None without a C++ compiler.
        gemm: square matrices by dtype, through torch.
        linears: layer matrices through the engine's backend, by number of tokens.
    """

    fma: float | None
    gemm: dict[str, float]
    linears: dict[int, float]

    @property
    def peak(self) -> float:
        """The limit that fractions are quoted against: the fastest square GEMM of the dtypes measured."""
        return max(self.gemm.values())


def fma_peak(threads: int) -> float | None:
    """Compile and run `fma_peak.cpp`; None without a C++ compiler."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fma_peak"
        source = Path(__file__).with_name("fma_peak.cpp")
        subprocess.run([compiler, "-O3", "-march=native", "-fopenmp", source, "-o", program], check=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        return float(subprocess.run([program], env=environment, check=True, capture_output=True, text=True).stdout)


def best_time(call: Callable[[], object], seconds: float) -> float:
    """Shortest wall time of a call, over as many calls as fit into `seconds`, after two to warm up."""
    call()
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure(shape: ModelShape, dtype_name: str, threads: int, seconds: float = 0.5) -> Limits:
    """All limits for a run dtype; `seconds` is spent on each kind of matrix."""
    import torch
    from paged_kernels.dispatch import make_backend

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    gemm = {}
    for name in dict.fromkeys(("float32", dtype_name)):
        a, b = (torch.randn(SQUARE, SQUARE).to(getattr(torch, name)) for _ in range(2))
        gemm[name] = 2 * SQUARE**3 / best_time(lambda a=a, b=b: a @ b, 3 * seconds) / 1e9
    backend = make_backend("cpu", getattr(torch, dtype_name), threads=threads)
    sizes = shape.linears().values()
    layers = [(k, backend.make_linear(torch.randn(n, k) / k**0.5)) for k, n in sizes]
    flops_per_token = sum(2 * k * n for k, n in sizes)
    linears = {}
    for tokens in STEP_TOKENS:
        spent = 0.0
        for k, linear in layers:
            x = torch.randn(tokens, k).to(backend.activation_dtype)
            spent += best_time(lambda linear=linear, x=x: linear(x), seconds / 3)
        linears[tokens] = flops_per_token * tokens / spent / 1e9
    return Limits(fma_peak(threads), gemm, linears)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    shape = ModelShape.of(resolve_model(args.model).config())
    print(json.dumps(asdict(measure(shape, args.dtype, args.threads))))


if __name__ == "__main__":
    main()
