"""The paged cache of the CPU kernels: layouts that one vector load can use, memory that is taken as it is touched."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PANEL = 16


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a private anonymous mapping: a page, a huge one if it can be, takes memory when it is first written."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class CpuKVCache:
    """Keys and values of all layers, float32 or bfloat16.

    A block's keys are stored by dimension, its values by token. float32: k [L, NB, HK, D, BS], v [L, NB, HK, BS, D].
    bfloat16 keeps two neighbours along the contracted axis together: k [L, NB, HK, D/2, BS, 2],
    v [L, NB, HK, BS/2, D, 2].

    Raises ValueError unless block_size and head_dim are multiples of 16.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        if block_size < _PANEL or block_size % _PANEL:
            raise ValueError(f"block_size={block_size}: the CPU kernels need a multiple of {_PANEL}")
        if head_dim < _PANEL or head_dim % _PANEL:
            raise ValueError(f"head_dim={head_dim}: the CPU kernels need a multiple of {_PANEL}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        outer = (num_layers, num_blocks, num_kv_heads)
        if dtype == torch.float32:
            self.k = _lazy_zeros((*outer, head_dim, block_size), dtype)
            self.v = _lazy_zeros((*outer, block_size, head_dim), dtype)
        elif dtype == torch.bfloat16:
            self.k = _lazy_zeros((*outer, head_dim // 2, block_size, 2), dtype)
            self.v = _lazy_zeros((*outer, block_size // 2, head_dim, 2), dtype)
        else:
            raise ValueError(f"dtype {dtype}: the CPU cache holds float32 or bfloat16")
        self._layer_bytes = self.k.nbytes // num_layers
        self._addresses = (self.k.data_ptr(), self.v.data_ptr())

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where keys and values of a layer start. Raises IndexError for a layer that is not there."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        k, v = self._addresses
        return k + layer * self._layer_bytes, v + layer * self._layer_bytes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.k[:, destination] = self.k[:, source]
            self.v[:, destination] = self.v[:, source]

    def export(self, layer: int) -> tuple[Tensor, Tensor]:
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        k, v = self.k[layer], self.v[layer]
        if self.dtype == torch.float32:
            k, v = k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3)
        else:
            k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 2, 4, 1, 3)
        return k.reshape(shape).to(torch.float32, copy=True), v.reshape(shape).to(torch.float32, copy=True)
