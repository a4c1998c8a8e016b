"""Dense weights on the GPU: torch's own products, which are cuBLAS's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
