"""Penalties and summaries of logit rows: compiled against the reference, and both against plain arithmetic."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from paged_kernels.cpu import sampling
from paged_kernels.interface import LogitSummary, PenaltyRows
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from tests.kernels.conftest import ISAS


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest, load_kernels: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return load_kernels(request.param)


def penalty_rows(tokens: Tensor, num_tokens: Tensor, num_prompt: Tensor, seed: int) -> PenaltyRows:
    generator = torch.Generator().manual_seed(seed)
    count = len(tokens)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(count).uniform_(low, high, generator=generator)

    rows = torch.randperm(count + 3, generator=generator)[:count]
    return PenaltyRows(rows, tokens, num_tokens, num_prompt, uniform(0.5, 2.0), uniform(-2.0, 2.0), uniform(-2.0, 2.0))


def test_penalties_equal_arithmetic(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab_size, count = 70, 40
    tokens = torch.randint(0, vocab_size, (count, 90), generator=generator, dtype=torch.int32)
    num_tokens = torch.randint(0, 91, (count,), generator=generator, dtype=torch.int32)
    num_prompt = (num_tokens * torch.rand(count, generator=generator)).int()
    rows = penalty_rows(tokens, num_tokens, num_prompt, 1)
    logits = torch.randn(count + 3, vocab_size, generator=generator)
    logits[:, 11] = -math.inf
    expected = logits.double()
    for p in range(count):
        row = int(rows.row[p])
        known = tokens[p, : int(num_tokens[p])].tolist()
        for token in set(known):
            x = float(expected[row, token])
            repetition = float(rows.repetition[p])
            x = x / repetition if x > 0 else x * repetition
            output = known[int(num_prompt[p]) :].count(token)
            expected[row, token] = x - float(rows.frequency[p]) * output - float(rows.presence[p]) * (output > 0)
    compiled, plain = logits.clone(), logits.clone()
    for _ in range(2):  # what a thread keeps between calls is clean
        compiled = logits.clone()
        sampling.penalize(library, compiled, rows)
    ReferenceBackend().penalize(plain, rows)
    torch.testing.assert_close(compiled.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(plain.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 65, 1000, 5003])
@pytest.mark.parametrize("k", [0, 1, 5, 63, 5003])
@pytest.mark.parametrize("listed", [1.0, 0.7])
def test_summaries_equal_arithmetic(library: ctypes.CDLL, vocab_size: int, k: int, listed: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size + k)
    logits = torch.randn(12, vocab_size, generator=generator) * torch.tensor([0.0, 0.1, 1.0, 30.0]).repeat(3)[:, None]
    logits[4:8] = logits[4:8].round()  # ties
    logits[8:, vocab_size // 3 : vocab_size // 2] = -math.inf
    size = max(1, int(listed * vocab_size))
    k = min(k, size)
    tokens = torch.randint(0, size, (12,), generator=generator)
    for summary in (
        sampling.summarize(library, logits, tokens, k, size),
        ReferenceBackend().summarize(logits, tokens, k, size),
    ):
        assert_summary(summary, logits, tokens, k, size)


def assert_summary(summary: LogitSummary, logits: Tensor, tokens: Tensor, k: int, size: int) -> None:
    torch.testing.assert_close(summary.log_sum_exp, logits.double().logsumexp(-1).float(), atol=1e-4, rtol=1e-6)
    for row, token, rank, top in zip(logits, tokens, summary.ranks, summary.top_ids, strict=True):
        assert rank == 1 + sum(x > row[token] for x in row[:size])
        assert top.tolist() == sorted(range(size), key=lambda i: (-float(row[i]), i))[:k]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_summaries_of_rows_that_are_not_finite(library: ctypes.CDLL, bad: float) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    logits[1, 77] = bad
    tokens = torch.tensor([1, 2, 3])
    for summary in (
        sampling.summarize(library, logits, tokens, 2, 200),
        ReferenceBackend().summarize(logits, tokens, 2, 200),
    ):
        assert summary.log_sum_exp.isnan().tolist() == [False, True, False]


def test_bad_arguments_are_named(library: ctypes.CDLL) -> None:
    logits, tokens = torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="k=11"):
        sampling.summarize(library, logits, tokens, 11, 10)
    with pytest.raises(ValueError, match="token_ids"):
        sampling.summarize(library, logits, tokens.int(), 1, 10)
    with pytest.raises(ValueError, match="logits"):
        sampling.summarize(library, logits.double(), tokens, 1, 10)
