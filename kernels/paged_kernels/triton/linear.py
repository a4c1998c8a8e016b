"""Dense weights on the GPU: torch's own products, which are cuBLAS's, or ours where every batch has the same tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.triton import gemm
from paged_kernels.triton.settings import Chip


class DenseLinear:
    """x @ weight.T + bias, weight [N, K] in the run dtype; float32 results where `float32_out`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, float32_out: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias
        self._float32_out = float32_out and weight.dtype != torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._weight.dtype)
        if not self._float32_out:
            return F.linear(x, self._weight, self._bias)
        if x.is_cuda:  # the sums are float32 anyway: keep them
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), self._weight.float())


class TiledLinear:
    """As `DenseLinear`, on a grouped product of one group: its tiles are what the chip's settings say."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chip: Chip, float32_out: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight[None]
        self._bias = bias
        self._chip = chip
        self._out_dtype = torch.float32 if float32_out else weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._weight.dtype).contiguous()
        out = torch.empty(len(x), self.out_features, dtype=self._out_dtype, device=x.device)
        offsets = torch.arange(2, dtype=torch.int32, device=x.device) * len(x)
        gemm.grouped_gemm(self._chip, x, offsets, self._weight, out).run()
        return out if self._bias is None else out + self._bias
