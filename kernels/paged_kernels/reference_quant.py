"""Products with low-bit numbers in plain torch: specification and oracle of the kernels that do them.

Sums are float32, rounded once to the dtype of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels.quantized import GroupWeight

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def group_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> x @ weight.T + bias, [M, N] in the dtype of x."""
    y = x.float() @ weight.dequantize().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> numbers [M, K] int8 or float8_e4m3fn and scales [M, K / group_size] float32, x ≈ scale * number.

    A scale maps the largest element of its group (None = of the row) on the largest number; a zero group has scale 0.
    """
    rows, inputs = x.shape
    groups = x.float().view(rows, -1, group_size or inputs)
    scales = groups.abs().amax(dim=-1) / LARGEST[dtype]
    numbers = groups / torch.where(scales > 0, scales, 1.0)[..., None]
    if dtype == torch.int8:
        numbers = numbers.round()
    return numbers.to(dtype).view(rows, inputs), scales


def scaled_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """(x * x_scales) @ (weight * weight_scales).T + bias for int8 or float8 numbers: [M, N] in `dtype`.

    x [M, K] with scales [M, K / a], weight [N, K] with scales [ceil(N / b), ceil(K / a)]; a = b = 128 for blocks,
    a = K and b = 1 for a scale each token and channel.
    """
    inputs = x.shape[1]
    a = inputs if x_scales.shape[1] == 1 else 128
    b = 1 if len(weight_scales) == len(weight) else 128
    left = x.float() * x_scales.repeat_interleave(a, dim=1)[:, :inputs]
    spread = weight_scales.repeat_interleave(b, dim=0)[: len(weight)].repeat_interleave(a, dim=1)[:, :inputs]
    y = left @ (weight.float() * spread).t()
    return (y if bias is None else y + bias.float()).to(dtype)


def grouped_linear(x: Tensor, expert_offsets: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] sorted by expert, rows of expert e from expert_offsets[e] to [e + 1]; weight [E, N, K] -> [T, N].

    expert_offsets [E + 1] int32. Rows past the last offset are zero.
    """
    y = x.new_zeros(len(x), weight.shape[1])
    bounds = expert_offsets.tolist()
    for expert, matrix in enumerate(weight):
        rows = slice(bounds[expert], bounds[expert + 1])
        y[rows] = (x[rows].float() @ matrix.float().t()).to(x.dtype)
    return y
