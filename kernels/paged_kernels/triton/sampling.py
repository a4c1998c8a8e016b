"""Choosing tokens from logit rows without sorting them.

A cut of a row (top-k, top-p) is a place in the order "likelier first, lower id first among equals": a least logit, and
a greatest id among the ids that have exactly that logit. The logit is found by bisection over the 32 bits of an integer
that sorts as the floats do, the id by bisection over the ids; rows that need no cut skip it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.interface import SamplingRows
from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import cdiv, chunk_settings, next_power_of_2

_CUT_BLOCK = 4096
_DRAW_BLOCK = 1024
_ROW_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "noise_key": torch.int64,
    "sample": torch.int32,
    "position": torch.int32,
}


@triton.jit
def _sort_key(x):
    """float32 -> int64 in [0, 2^32) in the same order; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648)  # as unsigned
    return key.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _cut_kernel(
    logits,  # [R, V] float32
    temperature,  # [R] float32
    top_k,  # [R] int32
    top_p,  # [R] float32
    greedy,  # [R] int64, out: argmax, or -1 for a row that is not usable
    drawn,  # [R] int32, out: whether noise decides
    best_out,  # [R] float32, out: the largest logit
    cut_key,  # [R] int64, out
    cut_id,  # [R] int64, out
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    offset = tl.arange(0, BLOCK)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + offset
        x = tl.load(line + ids, mask=ids < vocab_size, other=float("-inf"))
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        better = x > best
        where = tl.where(better, ids, where)
        best = tl.where(better, x, best)
    top = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == top, where, 2147483647), axis=0)
    usable = (tl.max(broken, axis=0) == 0) & (top > float("-inf"))
    heat = tl.load(temperature + row)
    ratio = tl.abs(top / tl.where(heat > 0, heat, 1.0))
    draws = usable & (heat > 0) & (ratio < float("inf"))
    tl.store(greedy + row, tl.where(usable, chosen, -1).to(tl.int64))
    tl.store(drawn + row, draws.to(tl.int32))
    tl.store(best_out + row, top)

    key = tl.full([], 0, tl.int64)
    last_id = tl.full([], 0, tl.int64) + vocab_size
    k = tl.load(top_k + row).to(tl.int64)
    if draws & (k > 0) & (k < vocab_size):
        # The greatest key that k ids reach.
        low = tl.full([], 0, tl.int64)
        high = tl.full([], 0xFFFFFFFF, tl.int64)
        while low < high:
            middle = (low + high + 1) // 2
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab_size, BLOCK):
                ids = start + offset
                x = tl.load(line + ids, mask=ids < vocab_size, other=0.0)
                count += ((_sort_key(x) >= middle) & (ids < vocab_size)).to(tl.int32)
            if tl.sum(count, axis=0) >= k:
                low = middle
            else:
                high = middle - 1
        key = low
        above = tl.zeros([BLOCK], tl.int32)
        equal = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + offset
            x = tl.load(line + ids, mask=ids < vocab_size, other=0.0)
            sort_key = _sort_key(x)
            above += ((sort_key > key) & (ids < vocab_size)).to(tl.int32)
            equal += ((sort_key == key) & (ids < vocab_size)).to(tl.int32)
        wanted = k - tl.sum(above, axis=0)
        if wanted < tl.sum(equal, axis=0):
            last_id = _nth_equal(line, key, wanted, vocab_size, BLOCK)

    p = tl.load(top_p + row)
    if draws & (p < 1):
        total = _mass(line, key, key, last_id, top, heat, vocab_size, BLOCK)
        goal = p.to(tl.float64) * total
        low = key
        high = _sort_key(top)
        while low < high:  # the greatest key whose likelier and equal ids reach the goal
            middle = (low + high + 1) // 2
            if _mass(line, middle, key, last_id, top, heat, vocab_size, BLOCK) >= goal:
                low = middle
            else:
                high = middle - 1
        before = _mass(line, low + 1, key, last_id, top, heat, vocab_size, BLOCK)
        count = tl.zeros([BLOCK], tl.int32)
        weight = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + offset
            x = tl.load(line + ids, mask=ids < vocab_size, other=float("-inf"))
            same = (_sort_key(x) == low) & (ids < vocab_size) & ((low > key) | (ids <= last_id))
            count += same.to(tl.int32)
            weight = tl.maximum(weight, tl.where(same, tl.exp((x - top) / heat), 0.0))
        each = tl.max(weight, axis=0).to(tl.float64)
        wanted = tl.ceil((goal - before) / tl.where(each > 0, each, 1.0)).to(tl.int64)
        wanted = tl.maximum(wanted, 1)
        if low > key:
            last_id = tl.full([], 0, tl.int64) + vocab_size
        key = low
        if (each > 0) & (wanted < tl.sum(count, axis=0)):
            last_id = _nth_equal(line, key, wanted, vocab_size, BLOCK)
    tl.store(cut_key + row, key)
    tl.store(cut_id + row, last_id)


@triton.jit
def _nth_equal(line, key, n, vocab_size, BLOCK: tl.constexpr):
    """The id of the n-th (from 1) of the ids whose sort key is `key`."""
    low = tl.full([], 0, tl.int64)
    high = tl.full([], 0, tl.int64) + vocab_size - 1
    while low < high:
        middle = (low + high) // 2
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(line + ids, mask=ids < vocab_size, other=0.0)
            count += ((_sort_key(x) == key) & (ids <= middle) & (ids < vocab_size)).to(tl.int32)
        if tl.sum(count, axis=0) >= n:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _mass(line, key, cut_key, cut_id, top, heat, vocab_size, BLOCK: tl.constexpr):
    """Likelihood, relative to the likeliest id, of the ids from `key` up that the cut leaves: float64."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < vocab_size, other=float("-inf"))
        sort_key = _sort_key(x)
        kept = (sort_key > cut_key) | ((sort_key == cut_key) & (ids <= cut_id))
        kept = kept & (sort_key >= key) & (ids < vocab_size)
        total += tl.sum(tl.where(kept, tl.exp((x - top) / heat), 0.0), axis=0).to(tl.float64)
    return total


@triton.jit
def _draw_kernel(
    logits,  # [R, V] float32
    temperature,
    min_p,  # [R] float32
    noise_key,  # [R] int64
    sample,  # [R] int32
    position,  # [R] int32
    drawn,  # [R] int32
    best,  # [R] float32
    cut_key,  # [R] int64
    cut_id,  # [R] int64
    scores,  # [R, CHUNKS] float32, out
    winners,  # [R, CHUNKS] int32, out
    stride,
    vocab_size,
    num_chunks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if tl.load(drawn + row) == 0:
        return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    heat = tl.load(temperature + row)
    top = tl.load(best + row)
    key = tl.load(cut_key + row)
    sort_key = _sort_key(x)
    kept = inside & ((sort_key > key) | ((sort_key == key) & (ids <= tl.load(cut_id + row))))
    kept = kept & ((tl.exp((x - top) / heat) >= tl.load(min_p + row)) | (x == top))
    zero = tl.zeros([BLOCK], tl.uint32)
    word, _, _, _ = tl.philox(
        tl.load(noise_key + row),
        ids.to(tl.uint32),
        zero + tl.load(position + row).to(tl.uint32),
        zero + tl.load(sample + row).to(tl.uint32),
        zero,
    )
    uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    score = tl.where(kept, x / heat - tl.log(-tl.log(uniform)), float("-inf"))
    highest = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == highest, ids, 2147483647), axis=0)
    tl.store(scores + row * num_chunks + chunk, highest)
    tl.store(winners + row * num_chunks + chunk, winner)


@triton.jit
def _choose_kernel(
    greedy,  # [R] int64
    drawn,  # [R] int32
    scores,  # [R, CHUNKS] float32
    winners,  # [R, CHUNKS] int32
    out,  # [R] int64
    num_chunks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(greedy + row)
    if tl.load(drawn + row) != 0:
        chunk = tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        score = tl.load(scores + row * num_chunks + chunk, mask=inside, other=float("-inf"))
        winner = tl.load(winners + row * num_chunks + chunk, mask=inside, other=2147483647)
        highest = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == highest, winner, 2147483647), axis=0).to(tl.int64)
    tl.store(out + row, chosen)


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Rows and columns of logits [R, V]. Raises ValueError for anything but float32 with unit stride along V."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits: expected float32 [R, V] with unit stride, got {logits.dtype} {list(logits.shape)}")
    num_rows, width = logits.shape
    return num_rows, width


def sample(logits: Tensor, rows: SamplingRows, vocab_size: int, out: Tensor) -> list[Launch]:
    """`interface.Backend.sample` into out [R] int64.

    Likelihoods and noise are float32: where two scores lie within 1e-5 of each other, or a mass within 1e-6 of top_p,
    the reference may choose otherwise.
    """
    num_rows, width = check_logits(logits)
    if not 1 <= vocab_size <= width:
        raise ValueError(f"vocab_size={vocab_size}: expected 1..{width}")
    for name, dtype in _ROW_DTYPES.items():
        values: Tensor = getattr(rows, name)
        if values.dtype != dtype or values.shape != (num_rows,) or not values.is_contiguous():
            raise ValueError(f"{name}: expected contiguous {dtype} [{num_rows}], got {values.dtype} {values.shape}")
    cut = chunk_settings(vocab_size, _CUT_BLOCK)
    draw = chunk_settings(vocab_size, _DRAW_BLOCK)
    num_chunks = cdiv(vocab_size, draw.block)
    common = {"logits": logits, "stride": logits.stride(0), "vocab_size": vocab_size, "temperature": rows.temperature}
    drawn = logits.new_empty(num_rows, dtype=torch.int32)
    best = logits.new_empty(num_rows)
    cut_key, cut_id, greedy = logits.new_empty(3, num_rows, dtype=torch.int64)
    scores = logits.new_empty(num_rows, num_chunks)
    winners = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    return [
        Launch(
            _cut_kernel,
            (num_rows,),
            {
                **common,
                "top_k": rows.top_k,
                "top_p": rows.top_p,
                "greedy": greedy,
                "drawn": drawn,
                "best_out": best,
                "cut_key": cut_key,
                "cut_id": cut_id,
            },
            {"BLOCK": cut.block},
            num_warps=cut.num_warps,
        ),
        Launch(
            _draw_kernel,
            (num_rows, num_chunks),
            {
                **common,
                "min_p": rows.min_p,
                "noise_key": rows.noise_key,
                "sample": rows.sample,
                "position": rows.position,
                "drawn": drawn,
                "best": best,
                "cut_key": cut_key,
                "cut_id": cut_id,
                "scores": scores,
                "winners": winners,
                "num_chunks": num_chunks,
            },
            {"BLOCK": draw.block},
            num_warps=draw.num_warps,
        ),
        Launch(
            _choose_kernel,
            (num_rows,),
            {
                "greedy": greedy,
                "drawn": drawn,
                "scores": scores,
                "winners": winners,
                "out": out,
                "num_chunks": num_chunks,
            },
            {"BLOCK": next_power_of_2(num_chunks)},
        ),
    ]
