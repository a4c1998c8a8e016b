"""Low-bit layers as the Triton backend makes them, under Triton's interpreter, against the reference's arithmetic."""

from __future__ import annotations

import pytest
import torch
from paged_kernels.quantized import BLOCK, ScaledWeight, from_numbers, round_group_weight, round_scaled
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

pytest.importorskip("triton")
from paged_kernels.triton.backend import TritonBackend


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_kept_and_what_it_computes() -> None:
    triton, reference = TritonBackend(torch.float32, "cpu"), ReferenceBackend()
    x, bias = random(0, 3, 128), random(1, 40)
    plain = round_group_weight(random(2, 40, 128), 4, 32)
    g_idx = torch.randperm(128, generator=torch.Generator().manual_seed(3)) // 32
    numbers = torch.randint(16, (128, 40), generator=torch.Generator().manual_seed(4))
    zeros = torch.arange(160).view(4, 40) % 17  # 16: version 1 of GPTQ has zero points past the numbers
    for grouped in (plain, from_numbers(numbers, plain.scales, zeros, 4, g_idx)):
        layer = triton.make_quantized(grouped, bias)
        assert layer is not None
        assert torch.allclose(layer(x), x @ grouped.dequantize().t() + bias, atol=1e-4)
    for scaled in (round_scaled(random(5, 40, 128), torch.int8), round_scaled(random(5, 40, 128), torch.float8_e4m3fn)):
        assert triton.keeps(scaled.format)
        ours, theirs = triton.make_quantized(scaled, bias), reference.make_quantized(scaled, bias)
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours(x), theirs(x), atol=1e-3)


def test_what_it_has_no_kernel_for() -> None:
    triton = TritonBackend(torch.float32, "cpu")
    small = round_group_weight(random(0, 16, 64), 4, 8)
    weights_only = round_scaled(random(0, 16, 64), torch.float8_e4m3fn, False)
    odd = ScaledWeight(round_scaled(random(0, 16, 192), torch.float8_e4m3fn).numbers, torch.ones(1, 2), True)
    assert odd.shape[1] % BLOCK
    for weight in (small, weights_only, odd):
        assert triton.make_quantized(weight) is None


@pytest.mark.parametrize("shape", [(40, 96), (33, 3)], ids=str)
def test_grouped_linear_adds_each_groups_bias(shape: tuple[int, int]) -> None:
    """Rows behind the last group get none."""
    weight, bias = random(0, 3, *shape), random(1, 3, shape[0])
    offsets = torch.tensor([0, 3, 3, 20], dtype=torch.int32)
    x = random(2, 24, shape[1])
    got = TritonBackend(torch.float32, "cpu").make_grouped(weight, bias)(x, offsets)
    assert torch.allclose(got[:3], x[:3] @ weight[0].t() + bias[0], atol=1e-4)
    assert torch.allclose(got[3:20], x[3:20] @ weight[2].t() + bias[2], atol=1e-4)
    assert (got[20:] == 0).all()
