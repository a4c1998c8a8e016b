"""The CPU's products with low-bit weights against the reference on the same numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from paged_kernels.cpu.quantized import CodesLinear, Int8Linear
from paged_kernels.quantized import (
    GroupWeight,
    QuantizedWeight,
    ScaledWeight,
    from_numbers,
    round_group_weight,
    round_scaled,
)
from paged_kernels.reference_quant import quantize_rows, scaled_linear
from torch import Tensor

from tests.kernels.conftest import ISAS

Load = Callable[[str], ctypes.CDLL]

SHAPES = [(1, 16), (15, 64), (17, 256), (33, 288), (100, 576)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shuffled(weight: Tensor, group_size: int) -> GroupWeight:
    """Inputs grouped in another order than they come, zero points up to one past the numbers."""
    plain = round_group_weight(weight, 4, group_size)
    g_idx = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(7)) // group_size
    numbers = torch.randint(16, weight.shape, generator=torch.Generator().manual_seed(8))
    zeros = torch.randint(17, plain.zeros.shape, generator=torch.Generator().manual_seed(9))
    zeros[0, 0] = 16
    return from_numbers(numbers.t(), plain.scales, zeros, 4, g_idx)


def float8_blocks(weight: Tensor) -> ScaledWeight:
    n, k = weight.shape
    every = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(torch.float8_e4m3fn)
    finite = every[~every.float().isnan()]
    picked = torch.randint(len(finite), (n, k), generator=torch.Generator().manual_seed(5))
    return ScaledWeight(finite[picked], random(6, -(-n // 128), -(-k // 128)).abs(), False)


KINDS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int4": lambda weight: round_group_weight(weight, 4, 16),
    "int4 in another order": lambda weight: shuffled(weight, 16),
    "int8 one group": lambda weight: round_group_weight(weight, 8, weight.shape[1]),
    "int8 weights only": lambda weight: round_scaled(weight, torch.int8, False),
    "float8": lambda weight: round_scaled(weight, torch.float8_e4m3fn),
    "float8 blocks": float8_blocks,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_only(load_kernels: Load, isa: str, kind: str, n: int, k: int) -> None:
    weight, bias = KINDS[kind](random(1, n, k)), random(2, n)
    linear = CodesLinear(load_kernels(isa), weight, bias, torch.float32)
    exact = weight.dequantize().double()
    for tokens in (0, 1, 5, 27):
        x = random(3, tokens, k)
        error = (linear(x).double() - (x.double() @ exact.t() + bias.double())).abs()
        assert (error <= 1e-6 * (x.double().abs() @ exact.abs().t() + 1)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 7), (33, 31), *SHAPES])
def test_int8_on_both_sides(load_kernels: Load, isa: str, n: int, k: int) -> None:
    """Largest numbers of both signs included, which a sum of 16 bits would not hold."""
    weight, bias = round_scaled(random(1, n, k), torch.int8), random(2, n)
    weight.numbers[0] = 127
    linear = Int8Linear(load_kernels(isa), weight, bias, torch.float32)
    assert linear(random(3, 0, k)).shape == (0, n)
    for tokens in (1, 5, 27):
        x = random(3, tokens, k)
        if tokens > 1:
            x[0] = -x[0].abs().max()
            x[1] = 0
        numbers, scales = quantize_rows(x, torch.int8)
        expected = scaled_linear(numbers, scales, weight.numbers, weight.scales, torch.float32, bias)
        terms = (numbers.float() * scales).abs() @ weight.dequantize().abs().t() + bias.abs()
        assert ((linear(x) - expected).abs() <= 1e-5 * terms).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_in_bfloat16_and_a_row_that_is_not_finite(load_kernels: Load, isa: str, bad: float) -> None:
    """Results are those of float32, rounded once; what is not finite stays so, in its own row."""
    weight, bias = round_scaled(random(1, 33, 70), torch.int8), random(2, 33)
    full, half = (Int8Linear(load_kernels(isa), weight, bias, dtype) for dtype in (torch.float32, torch.bfloat16))
    x = random(3, 9, 70).bfloat16()
    expected = full(x).bfloat16()
    assert torch.equal(half(x), expected)
    x[4, 69] = bad
    found = half(x)
    assert found[4].isnan().all()
    assert torch.equal(torch.cat([found[:4], found[5:]]), torch.cat([expected[:4], expected[5:]]))


def test_a_row_does_not_depend_on_the_batch(load_kernels: Load) -> None:
    library, x = load_kernels("native"), random(3, 40, 576)
    for linear in (
        CodesLinear(library, round_group_weight(random(1, 96, 576), 4, 64), None, torch.float32),
        Int8Linear(library, round_scaled(random(1, 96, 576), torch.int8), None, torch.float32),
    ):
        whole = linear(x)
        assert all(
            torch.equal(linear(x[i : i + count]), whole[i : i + count]) for i, count in ((0, 1), (3, 7), (39, 1))
        )


def test_strided_rows_and_wrong_ones(load_kernels: Load) -> None:
    x = random(3, 6, 100)[:, 10:74]
    for linear in (
        CodesLinear(load_kernels("native"), round_group_weight(random(1, 9, 64), 4, 64), None, torch.float32),
        Int8Linear(load_kernels("native"), round_scaled(random(1, 9, 64), torch.int8), None, torch.float32),
    ):
        assert torch.equal(linear(x), linear(x.contiguous()))
        with pytest.raises(ValueError, match="64"):
            linear(x[:, :60])
