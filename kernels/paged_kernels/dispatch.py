"""The one place that picks a backend for a device."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from paged_kernels.cpu.backend import CpuBackend
from paged_kernels.cpu.build import DEFAULT_CACHE, KernelsUnavailable, cpu_flags, cpu_model, find_compiler, load_library
from paged_kernels.cpu.threads import available_cores
from paged_kernels.interface import Backend
from paged_kernels.reference import ReferenceBackend

BACKENDS = ("auto", "triton", "cpu", "reference")

logger = logging.getLogger(__name__)


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively, so that a bfloat16 run is faster than a float32 one."""
    return "avx512_bf16" in cpu_flags()


def make_backend(
    device: str,
    dtype: torch.dtype,
    name: str = "auto",
    *,
    block_size: int = 16,
    threads: int | None = None,
    cache_dir: Path | None = None,
    kv_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> Backend:
    """The backend `name` for a run in `dtype`; `auto` takes Triton's kernels on a GPU, the compiled ones on a CPU.

    `kv_dtype` is the cache's where it is not the run's: int8 or float8_e4m3fn, with a scale for each token and head.
    With `deterministic` no row's bits depend on the batch around it; plain torch cannot promise that.
    `threads` (None = the physical cores this process may use) is set for torch and the kernels alike. Where `auto`
    cannot have the kernels, one warning says why, what that costs and how to mend it. `triton` by name on a CPU needs
    Triton's interpreter.

    Raises ValueError for an unknown name or one that does not fit the device or `deterministic`, and
    `KernelsUnavailable` where no other backend may take the place of the one that was asked for.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: expected one of {', '.join(BACKENDS)}")
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        torch.set_num_threads(threads if threads is not None else available_cores())
    if name == "cpu" and not on_cpu:
        raise ValueError(f"attention backend 'cpu' on device {device!r}: it runs on the CPU only")
    if name == "reference" and deterministic:
        raise ValueError("deterministic: the products of plain torch depend on the batch; it needs the kernels")
    if name == "reference":
        return ReferenceBackend(dtype, device, kv_dtype)
    if name == "triton" or not on_cpu:
        return _triton(dtype, device, kv_dtype, name, deterministic)
    try:
        if kv_dtype not in (None, dtype):
            raise KernelsUnavailable(f"no CPU kernels for a cache in {kv_dtype}; keep it in the run's own dtype")
        if dtype not in (torch.float32, torch.bfloat16):
            raise KernelsUnavailable(f"no CPU kernels for {dtype}; run in float32 or bfloat16")
        if block_size % 16:
            raise KernelsUnavailable(f"block size {block_size} is no multiple of 16; use 16 or 32")
        return CpuBackend(load_library(cache_dir or DEFAULT_CACHE), dtype, deterministic)
    except KernelsUnavailable as error:
        if name == "cpu" or deterministic:
            raise
        logger.warning("running on plain torch, about 4x slower: %s", error)
        return ReferenceBackend(dtype, device, kv_dtype)


def _triton(dtype: torch.dtype, device: str, kv_dtype: torch.dtype | None, name: str, deterministic: bool) -> Backend:
    try:
        from paged_kernels.triton.backend import TritonBackend
    except ImportError as error:
        reason = f"Triton cannot be imported ({error}); pip install triton"
        if name == "triton" or deterministic:
            raise KernelsUnavailable(reason) from error
        logger.warning("running on plain torch, many times slower: %s", reason)
        return ReferenceBackend(dtype, device, kv_dtype)
    return TritonBackend(dtype, device, kv_dtype, deterministic)


def describe(cache_dir: Path | None = None) -> dict[str, str]:
    """What CPU runs use here, for people: processor, instruction set, compiler, the path of each op, and a remedy."""
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
    found = {
        "cpu": cpu_model(),
        "instruction set": " ".join(flag for flag in wanted if flag in cpu_flags()) or "unknown",
        "threads": f"{available_cores()} (physical cores this process may use)",
    }
    dtype = torch.bfloat16 if has_fast_bf16() else torch.float32
    try:
        found["compiler"] = " ".join(reversed(find_compiler()))
        backend = CpuBackend(load_library(cache_dir or DEFAULT_CACHE), dtype)
    except KernelsUnavailable as error:
        return found | {"cpu kernels": "plain torch, about 4x slower", "remedy": str(error)}
    linear = "oneDNN, prepacked" if backend.uses_onednn else "compiled"
    return found | {
        "cpu kernels": f"linear layers {linear}; LM head, attention, norms, rotary, activation, sampling compiled",
        "dtype auto": f"{dtype} (activations {backend.activation_dtype})".replace("torch.", ""),
    }
