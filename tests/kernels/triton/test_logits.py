"""Penalties, masks and summaries of logits under the interpreter, against arithmetic and the reference."""

from __future__ import annotations

import math

import pytest
import torch
from paged_kernels.interface import PenaltyRows
from paged_kernels.reference import ReferenceBackend
from paged_kernels.triton.backend import TritonBackend
from torch import Tensor

INF = math.inf
BACKEND = TritonBackend(torch.float32, "cpu")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def penalties(row: list[int], tokens: list[list[int]], prompt: list[int], **options: list[float]) -> PenaltyRows:
    longest = max(map(len, tokens)) + 1
    padded = torch.full((len(tokens), longest), 3, dtype=torch.int32)  # what stands behind a history doesn't count
    for line, history in zip(padded, tokens, strict=True):
        line[: len(history)] = torch.tensor(history)
    values = {"repetition": [1.0], "presence": [0.0], "frequency": [0.0]} | options
    return PenaltyRows(
        torch.tensor(row),
        padded,
        torch.tensor([len(history) for history in tokens], dtype=torch.int32),
        torch.tensor(prompt, dtype=torch.int32),
        **{name: torch.tensor(value * (len(row) // len(value))) for name, value in values.items()},
    )


def test_penalties_of_a_row_by_hand() -> None:
    logits = torch.tensor([[1.0] * 6, [2.0, -2.0, 4.0, 1.0, 1.0, -INF]])
    rows = penalties([1], [[0, 1, 0, 2, 2, 5]], [2], repetition=[2.0], presence=[0.5], frequency=[0.25])
    BACKEND.penalize(logits, rows)
    # prompt 0 1, output 0 2 2 5
    assert logits.tolist() == [[1.0] * 6, [1.0 - 0.75, -4.0, 2.0 - 1.0, 1.0, 1.0, -INF]]


def test_penalties_agree_with_the_reference() -> None:
    logits = random(0, 5, 2100)
    histories = [torch.randint(2100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 300, 700)]
    options = {"repetition": [1.3, 0.7, 1.0], "presence": [0.0, 0.5, -0.5], "frequency": [0.1, 0.0, 0.3]}
    rows = penalties([4, 0, 2], histories, [1, 100, 350], **options)
    expected = logits.clone()
    ReferenceBackend().penalize(expected, rows)
    BACKEND.penalize(logits, rows)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 31, 32, 1100])
def test_masks(width: int) -> None:
    logits = random(width, 3, width)
    allowed = torch.rand(2, width, generator=torch.Generator().manual_seed(0)) < 0.5
    words = torch.zeros(2, -(-width // 32), dtype=torch.int64)
    for token in range(width):
        words[:, token // 32] |= allowed[:, token].long() << token % 32
    expected = logits.clone()
    expected[2][~allowed[0]] = -INF
    expected[0][~allowed[1]] = -INF
    BACKEND.mask(logits, torch.tensor([2, 0]), torch.where(words >= 2**31, words - 2**32, words).int())
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("width", "vocab_size"), [(1, 1), (65, 60), (5003, 5000)])
def test_summaries(width: int, vocab_size: int) -> None:
    logits = random(width, 7, width) * 10
    logits[:, ::3] = logits[:, ::3].round()
    logits[:, 1::5] = torch.where(logits[:, 1::5] > 0, 0.0, -0.0)
    logits[1:3, 1:] = -INF
    logits[4] += 1e4
    tokens = torch.randint(vocab_size, (7,), generator=torch.Generator().manual_seed(0))
    tokens[1] = 0
    k = min(20, vocab_size)
    found = BACKEND.summarize(logits, tokens, k, vocab_size)
    torch.testing.assert_close(found.log_sum_exp.double(), logits.double().logsumexp(dim=-1), atol=1e-5, rtol=1e-6)
    rows = logits[:, :vocab_size].tolist()
    greater = [sum(x > row[token] for x in row) for row, token in zip(rows, tokens.tolist(), strict=True)]
    assert found.ranks.tolist() == [1 + count for count in greater]
    assert found.top_ids.tolist() == [
        sorted(range(vocab_size), key=lambda i, row=row: (-row[i], i))[:k] for row in rows
    ]


def test_summaries_of_rows_that_are_not_finite() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, INF], [-INF, -INF], [0.0, -INF]])
    found = BACKEND.summarize(logits, torch.zeros(4, dtype=torch.int64), 1, 2)
    assert found.log_sum_exp.isnan().tolist() == [True, True, True, False]
    assert found.log_sum_exp[3] == 0
