"""How much of a GPU is left for the KV cache once the model has shown what it needs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paged_infer.config import ConfigError


def free_gpu_bytes(device: torch.device, utilization: float) -> int:
    """What a run may still take of the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - utilization))


def kv_cache_bytes(total: int, utilization: float, others: int, peak: int) -> int:
    """Bytes for the cache.

    Args:
        total: memory of the GPU. utilization: share of it that this process and the others may take together.
        others: bytes that are in use and not this process's tensors: other processes, CUDA itself.
        peak: most bytes of tensors at a time in a step of the largest size.

    Raises:
        ConfigError: nothing is left.
    """
    left = int(total * utilization) - others - peak
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization={utilization:g}: nothing is left for the KV cache; of {total >> 20} MiB the model "
            f"and its largest step take {peak >> 20} MiB, others {others >> 20} MiB; raise it, free the GPU, or lower "
            "max_num_batched_tokens"
        )
    return left


def measured_kv_cache_bytes(device: torch.device, utilization: float, largest_step: Callable[[], object]) -> int:
    """The same, measured around one run of `largest_step`, whose tensors are gone when it returns."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return kv_cache_bytes(total, utilization, others, peak)
