"""Products with low-bit numbers and for experts, under the interpreter, against their twins and against float64."""

from __future__ import annotations

import pytest
import torch
from paged_kernels import reference_quant
from paged_kernels.quantized import GroupWeight, pack
from paged_kernels.triton.quant import GroupLinear, ScaledLinear, grouped_linear, quantize_rows
from paged_kernels.triton.settings import Chip, gemm_settings
from torch import Tensor

from tests.pairwise import pairwise

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
CHIPS = {"busy": Chip(1, 232448), "idle": Chip(64, 232448)}
TOLERANCE = {F32: 3e-6, F16: 1e-3, BF16: 8e-3}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, exact: Tensor) -> None:
    scale = float(exact.abs().max()) or 1.0
    torch.testing.assert_close(got.double() / scale, exact / scale, atol=TOLERANCE[got.dtype], rtol=0)


def group_weight(bits: int, outputs: int, inputs: int, group_size: int, shuffled: bool = False) -> GroupWeight:
    rng = torch.Generator().manual_seed(bits)
    numbers = torch.randint(1 << bits, (inputs, outputs), generator=rng)
    zeros = torch.randint(1 << bits, (inputs // group_size, outputs), generator=rng).to(torch.uint8)
    scales = torch.rand(inputs // group_size, outputs, generator=rng) * 0.1 + 0.01
    order = torch.randperm(inputs, generator=rng) if shuffled else None
    return GroupWeight(pack(numbers, bits), scales.half(), zeros, bits, group_size, order)


@pytest.mark.parametrize(
    "row",
    pairwise(
        {
            "dtype": [F32, F16, BF16],
            "bits": [4, 8],
            "rows": [1, 5, 16, 70],
            "shape": [(40, 64), (130, 128), (64, 1536)],
            "group_size": [32, 64, None],
            "chip": ["busy", "idle"],
            "bias": [False, True],
            "shuffled": [False, True],
        }
    ),
    ids=str,
)
def test_group_linear(row):
    (outputs, inputs), dtype = row["shape"], row["dtype"]
    weight = group_weight(row["bits"], outputs, inputs, row["group_size"] or inputs, row["shuffled"])
    x = random(0, row["rows"], inputs).to(dtype)
    bias = random(1, outputs).to(dtype) if row["bias"] else None
    got = GroupLinear(weight, bias, CHIPS[row["chip"]])(x)
    assert got.dtype == dtype
    exact = x.double() @ weight.dequantize().double().t() + (0 if bias is None else bias.double())
    assert_close(got, exact)
    assert_close(reference_quant.group_linear(x, weight, bias), exact)


@pytest.mark.parametrize("numbers", [INT8, FP8])
@pytest.mark.parametrize("group_size", [None, 32, 128])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_quantize_rows(numbers, group_size, dtype):
    x = random(0, 5, 384).to(dtype) * 7
    x[1] = 0
    x[2, :32] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127, 3, 4] * 4)
    found, scales = quantize_rows(x, numbers, group_size)
    twin, twin_scales = reference_quant.quantize_rows(x, numbers, group_size)
    assert found.dtype == numbers
    torch.testing.assert_close(scales, twin_scales, rtol=1e-6, atol=0)
    different = found.float() != twin.float()
    assert different.float().mean() < 0.01
    spread = scales.repeat_interleave(384 // scales.shape[1], dim=1)
    step = 0.502 if numbers == INT8 else (found.float().abs() / 16).clamp(min=2**-10) * 1.01
    assert ((found.float() * spread - x.float()).abs() <= step * spread + 1e-7).all()


@pytest.mark.parametrize("numbers", [INT8, FP8])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 256), (17, 130, 1152), (70, 256, 128)])
def test_scaled_linear(numbers, blocks, chip, rows, outputs, inputs):
    weight = (random(0, outputs, inputs) * 20).to(numbers)
    scale_shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1)
    weight_scales = torch.rand(scale_shape, generator=torch.Generator().manual_seed(1)) + 0.1
    x, bias = random(2, rows, inputs), random(3, outputs)
    got = ScaledLinear(weight, weight_scales, bias, CHIPS[chip])(x)
    x_numbers, x_scales = reference_quant.quantize_rows(x, numbers, 128 if blocks and inputs > 128 else None)
    twin = reference_quant.scaled_linear(x_numbers, x_scales, weight, weight_scales, F32, bias)
    spread = weight_scales
    if blocks:
        spread = weight_scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    left = x_numbers.double() * x_scales.double().repeat_interleave(inputs // x_scales.shape[1], dim=1)
    exact = left @ (weight.double() * spread.double()).t() + bias.double()
    assert_close(twin, exact)
    scale = float(exact.abs().max())
    torch.testing.assert_close(got.double() / scale, exact / scale, atol=2e-3, rtol=0)  # a number may round otherwise


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("counts", [[3, 0, 40, 1], [0, 0, 0, 2], [16, 16, 0, 17], [0, 0, 0, 0]])
def test_grouped_linear(dtype, counts):
    """Experts without rows, and padding rows behind the last expert, which stay zero."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x = random(0, sum(counts) + 3, 96).to(dtype)
    weight = random(1, len(counts), 40, 96).to(dtype)
    got = grouped_linear(x, offsets, weight, CHIPS["busy"])
    assert got.dtype == dtype
    exact = torch.zeros(len(x), 40, dtype=torch.float64)
    for expert in range(len(counts)):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        exact[rows] = x[rows].double() @ weight[expert].double().t()
    assert_close(got, exact)
    assert_close(reference_quant.grouped_linear(x, offsets, weight), exact)
    assert (got[sum(counts) :] == 0).all()


def test_splits_are_used_where_a_chip_is_idle():
    chosen = {
        name: gemm_settings(chip, rows=1, outputs=64, inputs=1536, itemsize=2, weight_bits=4).splits
        for name, chip in CHIPS.items()
    }
    assert chosen["busy"] == 1
    assert chosen["idle"] > 1


def test_refuses_what_does_not_fit():
    weight = group_weight(4, 40, 64, 32)
    with pytest.raises(ValueError, match="expected"):
        GroupLinear(weight, None, CHIPS["busy"])(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="expected"):
        GroupWeight(weight.qweight, weight.scales, weight.zeros, 4, 16)
    with pytest.raises(ValueError, match="weight_scales"):
        ScaledLinear(torch.zeros(40, 64, dtype=INT8), torch.zeros(39, 1), None, CHIPS["busy"])(torch.zeros(2, 64))
