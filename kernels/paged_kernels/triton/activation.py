"""Gated activations."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import cdiv, chunk_settings

Activation = Literal["silu", "gelu", "gelu_tanh"]


@triton.jit
def _gated_kernel(
    gate_up,  # [T, 2 * SIZE]
    out,  # [T, SIZE]
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gated = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gated = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:  # 0.5 * (1 + tanh(y)) is sigmoid(2 y)
        gated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * SIZE + column, (gated * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, out: Tensor, activation: Activation) -> Launch:
    """gate_up [T, 2I], unit stride along I -> out [T, I] = activation(gate_up[:, :I]) * gate_up[:, I:]."""
    tokens, doubled = gate_up.shape
    if doubled % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: expected unit stride and an even last dimension, got {doubled}")
    settings = chunk_settings(doubled // 2)
    return Launch(
        _gated_kernel,
        (tokens, cdiv(doubled // 2, settings.block)),
        {"gate_up": gate_up, "out": out, "stride": gate_up.stride(0)},
        {"SIZE": doubled // 2, "BLOCK": settings.block, "ACTIVATION": activation},
        num_warps=settings.num_warps,
    )
