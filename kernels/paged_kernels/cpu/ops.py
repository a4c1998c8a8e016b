"""Typed calls into the compiled kernels: tensors are checked, outputs allocated, pointers passed.

Activations are float32 or bfloat16. A cache has the dtype of the run: float32 with float32 activations, bfloat16 with
either. Values inside index tensors (slots, positions, block ids) are trusted: checking them would cost a pass.
Every function raises ValueError for a tensor of the wrong dtype, shape or memory layout.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paged_kernels.cpu.kv_cache import CpuKVCache
from paged_kernels.interface import AttentionMeta

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


def _check(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a contiguous tensor of this dtype and shape."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(
            f"{name}: expected contiguous CPU {dtype} {list(shape)}, got {x.dtype} {list(x.shape)} "
            f"with strides {list(x.stride())} on {x.device}"
        )
    return x.data_ptr()


def _suffix(name: str, dtype: torch.dtype) -> str:
    if dtype not in _SUFFIX:
        raise ValueError(f"{name}: expected float32 or bfloat16, got {dtype}")
    return _SUFFIX[dtype]


def _cache_suffix(activations: torch.dtype, kv: CpuKVCache) -> str:
    suffixes = f"{_suffix('activations', activations)}_{_suffix('kv', kv.dtype)}"
    if suffixes == "bf16_f32":
        raise ValueError("bfloat16 activations need a bfloat16 cache")
    return suffixes


class FusedOps:
    """The fused and attention kernels of one compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        arguments = {
            "rms_norm": [*[_POINTER] * 3, _INT, _INT, _FLOAT],
            "add_rms_norm": [*[_POINTER] * 4, _INT, _INT, _FLOAT],
            "silu_mul": [*[_POINTER] * 2, _INT, _INT],
            "gelu_mul": [*[_POINTER] * 2, _INT, _INT],
            "gelu_tanh_mul": [*[_POINTER] * 2, _INT, _INT],
            "rope_and_store": [*[_POINTER] * 9, *[_INT] * 6, _FLOAT],
            "attention": [*[_POINTER] * 8, *[_INT] * 7, _FLOAT, _INT, _FLOAT],
        }
        self._functions = {}
        for name, argtypes in arguments.items():
            uses_cache = name in ("rope_and_store", "attention")
            for suffix in ("f32_f32", "f32_bf16", "bf16_bf16") if uses_cache else ("f32", "bf16"):
                function = getattr(library, f"paged_{name}_{suffix}")
                function.argtypes, function.restype = argtypes, None
                self._functions[f"{name}_{suffix}"] = function

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x [T, H] float32, weight [H] float32 -> [T, H] in `dtype`."""
        tokens, hidden = x.shape
        out = x.new_empty(tokens, hidden, dtype=dtype)
        self._functions[f"rms_norm_{_suffix('dtype', dtype)}"](
            _check("x", x, torch.float32, tokens, hidden),
            _check("weight", weight, torch.float32, hidden),
            out.data_ptr(),
            tokens,
            hidden,
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] float32 += x [T, H], in place; returns its norm in the dtype of x."""
        tokens, hidden = x.shape
        out = x.new_empty(tokens, hidden)
        self._functions[f"add_rms_norm_{_suffix('x', x.dtype)}"](
            _check("x", x, x.dtype, tokens, hidden),
            _check("residual", residual, torch.float32, tokens, hidden),
            _check("weight", weight, torch.float32, hidden),
            out.data_ptr(),
            tokens,
            hidden,
            eps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]."""
        return self._gated("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Tensor, approximate: bool) -> Tensor:
        """[T, 2I] -> [T, I]."""
        return self._gated("gelu_tanh_mul" if approximate else "gelu_mul", gate_up)

    def _gated(self, name: str, gate_up: Tensor) -> Tensor:
        tokens, doubled = gate_up.shape
        if doubled % 2:
            raise ValueError(f"gate_up: expected an even last dimension, got {doubled}")
        out = gate_up.new_empty(tokens, doubled // 2)
        self._functions[f"{name}_{_suffix('gate_up', gate_up.dtype)}"](
            _check("gate_up", gate_up, gate_up.dtype, tokens, doubled), out.data_ptr(), tokens, doubled // 2
        )
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        meta: AttentionMeta,
        rope: Tensor,
        kv: CpuKVCache,
        layer: int,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See `interface.Backend.rope_and_store`."""
        tokens, head_dim = len(qkv), kv.head_dim
        rotary_dim = rope.shape[1]
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(f"rope: expected an even rotary_dim of at most {head_dim}, got {rotary_dim}")
        q = qkv.new_empty(tokens, num_heads, head_dim)
        self._functions[f"rope_and_store_{_cache_suffix(qkv.dtype, kv)}"](
            _check("qkv", qkv, qkv.dtype, tokens, (num_heads + 2 * kv.num_kv_heads) * head_dim),
            _check("positions", meta.positions, torch.int32, tokens),
            _check("slot_mapping", meta.slot_mapping, torch.int64, tokens),
            _check("rope", rope, torch.float32, len(rope), rotary_dim),
            None if q_norm is None else _check("q_norm", q_norm, torch.float32, head_dim),
            None if k_norm is None else _check("k_norm", k_norm, torch.float32, head_dim),
            q.data_ptr(),
            *kv.addresses(layer),
            tokens,
            num_heads,
            kv.num_kv_heads,
            head_dim,
            rotary_dim,
            kv.block_size,
            eps,
        )
        return q

    def attention(
        self,
        q: Tensor,
        kv: CpuKVCache,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `interface.Backend.attention`. Tokens past the last sequence get zeros."""
        tokens, num_heads, head_dim = q.shape
        num_seqs, max_blocks = meta.block_tables.shape
        if head_dim != kv.head_dim or num_heads % kv.num_kv_heads:
            raise ValueError(
                f"q: {num_heads} heads of {head_dim} do not fit a cache of {kv.num_kv_heads} heads of {kv.head_dim}"
            )
        out = q.new_empty(tokens, num_heads * head_dim)
        self._functions[f"attention_{_cache_suffix(q.dtype, kv)}"](
            _check("q", q, q.dtype, tokens, num_heads, head_dim),
            *kv.addresses(layer),
            _check("cu_seqlens_q", meta.cu_seqlens_q, torch.int32, num_seqs + 1),
            _check("seq_lens", meta.seq_lens, torch.int32, num_seqs),
            _check("block_tables", meta.block_tables, torch.int32, num_seqs, max_blocks),
            None if sinks is None else _check("sinks", sinks, torch.float32, num_heads),
            out.data_ptr(),
            tokens,
            num_seqs,
            max_blocks,
            num_heads,
            kv.num_kv_heads,
            head_dim,
            kv.block_size,
            scale,
            window,
            softcap,
        )
        return out
