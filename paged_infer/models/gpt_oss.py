"""Experts as gpt-oss stores them: all of a layer in one tensor, in floats or in MXFP4, gate and up rows alternating."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_EXPERTS = re.compile(r"(.+\.experts\.(?:gate_up|down)_proj)(|_bias|_blocks|_scales)")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """blocks [..., K / 32, 16] uint8, the earlier of two numbers in the low bits, and scales [..., K / 32] uint8, the
    exponents of a power of two plus 127 -> [..., K]. bfloat16 holds every value there is, but for overflow.

    OCP Microscaling Formats (MX) Specification 1.0 (2023).
    """
    numbers = torch.tensor(_FP4, dtype=dtype)
    low, high = numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]
    values = torch.stack([low, high], dim=-1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - 127).to(dtype).flatten(-2)


def unpacked(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors with the experts' as matrices [experts * rows, columns] and vectors [experts * rows], all
    of an expert's gate rows before its up rows, named `….weight` and `….bias`.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        target, kind = match[1], match[2]
        if kind == "_bias":
            yield f"{target}.bias", _gate_first(target, tensor).flatten()
        elif kind == "":
            yield f"{target}.weight", _gate_first(target, tensor.transpose(1, 2)).flatten(0, 1)
        else:
            pair = halves.setdefault(target, {})
            pair[kind] = tensor
            if len(pair) == 2:
                del halves[target]
                weight = dequantize_mxfp4(pair["_blocks"], pair["_scales"])
                yield f"{target}.weight", _gate_first(target, weight).flatten(0, 1)
    for target, pair in halves.items():
        for kind, tensor in pair.items():
            yield target + kind, tensor


def _gate_first(target: str, rows: Tensor) -> Tensor:
    """[E, 2I, ...] with gate and up in turn -> gate, then up; the rows of `down_proj` as they are."""
    if target.endswith("down_proj"):
        return rows
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1)
