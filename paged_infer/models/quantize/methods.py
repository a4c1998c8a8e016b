"""How a linear layer's weight is rounded, given inputs the layer sees.

A method may first divide inputs and multiply weights by a number for each input, which changes no product but spreads
the difficulty of rounding; the caller folds the division into whatever computes the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from paged_kernels.quantized import (
    QuantizedWeight,
    from_numbers,
    group_grid,
    round_group_weight,
    round_grouped,
    round_scaled,
)
from torch import Tensor

from paged_infer.config import ConfigError

METHODS = ("awq", "fp8", "gptq", "int4", "int8")


class Method(Protocol):
    """A way to round weights."""

    @property
    def calibrated(self) -> bool:
        """Whether it looks at inputs at all."""
        ...

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor | None:
        """What to divide the inputs of a layer by, [K] float32; None = nothing.

        weight [N, K], x [T, K] float32. Inputs that come from one channel get one number: see `shared`.
        """
        ...

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        """Weight [N, K] float32 rounded, for inputs x [T, K]. Raises ValueError where its size doesn't divide."""
        ...


def shared(values: Tensor, sharing: tuple[int, int]) -> Tensor:
    """The largest of the values [K] that belong to one channel, spread over them again.

    sharing = (q, d): the channels come in groups of d, each group q times in a row.
    """
    q, d = sharing
    groups = values.view(-1, q, d)
    return groups.amax(dim=1, keepdim=True).expand_as(groups).reshape(-1)


@dataclass(frozen=True, slots=True)
class Int8:
    """int8 on both sides, smoothed.

    Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (2023).

    What counts of an input is its largest value in a few tokens, on average over the text: the largest of the whole
    text grows with its length, and a rare token then has its way with all the others.

    Attributes:
        alpha: how much of the difficulty goes from activations to weights.
        tokens: how many are few.
    """

    alpha: float = 0.6
    tokens: int = 32
    calibrated: bool = True

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor | None:
        largest = torch.stack([part.abs().amax(dim=0) for part in torch.split(x, self.tokens)]).mean(dim=0)
        inputs = shared(largest, sharing).clamp(min=1e-5)
        weights = shared(weight.abs().amax(dim=0), sharing).clamp(min=1e-5)
        return inputs**self.alpha / weights ** (1 - self.alpha)

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        return round_scaled(weight, torch.int8)


@dataclass(frozen=True, slots=True)
class FP8:
    """float8_e4m3fn on both sides, a scale for each output and token."""

    calibrated: bool = False

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor | None:
        return None

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        return round_scaled(weight, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Nearest:
    """4 bits in groups, each weight to the nearest number."""

    group_size: int = 64
    calibrated: bool = False

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor | None:
        return None

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        return round_group_weight(weight, 4, _dividing(self.group_size, weight))


def _dividing(group_size: int, weight: Tensor) -> int:
    if weight.shape[1] % group_size:
        raise ConfigError(f"group_size={group_size} does not divide the {weight.shape[1]} inputs of a layer")
    return group_size


def _best_grid(weight: Tensor, importance: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Of grids on the whole and on parts of each group's range, the one with the least squared error, inputs weighted
    by `importance` [K]."""
    n, k = weight.shape
    groups = weight.view(n, -1, group_size)
    scales, zeros = group_grid(weight, 4, group_size)
    scales = scales.half().float().clamp(min=2.0**-24)
    best = torch.full_like(scales, torch.inf)
    chosen = scales.clone(), zeros.clone()
    for share in torch.linspace(1, 0.7, 7).tolist():
        tried, zero = group_grid((groups * share).view(n, k), 4, group_size)
        tried = tried.half().float().clamp(min=2.0**-24)
        numbers = (groups / tried[..., None] + zero[..., None]).round_().clamp_(0, 15)
        error = ((numbers - zero[..., None]) * tried[..., None] - groups).square_()
        loss = (error * importance.view(1, -1, group_size)).sum(dim=-1)
        better = loss < best
        best = torch.where(better, loss, best)
        chosen = torch.where(better, tried, chosen[0]), torch.where(better, zero, chosen[1])
    return chosen


def _group_weight(numbers: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedWeight:
    return from_numbers(numbers.t(), scales.t().half(), zeros.t(), 4)


@dataclass(frozen=True, slots=True)
class AWQ:
    """4 bits in groups; weights of inputs that are large are made larger first, as much as pays.

    Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2024). Here the search
    looks at each layer's own product, and ranges are clipped by the error that `importance` weighs.
    """

    group_size: int = 64
    rows: int = 512
    calibrated: bool = True

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor | None:
        size = _dividing(self.group_size, weight)
        magnitude = shared(x.abs().mean(dim=0), sharing).clamp(min=1e-5)
        x = x[:: max(1, len(x) // self.rows)]
        exact = x @ weight.t()
        best, least = None, torch.inf
        for power in torch.linspace(0, 1, 11).tolist():
            scales = magnitude**power
            scales = scales / (scales.max() * scales.min()).sqrt()
            scaled = weight * scales
            grid_scales, zeros = group_grid(scaled, 4, size)
            numbers = round_grouped(scaled, grid_scales, zeros, 4).view(len(weight), -1, size)
            rounded = ((numbers - zeros[..., None]) * grid_scales[..., None]).view_as(weight) / scales
            error = (x @ rounded.t() - exact).square_().mean().item()
            if error < least:
                best, least = scales, error
        return best

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        scales, zeros = _best_grid(weight, x.square().mean(dim=0), _dividing(self.group_size, weight))
        return _group_weight(round_grouped(weight, scales, zeros, 4), scales, zeros)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """4 bits in groups; each column's rounding error is made up for by the columns not yet rounded.

    Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023), columns
    in falling order of their inputs' size, grids fixed beforehand. With `awq` set, inputs are scaled as there first.
    """

    group_size: int = 64
    damping: float = 0.01
    block: int = 128
    awq: AWQ | None = None
    calibrated: bool = True

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor | None:
        return None if self.awq is None else self.awq.input_scales(weight, x, sharing)

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        size = _dividing(self.group_size, weight)
        hessian = x.t() @ x / len(x)
        scales, zeros = _best_grid(weight, hessian.diagonal(), size)
        dead = hessian.diagonal() == 0
        hessian.diagonal()[dead] = 1
        hessian.diagonal().add_(self.damping * hessian.diagonal().mean())
        order = hessian.diagonal().argsort(descending=True)
        factor = torch.linalg.cholesky(hessian[order][:, order])
        upper = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
        left = weight[:, order].t().contiguous()  # [K, N]: a column of the weight is a row here
        column_scales = scales.t()[order // size].contiguous()
        column_zeros = zeros.t()[order // size].contiguous()
        numbers = torch.empty_like(left)
        for start in range(0, len(left), self.block):
            stop = min(start + self.block, len(left))
            errors = left.new_empty(stop - start, left.shape[1])
            for k in range(start, stop):
                row, scale, zero = left[k], column_scales[k], column_zeros[k]
                torch.clamp(torch.round(row / scale + zero), 0, 15, out=numbers[k])
                error = (row - (numbers[k] - zero) * scale) / upper[k, k]
                left[k + 1 : stop].addr_(upper[k, k + 1 : stop], error, alpha=-1)
                errors[k - start] = error
            left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
        unordered = torch.empty_like(numbers).index_copy_(0, order, numbers)
        return _group_weight(unordered.t().to(torch.uint8), scales, zeros)


def make_method(name: str, group_size: int = 64) -> Method:
    """One of `METHODS`; `int4` is the nearest number of 4 bits. Raises `ConfigError` for another name."""
    if name == "int8":
        return Int8()
    if name == "fp8":
        return FP8()
    if name == "int4":
        return Nearest(group_size)
    if name == "awq":
        return AWQ(group_size)
    if name == "gptq":
        return GPTQ(group_size)
    raise ConfigError(f"quantization={name!r}: expected one of {', '.join(METHODS)}")
