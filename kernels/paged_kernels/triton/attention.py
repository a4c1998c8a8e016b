"""Paged attention: one launch for any mix of prompt chunks and decodes.

A program takes a tile of query rows, the heads that share a key head packed beside each other, and walks over the keys
its rows may see, gathered through the block table, with the softmax computed along the way. Where that would leave
processors idle the keys are cut into pieces, each piece writes its result with the logarithm of its softmax sum (base
2), and a second kernel joins them. A prefix that neighbouring sequences share is read once for all their queries and
joined in the same way: it is just one more piece ("Cascade Inference", FlashInfer, 2024).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.interface import AttentionMeta
from paged_kernels.triton.kv_cache import TritonKVCache
from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import (
    MIN_TILE,
    AttentionSettings,
    Chip,
    attention_settings,
    next_power_of_2,
)


@triton.jit
def _attend(
    q,  # [BLOCK_M, DEPTH]
    acc,  # [BLOCK_M, DEPTH] float32
    largest,  # [BLOCK_M] float32
    total,  # [BLOCK_M] float32
    start,
    stop,
    kv_start,
    kv_stop,
    position,  # [BLOCK_M], last key that a row sees
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
    kv_head,
    scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The online softmax over keys [start, stop); without MASKED every row sees all of them."""
    dim = tl.arange(0, DEPTH)
    for n in range(start, stop, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = (key >= kv_start) & (key < kv_stop)
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(table + key // BLOCK_SIZE)
        cell = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        k_at = k_cache + cell[None, :] * HEAD_DIM + dim[:, None]
        v_at = v_cache + cell[:, None] * HEAD_DIM + dim[None, :]
        if MASKED and DEPTH > HEAD_DIM:
            k = tl.load(k_at, mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
        elif DEPTH > HEAD_DIM:
            k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        if SCALED:  # by way of float32: the interpreter knows no other way to bfloat16
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SCALED:
            if MASKED:
                score *= tl.load(k_scale + cell, mask=inside, other=0.0)[None, :]
            else:
                score *= tl.load(k_scale + cell)[None, :]
        if SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
            score = softcap * (2 * tl.sigmoid(score * (2 * scale / softcap)) - 1) * 1.4426950408889634
        else:
            score = score * (scale * 1.4426950408889634)
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        else:
            base = new_largest
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weight, axis=1)
        if SCALED:
            if MASKED:
                weight *= tl.load(v_scale + cell, mask=inside, other=0.0)[None, :]
            else:
                weight *= tl.load(v_scale + cell)[None, :]
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return acc, largest, total


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"])
def _attention_kernel(
    q,  # [T, NUM_HEADS, HEAD_DIM]
    k_cache,  # [NB, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_cache,
    k_scale,  # [NB, BLOCK_SIZE, NUM_KV_HEADS] float32
    v_scale,
    cu_seqlens_q,  # [S + 1] int32
    seq_lens,  # [S] int32
    kv_starts,  # [S] int32, first key to look at
    block_tables,  # [S, max_blocks] int32
    sinks,  # [NUM_HEADS] float32
    out,  # [T, NUM_HEADS, HEAD_DIM], or [T, NUM_HEADS, SLOTS, HEAD_DIM] float32
    lse,  # [T, NUM_HEADS, SLOTS] float32
    scale,
    softcap,
    num_seqs,
    num_tiles,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if ONE_TILE:
        seq = tl.program_id(0)
        tile = 0
    else:  # late tiles see most keys, so they go first; tile numbers have a gap after most sequences
        number = num_tiles - 1 - tl.program_id(0)
        low = 0
        high = num_seqs
        while low < high:
            middle = (low + high) // 2
            if tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= number:
                low = middle + 1
            else:
                high = middle
        seq = low - 1
        tile = number - tl.load(cu_seqlens_q + seq) // BLOCK_Q - seq

    first_token = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - first_token
    first_query = tile * BLOCK_Q
    if first_query >= num_queries:
        return

    seq_len = tl.load(seq_lens + seq)
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    exists = (row < BLOCK_Q * GROUP) & (query < num_queries)
    head = kv_head * GROUP + row % GROUP
    if CAUSAL:
        context = seq_len - num_queries
        first_position = context + first_query
        kv_stop = tl.minimum(seq_len, first_position + BLOCK_Q)
        position = context + query
    else:
        first_position = seq_len - 1
        kv_stop = seq_len
        position = tl.full([BLOCK_M], 2147483647, tl.int32)
    kv_start = 0
    if STARTS:
        kv_start = tl.load(kv_starts + seq)
    if WINDOW > 0:
        kv_start = tl.maximum(kv_start, first_position - WINDOW + 1)

    # This piece's keys [start, stop); every row sees those before full_stop.
    if WINDOW > 0:  # steps begin at the same keys wherever the tile does
        steps = tl.cdiv(kv_stop, BLOCK_N) - kv_start // BLOCK_N
        piece = tl.cdiv(steps, SPLITS) * BLOCK_N
        start = kv_start // BLOCK_N * BLOCK_N + split * piece
    else:
        piece = tl.cdiv(tl.cdiv(tl.maximum(kv_stop - kv_start, 0), BLOCK_N), SPLITS) * BLOCK_N
        start = kv_start + split * piece
    stop = tl.minimum(start + piece, kv_stop)
    if WINDOW > 0:
        full_stop = start
    else:
        full_stop = kv_start + (first_position + 1 - kv_start) // BLOCK_N * BLOCK_N
        full_stop = tl.maximum(start, tl.minimum(stop, full_stop))

    dim = tl.arange(0, DEPTH)
    line = (first_token + query).to(tl.int64) * NUM_HEADS + head
    q_mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + line[:, None] * HEAD_DIM + dim[None, :], mask=q_mask, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=exists, other=0.0) * 1.4426950408889634
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([BLOCK_M, DEPTH], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    if WINDOW == 0:
        acc, largest, total = _attend(
            queries, acc, largest, total, start, full_stop, kv_start, kv_stop, position,
            k_cache, v_cache, k_scale, v_scale, table, kv_head, scale, softcap,
            BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DEPTH, BLOCK_N, False, WINDOW, SOFTCAP, SCALED,
        )  # fmt: skip
    acc, largest, total = _attend(
        queries, acc, largest, total, full_stop, stop, kv_start, kv_stop, position,
        k_cache, v_cache, k_scale, v_scale, table, kv_head, scale, softcap,
        BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DEPTH, BLOCK_N, True, WINDOW, SOFTCAP, SCALED,
    )  # fmt: skip

    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if SLOTS == 1:
        tl.store(out + line[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=q_mask)
    else:
        cell = line * SLOTS + FIRST_SLOT + split
        tl.store(out + cell[:, None] * HEAD_DIM + dim[None, :], result, mask=q_mask)
        tl.store(lse + cell, tl.where(total == 0, float("-inf"), largest + tl.log2(total)), mask=exists)


@triton.jit
def _join_kernel(
    partial,  # [T * NUM_HEADS, SLOTS, HEAD_DIM] float32
    lse,  # [T * NUM_HEADS, SLOTS] float32
    out,  # [T * NUM_HEADS, HEAD_DIM]
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DEPTH: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS_BLOCK)
    dim = tl.arange(0, DEPTH)
    sums = tl.load(lse + line * SLOTS + slot, mask=slot < SLOTS, other=float("-inf"))
    largest = tl.max(sums, axis=0)
    weight = tl.exp2(sums - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight, axis=0)
    used = (sums != float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    pieces = tl.load(partial + (line * SLOTS + slot)[:, None] * HEAD_DIM + dim[None, :], mask=used, other=0.0)
    joined = tl.sum(pieces * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(out + line * HEAD_DIM + dim, joined.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def attention(
    chip: Chip,
    q: Tensor,
    kv: TritonKVCache,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """`interface.Backend.attention` of q [T, num_heads, head_dim] into out of the same shape.

    out must be zero where a token belongs to no sequence. Raises ValueError where q does not fit the cache.
    """
    tokens, num_heads, head_dim = q.shape
    if head_dim != kv.head_dim or num_heads % kv.num_kv_heads or not q.is_contiguous():
        raise ValueError(
            f"q: {num_heads} contiguous heads of {head_dim} expected to fit a cache of {kv.num_kv_heads} heads of "
            f"{kv.head_dim}"
        )
    prefixes = None if window or chip.same_tiles else meta.shared_prefixes

    def settings(num_seqs: int, max_seqlen_q: int, max_seq_len: int) -> AttentionSettings:
        return attention_settings(
            chip,
            num_tokens=tokens,
            num_seqs=num_seqs,
            max_seqlen_q=max_seqlen_q,
            max_seq_len=min(max_seq_len, window) if window else max_seq_len,
            num_heads=num_heads,
            num_kv_heads=kv.num_kv_heads,
            head_dim=head_dim,
            itemsize=q.itemsize,
            kv_itemsize=kv.dtype.itemsize,
        )

    def launch(
        chosen: AttentionSettings,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        max_seqlen_q: int,
        *,
        first_slot: int,
        causal: bool,
        starts: Tensor | None,
        with_sinks: bool,
    ) -> Launch:
        num_seqs = len(seq_lens)
        block_q = chosen.block_m // (num_heads // kv.num_kv_heads)
        one_tile = max_seqlen_q <= block_q
        num_tiles = num_seqs if one_tile else tokens // block_q + num_seqs
        return Launch(
            _attention_kernel,
            (num_tiles, kv.num_kv_heads, chosen.num_splits),
            {
                "q": q,
                "k_cache": kv.k[layer],
                "v_cache": kv.v[layer],
                "k_scale": kv.k_scale[layer],
                "v_scale": kv.v_scale[layer],
                "cu_seqlens_q": cu_seqlens_q,
                "seq_lens": seq_lens,
                "kv_starts": seq_lens if starts is None else starts,
                "block_tables": block_tables,
                "sinks": lse if sinks is None else sinks,
                "out": out if slots == 1 else partial,
                "lse": lse,
                "scale": scale,
                "softcap": softcap,
                "num_seqs": num_seqs,
                "num_tiles": num_tiles,
                "table_stride": block_tables.stride(0),
            },
            {
                "NUM_HEADS": num_heads,
                "NUM_KV_HEADS": kv.num_kv_heads,
                "HEAD_DIM": head_dim,
                "DEPTH": max(MIN_TILE, next_power_of_2(head_dim)),
                "BLOCK_SIZE": kv.block_size,
                "BLOCK_M": chosen.block_m,
                "BLOCK_N": chosen.block_n,
                "SPLITS": chosen.num_splits,
                "SLOTS": slots,
                "FIRST_SLOT": first_slot,
                "ONE_TILE": one_tile,
                "CAUSAL": causal,
                "STARTS": starts is not None,
                "WINDOW": window,
                "SOFTCAP": softcap > 0,
                "SINKS": with_sinks and sinks is not None,
                "SCALED": kv.quantized,
            },
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )

    own = settings(len(meta.seq_lens), meta.max_seqlen_q, meta.max_seq_len)
    shared = None
    slots = own.num_splits
    if prefixes is not None:
        shared = settings(len(prefixes.prefix_lens), prefixes.max_tokens, prefixes.max_prefix_len)
        slots += shared.num_splits
    if slots == 1:
        partial = lse = q.new_empty(1, dtype=torch.float32)
    else:
        partial = q.new_empty(tokens, num_heads, slots, head_dim, dtype=torch.float32)
        lse = q.new_full((tokens, num_heads, slots), float("-inf"), dtype=torch.float32)

    launches = [
        launch(
            own,
            meta.cu_seqlens_q,
            meta.seq_lens,
            meta.block_tables,
            meta.max_seqlen_q,
            first_slot=0,
            causal=True,
            starts=None if prefixes is None else prefixes.seq_starts,
            with_sinks=True,
        )
    ]
    if prefixes is not None and shared is not None:
        launches.append(
            launch(
                shared,
                prefixes.cu_tokens,
                prefixes.prefix_lens,
                prefixes.block_tables,
                prefixes.max_tokens,
                first_slot=own.num_splits,
                causal=False,
                starts=None,
                with_sinks=False,
            )
        )
    if slots > 1:
        launches.append(
            Launch(
                _join_kernel,
                (tokens * num_heads,),
                {"partial": partial, "lse": lse, "out": out},
                {
                    "SLOTS": slots,
                    "SLOTS_BLOCK": next_power_of_2(slots),
                    "HEAD_DIM": head_dim,
                    "DEPTH": next_power_of_2(head_dim),
                },
                num_warps=2,
            )
        )
    return launches
