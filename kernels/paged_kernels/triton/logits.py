"""What happens to logits before a token is chosen, and what log-probabilities need to know of them.

Nothing here materialises a softmax or sorts a vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.interface import PenaltyRows
from paged_kernels.triton.launch import Launch
from paged_kernels.triton.sampling import check_logits
from paged_kernels.triton.settings import cdiv, chunk_settings

_PROMPT_BIT = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["length"])
def _count_kernel(
    tokens,  # [P, L] int32
    num_tokens,  # [P] int32
    num_prompt_tokens,  # [P] int32
    counts,  # [P, V] int32, zeros: output occurrences in the low bits, a prompt one in bit 30
    length,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(num_tokens + row)
    token = tl.load(tokens + row * length + place, mask=inside, other=0)
    in_prompt = place < tl.load(num_prompt_tokens + row)
    cell = counts + row * width + token
    tl.atomic_or(cell, place * 0 + _PROMPT_BIT, mask=inside & in_prompt)
    tl.atomic_add(cell, place * 0 + 1, mask=inside & (in_prompt == 0))


@triton.jit
def _penalise_kernel(
    logits,  # [R, V] float32
    rows,  # [P] int64
    counts,  # [P, V] int32
    repetition,  # [P] float32
    presence,
    frequency,
    stride,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    count = tl.load(counts + row * width + token, mask=inside, other=0)
    seen = count != 0
    line = logits + tl.load(rows + row) * stride
    x = tl.load(line + token, mask=seen, other=0.0)
    factor = tl.load(repetition + row)
    x = tl.where(x > 0, x / factor, x * factor)
    in_output = (count & (_PROMPT_BIT - 1)).to(tl.float32)
    x -= tl.where(in_output > 0, tl.load(presence + row), 0.0) + tl.load(frequency + row) * in_output
    tl.store(line + token, x, mask=seen)


def penalize(logits: Tensor, rows: PenaltyRows) -> list[Launch]:
    """`interface.Backend.penalize`."""
    _, width = check_logits(logits)
    num_rows, length = rows.tokens.shape
    counts = logits.new_zeros(num_rows, width, dtype=torch.int32)
    settings = chunk_settings(width)
    return [
        Launch(
            _count_kernel,
            (num_rows, cdiv(length, 256)),
            {
                "tokens": rows.tokens,
                "num_tokens": rows.num_tokens,
                "num_prompt_tokens": rows.num_prompt_tokens,
                "counts": counts,
                "length": length,
                "width": width,
            },
            {"BLOCK": 256},
        ),
        Launch(
            _penalise_kernel,
            (num_rows, cdiv(width, settings.block)),
            {
                "logits": logits,
                "rows": rows.row,
                "counts": counts,
                "repetition": rows.repetition,
                "presence": rows.presence,
                "frequency": rows.frequency,
                "stride": logits.stride(0),
                "width": width,
            },
            {"BLOCK": settings.block},
            num_warps=settings.num_warps,
        ),
    ]


@triton.jit
def _mask_kernel(
    logits,  # [R, V] float32
    rows,  # [P] int64
    allowed,  # [P, W] int32
    stride,
    words,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    word = tl.load(allowed + row * words + token // 32, mask=inside, other=-1)
    left_out = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + tl.load(rows + row) * stride + token, float("-inf"), mask=left_out)


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> Launch:
    """In place on logits [R, V] float32: -inf to what row p of allowed [P, ceil(V / 32)] int32 leaves out.

    rows: [P] int64, the logit row each mask is for. Bit i of word w, the lowest first, is token 32 * w + i.
    """
    _, width = check_logits(logits)
    num_rows, words = allowed.shape
    settings = chunk_settings(width)
    return Launch(
        _mask_kernel,
        (num_rows, cdiv(width, settings.block)),
        {
            "logits": logits,
            "rows": rows,
            "allowed": allowed,
            "stride": logits.stride(0),
            "words": words,
            "width": width,
        },
        {"BLOCK": settings.block},
        num_warps=settings.num_warps,
    )


@triton.jit
def _summarize_kernel(
    logits,  # [R, V] float32
    token_ids,  # [R] int64
    log_sum_exp,  # [R] float32, out
    ranks,  # [R] int32, out
    stride,
    width,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    own = tl.load(line + tl.load(token_ids + row))
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    greater = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(line + ids, mask=ids < width, other=float("-inf"))
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        new_largest = tl.maximum(largest, x)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - base) + tl.exp(x - base)
        largest = new_largest
        greater += ((x > own) & (ids < vocab_size)).to(tl.int32)
    top = tl.max(largest, axis=0)
    usable = (tl.max(broken, axis=0) == 0) & (top > float("-inf"))
    base = tl.where(usable, top, 0.0)
    total = tl.sum(total * tl.exp(largest - base), axis=0)
    tl.store(log_sum_exp + row, tl.where(usable, base + tl.log(total), float("nan")))
    tl.store(ranks + row, 1 + tl.sum(greater, axis=0))


def summarize(logits: Tensor, token_ids: Tensor, vocab_size: int, log_sum_exp: Tensor, ranks: Tensor) -> Launch:
    """logits [R, V] float32, token_ids [R] int64 -> their log of summed exponentials [R] float32, ranks [R] int32.

    See `interface.LogitSummary`.
    """
    num_rows, width = check_logits(logits)
    settings = chunk_settings(width, 4096)
    return Launch(
        _summarize_kernel,
        (num_rows,),
        {
            "logits": logits,
            "token_ids": token_ids,
            "log_sum_exp": log_sum_exp,
            "ranks": ranks,
            "stride": logits.stride(0),
            "width": width,
            "vocab_size": vocab_size,
        },
        {"BLOCK": settings.block},
        num_warps=settings.num_warps,
    )


def top_ids(logits: Tensor, k: int) -> Tensor:
    """The k greatest of each row of logits [R, V] float32, falling, ties by id: [R, k] int32.

    `topk` promises nothing about ties, so it is given integers that have none: the logit's bits in the order of the
    numbers, and the id below them.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((ordered << 32) + (0x7FFFFFFF - ids)).topk(k, dim=-1).indices.int()
