"""The Triton sampler under the interpreter: against the specified noise, and against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from paged_kernels.interface import SamplingRows
from paged_kernels.triton.backend import TritonBackend
from torch import Tensor

from tests.kernels.test_sampling import (
    INF,
    assert_same_choice,
    every_combination,
    make_rows,
    python_noise,
    random_keys,
    seeded,
    take,
    test_bad_arguments_are_named,
    test_noise_at_its_ends,
)

__all__ = ["test_bad_arguments_are_named", "test_noise_at_its_ends"]


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """What the shared tests call: `draw(logits, rows, vocab_size=V)`."""
    backend = TritonBackend(torch.float32, "cpu")

    def call(logits: Tensor, rows: SamplingRows, vocab_size: int | None = None) -> Tensor:
        return backend.sample(logits, rows, logits.shape[-1] if vocab_size is None else vocab_size)

    return call


def compare_with_the_reference(draw: Callable[..., Tensor], vocab_size: int, num_rows: int | None) -> None:
    """Combinations of options, with ties (of 0 and -0 too), masked ids and columns beyond the vocabulary."""
    options = every_combination(vocab_size)
    generator = seeded(vocab_size)
    chosen = torch.randperm(len(options["top_k"]), generator=generator)[:num_rows]
    count = len(chosen)
    logits = torch.randn(count, vocab_size + 3, generator=generator) * torch.tensor([0.1, 1.0, 5.0])[chosen % 3, None]
    logits[:, ::5] = logits[:, ::5].round()
    logits[:, 2::7] = -INF
    rows = make_rows(count, **{k: v[chosen] for k, v in options.items()}, **random_keys(count, generator))
    assert_same_choice(draw(logits, rows, vocab_size), logits, rows, vocab_size)


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(1, 10), (64, 40), (5003, 10)])
def test_agrees_with_the_reference(draw, vocab_size, num_rows):
    compare_with_the_reference(draw, vocab_size, num_rows)


def test_noise_is_the_specified_one(draw):
    """Between two tokens, the choice flips exactly where the logit gap crosses the difference of their noise."""
    num_rows, vocab_size = 12, 70
    keys = random_keys(num_rows, seeded(1))
    pairs = torch.stack([torch.randperm(vocab_size, generator=seeded(row))[:2] for row in range(num_rows)])
    gaps = []
    for row, (a, b) in enumerate(pairs.tolist()):
        key, number, position = (int(keys[name][row]) for name in ("noise_key", "sample", "position"))
        gaps.append(python_noise(key, number, position, b) - python_noise(key, number, position, a))
    for shift, winner in ((2e-5, 0), (-2e-5, 1)):
        logits = torch.full((num_rows, vocab_size), -INF)
        logits.scatter_(1, pairs, torch.tensor([[gap + shift, 0.0] for gap in gaps]))
        assert torch.equal(draw(logits, make_rows(num_rows, **keys)), pairs[:, winner])


def test_rows_that_are_not_finite_fail_alone(draw):
    options = {
        "temperature": torch.tensor([0.0, 1, 1, 0, 1]),
        "top_k": torch.tensor([0, 0, 5, 0, 0]),
        "top_p": torch.tensor([1, 1, 0.5, 1, 1]),
    }
    rows = make_rows(5, **options)
    logits = torch.randn(5, 1100, generator=seeded(3))
    logits[:, 5] = -INF
    logits[4] = -INF
    good = draw(logits, rows).tolist()
    assert min(good[:4]) >= 0
    assert good[4] == -1
    for at, bad in ((0, math.nan), (1099, math.nan), (63, INF)):
        broken = logits.clone()
        broken[:3, at] = bad
        assert draw(broken, rows).tolist() == [-1] * 3 + good[3:]


@pytest.mark.parametrize("first", [0, 1, 63, 998])
def test_greedy_ties_go_to_the_lowest_id(draw, first):
    logits = torch.full((1, 1000), -1.0)
    logits[0, first:] = torch.where(torch.arange(1000 - first) % 3 == 0, -0.0, 0.0)
    logits[0, first + 1 : first + 2] = -0.5
    assert draw(logits, make_rows(1, temperature=0.0)).tolist() == [first]


def test_scores_that_tie_go_to_the_lowest_id(draw):
    """Logits so large that the noise vanishes in rounding leave nothing but ties, here in two chunks."""
    logits = torch.full((3, 1500), 1e9)
    logits[:, :7] = -INF
    assert draw(logits, make_rows(3)).tolist() == [7] * 3


def test_one_token_left_is_greedy(draw):
    logits = torch.randn(4, 257, generator=seeded(7)).bfloat16().float()
    logits[:, 200:] = torch.finfo(torch.float32).min
    for one in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-3}, {"temperature": 1e-45}):
        assert torch.equal(draw(logits, make_rows(4, **one)), logits.argmax(dim=-1))


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 17, 63, 64, 65, 1000, 5003])
def test_agrees_with_the_reference_on_every_combination(draw, vocab_size):
    compare_with_the_reference(draw, vocab_size, None)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 3}, {0, 4, 8}),
        ({"top_p": 0.3}, {0, 4, 8}),  # eight equal tokens of an eighth each: three are needed to pass 0.3
        ({"top_k": 4, "top_p": 0.6}, {0, 4, 8}),  # a quarter each
    ],
)
def test_of_equals_the_lowest_ids_survive(draw, options, allowed):
    """Positions 0 to 11 draw each of the three at least once."""
    logits = torch.full((1, 31), -INF)
    logits[0, ::4] = 2.0
    assert set(draw(logits.expand(12, -1).contiguous(), make_rows(12, **options)).tolist()) == allowed


def test_a_row_is_the_same_in_any_batch(draw):
    generator = seeded(9)
    options = every_combination(300)
    chosen = torch.randperm(len(options["top_k"]), generator=generator)[:4]
    rows = make_rows(4, **{name: column[chosen] for name, column in options.items()}, **random_keys(4, generator))
    logits = torch.randn(4, 300, generator=generator)
    together = draw(logits, rows)
    shuffled = torch.randperm(4, generator=generator)
    assert torch.equal(draw(logits[shuffled].contiguous(), take(rows, shuffled)), together[shuffled])
    assert draw(logits[3:4], take(rows, torch.tensor([3]))).tolist() == [int(together[3])]
