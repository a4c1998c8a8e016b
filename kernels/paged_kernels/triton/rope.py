"""Per-head norms, rotary embedding and the store of keys and values, in one pass over qkv."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.interface import AttentionMeta
from paged_kernels.triton.kv_cache import LARGEST, TritonKVCache
from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import cdiv, heads_settings, next_power_of_2


@triton.jit
def _store_head(pointer, lo, hi, rest, dim, rest_dim, mask, rest_mask, HALF: tl.constexpr, REST: tl.constexpr):
    kind = pointer.dtype.element_ty
    if kind == tl.int8:  # round half to even, as torch does
        lo = round_half_even(lo)
        hi = round_half_even(hi)
        rest = round_half_even(rest)
    tl.store(pointer + dim, lo.to(kind), mask=mask)
    tl.store(pointer + HALF + dim, hi.to(kind), mask=mask)
    if REST > 0:
        tl.store(pointer + 2 * HALF + rest_dim, rest.to(kind), mask=rest_mask)


@triton.jit
def round_half_even(x):
    """What torch's `round` does."""
    floor = tl.floor(x)
    above = x - floor
    odd = floor - 2 * tl.floor(floor * 0.5)
    up = (above > 0.5) | ((above == 0.5) & (odd == 1))
    return floor + tl.where(up, 1.0, 0.0)


@triton.jit
def _rope_and_store_kernel(
    qkv,  # [T, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    positions,  # [T] int32
    slot_mapping,  # [T] int64
    rope,  # [max_position, 2 * HALF] float32
    q_norm,  # [HEAD_DIM] float32
    k_norm,  # [HEAD_DIM] float32
    q_out,  # [T, NUM_HEADS, HEAD_DIM]
    k_cache,  # [slots, NUM_KV_HEADS, HEAD_DIM]
    v_cache,
    k_scale,  # [slots, NUM_KV_HEADS] float32
    v_scale,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    dim = tl.arange(0, HALF_BLOCK)[None, :]
    rest_dim = tl.arange(0, REST_BLOCK)[None, :]
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    mask = exists & (dim < HALF)
    rest_mask = exists & (rest_dim < REST)

    source = qkv + token * qkv_stride + head * HEAD_DIM
    lo = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(source + HALF + dim, mask=mask, other=0.0).to(tl.float32)
    rest = tl.zeros([HEADS_BLOCK, REST_BLOCK], tl.float32)
    if REST > 0:
        rest = tl.load(source + 2 * HALF + rest_dim, mask=rest_mask, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        squares = tl.sum(lo * lo, axis=1) + tl.sum(hi * hi, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if Q_NORM:
            lo = tl.where(is_q, lo * scale * tl.load(q_norm + dim, mask=dim < HALF, other=0.0), lo)
            hi = tl.where(is_q, hi * scale * tl.load(q_norm + HALF + dim, mask=dim < HALF, other=0.0), hi)
            if REST > 0:
                weight = tl.load(q_norm + 2 * HALF + rest_dim, mask=rest_dim < REST, other=0.0)
                rest = tl.where(is_q, rest * scale * weight, rest)
        if K_NORM:
            lo = tl.where(is_k, lo * scale * tl.load(k_norm + dim, mask=dim < HALF, other=0.0), lo)
            hi = tl.where(is_k, hi * scale * tl.load(k_norm + HALF + dim, mask=dim < HALF, other=0.0), hi)
            if REST > 0:
                weight = tl.load(k_norm + 2 * HALF + rest_dim, mask=rest_dim < REST, other=0.0)
                rest = tl.where(is_k, rest * scale * weight, rest)

    position = tl.load(positions + token).to(tl.int64)
    angles = rope + position * (2 * HALF)
    cos = tl.load(angles + dim, mask=dim < HALF, other=1.0)
    sin = tl.load(angles + HALF + dim, mask=dim < HALF, other=0.0)
    turned = is_q | is_k
    new_lo = tl.where(turned, lo * cos - hi * sin, lo)
    new_hi = tl.where(turned, hi * cos + lo * sin, hi)

    q_row = q_out + (token * NUM_HEADS + head) * HEAD_DIM
    _store_head(q_row, new_lo, new_hi, rest, dim, rest_dim, is_q & mask, is_q & rest_mask, HALF, REST)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        if LARGEST > 0:
            largest = tl.maximum(tl.max(tl.abs(new_lo), axis=1), tl.max(tl.abs(new_hi), axis=1))
            if REST > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
            unit = (largest / LARGEST)[:, None]
            divisor = tl.where(unit > 0, unit, 1.0)
            new_lo = new_lo / divisor
            new_hi = new_hi / divisor
            rest = rest / divisor
        kv_head = head - NUM_HEADS
        cell = slot * NUM_KV_HEADS + kv_head
        is_v = exists & (head >= NUM_HEADS + NUM_KV_HEADS)
        k_row = k_cache + cell * HEAD_DIM
        v_row = v_cache + (cell - NUM_KV_HEADS) * HEAD_DIM
        _store_head(k_row, new_lo, new_hi, rest, dim, rest_dim, is_k & mask, is_k & rest_mask, HALF, REST)
        _store_head(v_row, new_lo, new_hi, rest, dim, rest_dim, is_v & mask, is_v & rest_mask, HALF, REST)
        if LARGEST > 0:
            tl.store(k_scale + cell, unit, mask=is_k)
            tl.store(v_scale + cell - NUM_KV_HEADS, unit, mask=is_v)


def rope_and_store(
    qkv: Tensor,
    meta: AttentionMeta,
    rope: Tensor,
    kv: TritonKVCache,
    layer: int,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_out: Tensor,
) -> Launch:
    """`interface.Backend.rope_and_store` into q_out [T, num_heads, head_dim]."""
    num_rows = num_heads + 2 * kv.num_kv_heads
    rotary_dim = rope.shape[1]
    if qkv.dim() != 2 or qkv.shape[1] != num_rows * kv.head_dim or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv: expected [T, {num_rows * kv.head_dim}] with unit stride, got {list(qkv.shape)} "
            f"with strides {list(qkv.stride())}"
        )
    if rope.dtype != torch.float32 or not rope.is_contiguous() or rotary_dim % 2 or rotary_dim > kv.head_dim:
        raise ValueError(f"rope: expected contiguous float32 and an even rotary_dim of at most {kv.head_dim}")
    settings = heads_settings(num_rows, kv.head_dim)
    half = rotary_dim // 2
    return Launch(
        _rope_and_store_kernel,
        (len(qkv), cdiv(num_rows, settings.block)),
        {
            "qkv": qkv,
            "positions": meta.positions,
            "slot_mapping": meta.slot_mapping,
            "rope": rope,
            "q_norm": rope if q_norm is None else q_norm,
            "k_norm": rope if k_norm is None else k_norm,
            "q_out": q_out,
            "k_cache": kv.k[layer],
            "v_cache": kv.v[layer],
            "k_scale": kv.k_scale[layer],
            "v_scale": kv.v_scale[layer],
            "qkv_stride": qkv.stride(0),
            "eps": eps,
        },
        {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": kv.num_kv_heads,
            "HEAD_DIM": kv.head_dim,
            "HALF": half,
            "HALF_BLOCK": next_power_of_2(half),
            "REST_BLOCK": next_power_of_2(kv.head_dim - rotary_dim),
            "HEADS_BLOCK": settings.block,
            "Q_NORM": q_norm is not None,
            "K_NORM": k_norm is not None,
            "LARGEST": LARGEST.get(kv.dtype, 0.0),
        },
        num_warps=settings.num_warps,
    )
