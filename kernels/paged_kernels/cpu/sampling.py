"""Typed calls into the compiled sampler: tensors are checked, outputs allocated, pointers passed.

Every function raises ValueError for a tensor of the wrong dtype, shape or layout, or a `vocab_size` outside 1..V. Token
ids inside tensors are trusted.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paged_kernels.interface import LogitSummary, PenaltyRows, SamplingRows

_ROW_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "noise_key": torch.int64,
    "sample": torch.int32,
    "position": torch.int32,
}
_PENALTY_DTYPES = {
    "row": torch.int64,
    "num_tokens": torch.int32,
    "num_prompt_tokens": torch.int32,
    "repetition": torch.float32,
    "presence": torch.float32,
    "frequency": torch.float32,
}


def _check(name: str, values: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a contiguous CPU tensor of this dtype and shape."""
    if values.dtype != dtype or values.shape != shape or not values.is_contiguous() or not values.is_cpu:
        raise ValueError(
            f"{name}: expected contiguous CPU {dtype} {list(shape)}, got {values.dtype} {list(values.shape)}"
        )
    return values.data_ptr()


def _logits(logits: Tensor, vocab_size: int) -> int:
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous() or not logits.is_cpu:
        raise ValueError(f"logits: expected contiguous CPU float32 [R, V], got {logits.dtype} {list(logits.shape)}")
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size={vocab_size}: expected 1..{logits.shape[1]}")
    return logits.data_ptr()


def _call(library: ctypes.CDLL, name: str, addresses: list[int], *sizes: int) -> None:
    function = getattr(library, name)
    function.argtypes = [*[ctypes.c_void_p] * len(addresses), *[ctypes.c_int] * len(sizes)]
    function.restype = None
    function(*addresses, *sizes)


def sample(library: ctypes.CDLL, logits: Tensor, rows: SamplingRows, vocab_size: int) -> Tensor:
    """`interface.Backend.sample` on the CPU: logits [R, V] float32, contiguous -> ids [R] int64.

    Noise is computed in float32: where two scores lie within 1e-5 of each other the reference may choose the other one.
    """
    addresses = [_logits(logits, vocab_size)]
    num_rows, stride = logits.shape
    addresses += [_check(name, getattr(rows, name), dtype, num_rows) for name, dtype in _ROW_DTYPES.items()]
    out = torch.empty(num_rows, dtype=torch.int64)
    _call(library, "paged_sample", [*addresses, out.data_ptr()], num_rows, stride, vocab_size)
    return out


def mask(library: ctypes.CDLL, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """`interface.Backend.mask` on the CPU, in place on logits [R, V]."""
    vocab_size = logits.shape[-1]
    count = len(rows)
    addresses = [
        _logits(logits, vocab_size),
        _check("rows", rows, torch.int64, count),
        _check("allowed", allowed, torch.int32, count, -(-vocab_size // 32)),
    ]
    _call(library, "paged_mask", addresses, count, vocab_size)


def penalize(library: ctypes.CDLL, logits: Tensor, rows: PenaltyRows) -> None:
    """`interface.Backend.penalize` on the CPU, in place on logits [R, V]."""
    vocab_size = logits.shape[-1]
    num_rows, length = rows.tokens.shape
    addresses = [_logits(logits, vocab_size), _check("tokens", rows.tokens, torch.int32, num_rows, length)]
    addresses += [_check(name, getattr(rows, name), dtype, num_rows) for name, dtype in _PENALTY_DTYPES.items()]
    _call(library, "paged_penalize", addresses, num_rows, length, vocab_size)


def summarize(library: ctypes.CDLL, logits: Tensor, token_ids: Tensor, k: int, vocab_size: int) -> LogitSummary:
    """`interface.Backend.summarize` on the CPU."""
    num_rows, stride = logits.shape
    addresses = [_logits(logits, vocab_size), _check("token_ids", token_ids, torch.int64, num_rows)]
    if not 0 <= k <= vocab_size:
        raise ValueError(f"k={k}: expected 0..{vocab_size}")
    summary = LogitSummary(
        torch.empty(num_rows, dtype=torch.float32),
        torch.empty(num_rows, dtype=torch.int32),
        torch.empty(num_rows, k, dtype=torch.int32),
    )
    out = [summary.log_sum_exp.data_ptr(), summary.ranks.data_ptr(), summary.top_ids.data_ptr()]
    _call(library, "paged_summarize", [*addresses, *out], num_rows, stride, vocab_size, k)
    return summary
