"""Norms of the residual stream, which stays in float32 whatever the run dtype.

`norm(x)` norms x [T, H]; `norm.add(x, residual)` adds x to the residual [T, H] in place and norms the sum. Both return
[T, H] in the backend's activation dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from paged_kernels.interface import Backend
from torch import Tensor


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor: ...


class RMSNorm:
    """x / rms(x) * weight.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). `weight` [H] float32.
    """

    def __init__(self, backend: Backend, weight: Tensor, eps: float) -> None:
        self._norm, self._add_norm = backend.rms_norm, backend.add_rms_norm
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.float(), self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._add_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias.

    Ba, Kiros and Hinton, "Layer Normalization" (2016). `weight`, `bias` [H] float32.
    """

    def __init__(self, backend: Backend, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._dtype = backend.activation_dtype
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(self._dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        residual += x
        return self(residual)


class NoNorm:
    """The residual as it is, for layers that norm only what they add to it."""

    def __init__(self, backend: Backend) -> None:
        self._dtype = backend.activation_dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self._dtype, copy=True)  # the residual itself changes in place

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        residual += x
        return self(residual)


class Scale:
    """x times a constant."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mul(x, self._factor)
