"""How much memory there is and how much of it the KV cache gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paged_infer.config import ConfigError, EngineConfig

WORKSPACE_BYTES = 1 << 30
"""Left for the interpreter, the libraries, activations and the results on their way out."""

KV_SHARE = 0.8
"""Share of what remains after weights and workspace that the KV cache may take."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes go. `max_model_len` is the longest sequence, clipped to what the cache can hold."""

    available_bytes: int
    weight_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def sequences(self, tokens: int) -> int:
        """Sequences of that many tokens that fit at once, prefix sharing not counted."""
        return self.num_blocks // max(1, -(-tokens // self.block_size))


def available_memory() -> int:
    """Bytes this process may still take: the machine's free memory, or the container's limit where that is lower."""
    import psutil  # a run on a GPU does without

    free = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            free = min(free, max(0, int(limit) - int(used)))
    return free


def plan(
    config: EngineConfig, *, context_len: int, weight_bytes: int, block_bytes: int, free_bytes: int | None = None
) -> MemoryPlan:
    """Size the KV cache.

    `num_kv_blocks` or `kv_cache_memory` decide when given; else the cache takes `KV_SHARE` of the memory left beside
    weights and workspace, but no more than `max_num_seqs` sequences of full length can use.

    Args:
        context_len: the model's own context length.
        weight_bytes: the packed weights.
        block_bytes: one block of all layers (`Backend.kv_bytes_per_block`).
        free_bytes: what the run may take of a device's memory; None = of this machine's.

    Raises:
        ConfigError: not even one block fits.
    """
    free = available_memory() if free_bytes is None else free_bytes
    max_model_len = min(config.max_model_len or context_len, context_len)
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // block_bytes
    else:
        num_blocks = min(useful, int(KV_SHARE * (free - weight_bytes - WORKSPACE_BYTES)) // block_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"no memory for the KV cache: {free >> 20} MiB free, weights take {weight_bytes >> 20} MiB, one block of "
            f"{config.block_size} tokens takes {block_bytes} bytes; give more memory, or --dtype bfloat16, or a "
            f"larger --kv-cache-memory"
        )
    return MemoryPlan(
        available_bytes=free,
        weight_bytes=weight_bytes,
        block_bytes=block_bytes,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=min(max_model_len, num_blocks * config.block_size),
    )
