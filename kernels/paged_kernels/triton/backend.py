"""The GPU backend: every op of `interface.Backend` on Triton kernels, dense products on cuBLAS."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

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
from paged_kernels.quantized import BLOCK, GroupWeight, QuantizedWeight, WeightFormat
from paged_kernels.reference import ReferenceEmbedding
from paged_kernels.triton import activation, norm, sampling
from paged_kernels.triton import logits as edits
from paged_kernels.triton.attention import attention
from paged_kernels.triton.kv_cache import TritonKVCache
from paged_kernels.triton.launch import INTERPRETED
from paged_kernels.triton.linear import DenseLinear, TiledLinear
from paged_kernels.triton.quant import DenseGroupedLinear, GroupLinear, ScaledLinear
from paged_kernels.triton.rope import rope_and_store
from paged_kernels.triton.settings import Chip

_INTERPRETER_CHIP = Chip(processors=4, shared_bytes=232448)


def _chip(device: torch.device) -> Chip:
    if device.type != "cuda":
        return _INTERPRETER_CHIP
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Chip(found.multi_processor_count, 65536, hip=True)
    shared: int = getattr(found, "shared_memory_per_block_optin")  # noqa: B009  (torch's types lack it)
    return Chip(found.multi_processor_count, shared, register_operands=found.major < 9, tensor_memory=found.major == 10)


def _has_float8(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _triton_cache(kv: KVCache) -> TritonKVCache:
    if not isinstance(kv, TritonKVCache):
        raise TypeError(f"the triton backend cannot use a {type(kv).__name__}")
    return kv


class TritonBackend:
    """Activations have the run dtype: float32, bfloat16 or float16.

    Args:
        kv_dtype: of the cache, where it is another than the run dtype: int8 and float8_e4m3fn halve or quarter it.
        deterministic: no row's bits depend on the batch: tiles are the same for all, nothing is split, and dense
            products are ours instead of cuBLAS's.

    Raises ValueError for another dtype, one that the GPU lacks, and for a CPU device where Triton doesn't interpret its
    kernels.
    """

    name = "triton"

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype {dtype}: expected float32, bfloat16 or float16")
        self.device = torch.device(device)
        if self.device.type == "cpu" and not INTERPRETED:
            raise ValueError("triton kernels run on a CPU under its interpreter only: set TRITON_INTERPRET=1")
        self.dtype = dtype
        self.activation_dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        if self.kv_dtype == torch.float8_e4m3fn and self.device.type == "cuda" and not _has_float8(self.device):
            raise ValueError("KV dtype float8_e4m3fn: this GPU has no such numbers; use int8")
        self.chip = replace(_chip(self.device), same_tiles=deterministic)

    def _pack(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype, copy=True).contiguous()

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._dense(self._pack(weight), None if bias is None else self._pack(bias))

    def _dense(self, weight: Tensor, bias: Tensor | None, float32_out: bool = False) -> Linear:
        if self.chip.same_tiles:
            return TiledLinear(weight, bias, self.chip, float32_out)
        return DenseLinear(weight, bias, float32_out)

    def keeps(self, weight_format: WeightFormat) -> bool:
        if weight_format.kind == "group":
            return weight_format.group_size is None or weight_format.group_size % 16 == 0
        float8 = self.device.type != "cuda" or _has_float8(self.device)
        return weight_format.rounds_activations and (weight_format.kind == "int8" or float8)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear | None:
        if not self.keeps(weight.format):
            return None
        bias = None if bias is None else self._pack(bias)

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, copy=True).contiguous()

        if isinstance(weight, GroupWeight):
            permutation = None if weight.permutation is None else put(weight.permutation)
            moved = GroupWeight(
                put(weight.qweight), put(weight.scales), put(weight.zeros), weight.bits, weight.group_size, permutation
            )
            return GroupLinear(moved, bias, self.chip)
        if weight.scales.shape[1] > 1 and weight.shape[1] % BLOCK:
            return None
        return ScaledLinear(put(weight.numbers), put(weight.scales.float()), bias, self.chip)

    def make_grouped(self, weight: Tensor, bias: Tensor | None = None) -> GroupedLinear:
        return DenseGroupedLinear(self._pack(weight), None if bias is None else self._pack(bias), self.chip)

    def make_embedding(self, weight: Tensor) -> Embedding:
        return ReferenceEmbedding(self._pack(weight))

    def make_tied(self, weight: Tensor) -> tuple[Embedding, Linear]:
        packed = self._pack(weight)
        return ReferenceEmbedding(packed), self._dense(packed, None, float32_out=True)

    def make_head(self, weight: Tensor) -> Linear:
        return self._dense(self._pack(weight), None, float32_out=True)

    def make_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVCache:
        return TritonKVCache(num_layers, num_blocks, block_size, num_kv_heads, head_dim, self.kv_dtype, self.device)

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        return TritonKVCache.bytes_per_block(num_layers, block_size, num_kv_heads, head_dim, self.kv_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm.check_norm(x, weight)
        out = torch.empty(x.shape, dtype=self.activation_dtype, device=x.device)
        norm.rms_norm(x, None, weight, eps, out).run()
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm.check_norm(x, weight, residual)
        out = torch.empty(x.shape, dtype=self.activation_dtype, device=x.device)
        norm.rms_norm(x, residual, weight, eps, out).run()
        return out

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
        cache = _triton_cache(kv)
        q = qkv.new_empty(len(qkv), num_heads, cache.head_dim)
        rope_and_store(qkv, meta, rope, cache, layer, num_heads, q_norm, k_norm, eps, q).run()
        return q

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
        out = torch.zeros_like(q)
        for launch in attention(self.chip, q, _triton_cache(kv), layer, meta, scale, window, softcap, sinks, out):
            launch.run()
        return out.flatten(1)

    def _gated(self, gate_up: Tensor, kind: activation.Activation) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        activation.gated(gate_up, out, kind).run()
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, "silu")

    def gelu_mul(self, gate_up: Tensor, approximate: bool = False) -> Tensor:
        return self._gated(gate_up, "gelu_tanh" if approximate else "gelu")

    def sample(self, logits: Tensor, rows: SamplingRows, vocab_size: int) -> Tensor:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for launch in sampling.sample(logits, rows, vocab_size, out):
            launch.run()
        return out

    def mask(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        edits.mask(logits, rows, allowed).run()

    def penalize(self, logits: Tensor, rows: PenaltyRows) -> None:
        for launch in edits.penalize(logits, rows):
            launch.run()

    def summarize(self, logits: Tensor, token_ids: Tensor, k: int, vocab_size: int) -> LogitSummary:
        log_sum_exp = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        ranks = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        edits.summarize(logits, token_ids, vocab_size, log_sum_exp, ranks).run()
        return LogitSummary(log_sum_exp, ranks, edits.top_ids(logits[:, :vocab_size], k))
