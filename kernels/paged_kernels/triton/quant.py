"""Linear layers over low-bit weights and over experts, on the GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.quantized import GroupWeight
from paged_kernels.reference_quant import LARGEST
from paged_kernels.triton import gemm
from paged_kernels.triton.settings import Chip


class GroupLinear:
    """Activations as they are, weights of 4 or 8 bits with a scale and a zero point for each group of inputs.

    `weight` and `bias` [N] must lie on the device of the activations; `chip` is that device.
    """

    def __init__(self, weight: GroupWeight, bias: Tensor | None, chip: Chip) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias
        self._chip = chip

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight.permutation is not None:
            x = x[:, self._weight.permutation]
        out = x.new_empty(len(x), self.out_features)
        for launch in gemm.group_gemm(self._chip, x, self._weight, self._bias, out):
            launch.run()
        return out


class ScaledLinear:
    """int8 or float8_e4m3fn on both sides: activations are rounded a token at a time as they come.

    Args:
        weight: [N, K].
        weight_scales: float32, [N, 1] for a scale each output, or [ceil(N / 128), ceil(K / 128)] for blocks; then
            activations too have a scale for every 128 inputs.
        bias: [N].
        chip: the device of them all.
    """

    def __init__(self, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, chip: Chip) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._weight_scales = weight_scales
        self._bias = bias
        self._chip = chip

    def __call__(self, x: Tensor) -> Tensor:
        group_size = gemm.BLOCK_SCALE if self._weight_scales.shape[1] > 1 else None
        numbers, scales = quantize_rows(x, self._weight.dtype, group_size)
        out = x.new_empty(len(x), self.out_features)
        for launch in gemm.scaled_gemm(self._chip, numbers, scales, self._weight, self._weight_scales, self._bias, out):
            launch.run()
        return out


class DenseGroupedLinear:
    """weight [G, N, K] and bias [G, N] in the run dtype, a linear layer for each group of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chip: Chip) -> None:
        self.num_groups = len(weight)
        self._weight = weight
        self._bias = bias
        self._chip = chip

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        out = grouped_linear(x, offsets, self._weight, self._chip)
        if self._bias is None:
            return out
        rows = torch.arange(len(x), dtype=offsets.dtype, device=x.device)
        groups = torch.searchsorted(offsets, rows, right=True) - 1
        return out + F.pad(self._bias, (0, 0, 0, 1))[groups]


def quantize_rows(x: Tensor, dtype: torch.dtype, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """`reference_quant.quantize_rows`."""
    rows, inputs = x.shape
    numbers = torch.empty(rows, inputs, dtype=dtype, device=x.device)
    scales = torch.empty(rows, inputs // (group_size or inputs), dtype=torch.float32, device=x.device)
    gemm.quantize_rows(x, numbers, scales, LARGEST[dtype]).run()
    return numbers, scales


def grouped_linear(x: Tensor, expert_offsets: Tensor, weight: Tensor, chip: Chip) -> Tensor:
    """`reference_quant.grouped_linear`."""
    out = x.new_zeros(len(x), weight.shape[1])
    gemm.grouped_gemm(chip, x, expert_offsets, weight, out).run()
    return out
