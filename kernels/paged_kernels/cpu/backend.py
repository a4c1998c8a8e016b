"""The CPU backend: every op of `interface.Backend` on compiled kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paged_kernels.cpu import sampling
from paged_kernels.cpu.build import cpu_flags
from paged_kernels.cpu.kv_cache import CpuKVCache
from paged_kernels.cpu.linear import (
    OneDnnLinear,
    PackedEmbedding,
    PackedLinear,
    PackedWeight,
    bf16_is_lossless,
    has_bf16_dot,
)
from paged_kernels.cpu.ops import FusedOps
from paged_kernels.cpu.quantized import make_quantized
from paged_kernels.interface import (
    AttentionMeta,
    Embedding,
    GroupedLinear,
    KVCache,
    Linear,
    LogitSummary,
    PenaltyRows,
    SamplingRows,
)
from paged_kernels.quantized import QuantizedWeight, WeightFormat
from paged_kernels.reference import ReferenceBackend, ReferenceGroupedLinear


def _layout_fits(block_size: int, head_dim: int) -> bool:
    return block_size % 16 == 0 and head_dim % 16 == 0


class CpuBackend:
    """Run dtype float32 or bfloat16.

    Activations are float32, except in a bfloat16 run on kernels with bf16 dot products. Weights of a float32 run lie in
    memory as bfloat16 where that loses nothing. Caches whose block size or head size is no multiple of 16 are the
    reference's, and so are the ops on them.

    No row's bits depend on the batch, except where products are oneDNN's: on processors with AMX, unless the backend is
    to be `deterministic`.

    Raises ValueError for another dtype, and for a cache that would be the reference's in a deterministic run.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, deterministic: bool = False) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype}: the CPU kernels run float32 or bfloat16")
        self.dtype = dtype
        self._deterministic = deterministic
        half = dtype == torch.bfloat16 and has_bf16_dot(library)
        self.activation_dtype = torch.bfloat16 if half else torch.float32
        tiles = half and not deterministic and "amx_bf16" in cpu_flags()
        self.uses_onednn = tiles and OneDnnLinear.works(torch.bfloat16)
        self._library = library
        self._ops = FusedOps(library)
        self._reference = ReferenceBackend(self.activation_dtype)

    def _pack(self, weight: Tensor) -> PackedWeight:
        half = self.dtype == torch.bfloat16 or bf16_is_lossless(weight)
        return PackedWeight(self._library, weight, torch.bfloat16 if half else torch.float32)

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self.uses_onednn:
            return OneDnnLinear(weight.to(self.activation_dtype), bias)
        return PackedLinear(self._pack(weight), bias, self.activation_dtype)

    def keeps(self, weight_format: WeightFormat) -> bool:
        return weight_format.kind != "group" or weight_format.group_size is None or weight_format.group_size % 2 == 0

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear | None:
        if not self.keeps(weight.format):
            return None
        return make_quantized(self._library, weight, bias, self.activation_dtype)

    def make_grouped(self, weight: Tensor, bias: Tensor | None = None) -> GroupedLinear:
        biases = [None] * len(weight) if bias is None else list(bias)
        return ReferenceGroupedLinear([self.make_linear(w, b) for w, b in zip(weight, biases, strict=True)])

    def make_embedding(self, weight: Tensor) -> Embedding:
        return PackedEmbedding(self._pack(weight), self.activation_dtype)

    def make_tied(self, weight: Tensor) -> tuple[Embedding, Linear]:
        packed = self._pack(weight)
        return PackedEmbedding(packed, self.activation_dtype), PackedLinear(packed, None, torch.float32)

    def make_head(self, weight: Tensor) -> Linear:
        return PackedLinear(self._pack(weight), None, torch.float32)

    def make_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVCache:
        if _layout_fits(block_size, head_dim):
            return CpuKVCache(num_layers, num_blocks, block_size, num_kv_heads, head_dim, self.dtype)
        if self._deterministic:
            raise ValueError(
                f"deterministic: no kernels for heads of {head_dim} in blocks of {block_size}; multiples of 16 have"
            )
        reference = ReferenceBackend(self.dtype)
        return reference.make_kv_cache(num_layers, num_blocks, block_size, num_kv_heads, head_dim)

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        return 2 * num_layers * block_size * num_kv_heads * head_dim * self.dtype.itemsize

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.rms_norm(x, weight, eps, self.activation_dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.add_rms_norm(x, residual, weight, eps)

    def rope_and_store(
        self,
        qkv: Tensor,
        meta: AttentionMeta,
        rope: Tensor,
        kv: KVCache,
        layer: int,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        if isinstance(kv, CpuKVCache):
            return self._ops.rope_and_store(qkv, meta, rope, kv, layer, num_heads, q_norm, k_norm, eps)
        return self._reference.rope_and_store(qkv, meta, rope, kv, layer, num_heads, q_norm, k_norm, eps)

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(kv, CpuKVCache):
            return self._ops.attention(q, kv, layer, meta, scale, window, softcap, sinks)
        return self._reference.attention(q, kv, layer, meta, scale, window, softcap, sinks)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._ops.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor, approximate: bool = False) -> Tensor:
        return self._ops.gelu_mul(gate_up, approximate)

    def sample(self, logits: Tensor, rows: SamplingRows, vocab_size: int) -> Tensor:
        return sampling.sample(self._library, logits, rows, vocab_size)

    def mask(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        sampling.mask(self._library, logits, rows, allowed)

    def penalize(self, logits: Tensor, rows: PenaltyRows) -> None:
        sampling.penalize(self._library, logits, rows)

    def summarize(self, logits: Tensor, token_ids: Tensor, k: int, vocab_size: int) -> LogitSummary:
        return sampling.summarize(self._library, logits, token_ids, k, vocab_size)
