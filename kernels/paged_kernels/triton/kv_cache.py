"""The paged cache in natural layout; 8-bit caches carry a scale for every token and key head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import cdiv, chunk_settings

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest magnitude of each 8-bit cache dtype; a token's scale maps its own largest element onto it."""

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LARGEST)


class TritonKVCache:
    """Keys and values of all layers: k, v [L, NB, BS, HK, D]; with int8 or float8_e4m3fn also their scales
    k_scale, v_scale [L, NB, BS, HK] float32, so that an element is scale * number.

    Raises ValueError for a dtype that is none of `KV_DTYPES`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {dtype}: expected one of {', '.join(map(str, KV_DTYPES))}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.quantized = dtype in LARGEST
        cells = (num_layers, num_blocks, block_size, num_kv_heads)
        self.k = torch.zeros(*cells, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.k_scale = torch.zeros(cells if self.quantized else (num_layers, 0), dtype=torch.float32, device=device)
        self.v_scale = torch.zeros_like(self.k_scale)

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        per_head = head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in LARGEST else 0)
        return 2 * num_layers * block_size * num_kv_heads * per_head

    def _tensors(self) -> list[Tensor]:
        return [self.k, self.v, self.k_scale, self.v_scale] if self.quantized else [self.k, self.v]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies happen in order: a later pair may read what an earlier one wrote."""
        for batch in _independent(pairs):
            ends = torch.tensor(batch, dtype=torch.int64).to(self.k.device, non_blocking=True)
            for tensor in self._tensors():
                copy_blocks(tensor, ends).run()

    def export(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = self.k[layer].to(torch.float32, copy=True), self.v[layer].to(torch.float32, copy=True)
        if self.quantized:
            k *= self.k_scale[layer, ..., None]
            v *= self.v_scale[layer, ..., None]
        return k, v


def _independent(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in runs that may happen at once: within a run no block is written that another pair touches."""
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if not runs or source in written or destination in read or destination in written:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return runs


@triton.jit
def _copy_blocks_kernel(
    cache,  # [L, NB, SIZE] 4-byte words
    ends,  # [P, 2] int64
    layer_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ends + 2 * pair)
    destination = tl.load(ends + 2 * pair + 1)
    base = cache + layer * layer_stride
    values = tl.load(base + source * SIZE + word, mask=word < SIZE)
    tl.store(base + destination * SIZE + word, values, mask=word < SIZE)


def copy_blocks(cache: Tensor, ends: Tensor) -> Launch:
    """Copy blocks ends[i, 0] to ends[i, 1] of cache [L, NB, ...], contiguous, in every layer.

    ends [P, 2] int64; no destination may be another pair's source or destination.
    """
    layers, blocks = cache.shape[:2]
    words = cache.view(layers, blocks, -1)
    if words.shape[-1] * words.itemsize % 4 == 0:
        words = words.view(torch.int32)
    size = words.shape[-1]
    settings = chunk_settings(size, 2048)
    return Launch(
        _copy_blocks_kernel,
        (len(ends), layers, cdiv(size, settings.block)),
        {"cache": words, "ends": ends, "layer_stride": words.stride(0)},
        {"SIZE": size, "BLOCK": settings.block},
        num_warps=settings.num_warps,
    )
