"""RMS norms, the residual kept in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import row_settings


@triton.jit
def _rms_norm_kernel(
    x,  # [T, H]
    residual,  # [T, H] float32, read and written where ADD
    weight,  # [H] float32
    out,  # [T, H]
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * HIDDEN + column, mask=inside, other=0.0)
        tl.store(residual + row * HIDDEN + column, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    scaled = values * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * HIDDEN + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Launch:
    """out [T, H] = rms_norm(x), or with a residual [T, H] float32, which becomes residual + x, the norm of the sum.

    x [T, H] with unit stride along H; weight [H] float32; residual and out contiguous.
    """
    tokens, hidden = x.shape
    settings = row_settings(hidden)
    return Launch(
        _rms_norm_kernel,
        (tokens,),
        {
            "x": x,
            "residual": x if residual is None else residual,
            "weight": weight,
            "out": out,
            "x_stride": x.stride(0),
            "eps": eps,
        },
        {"HIDDEN": hidden, "BLOCK": settings.block, "ADD": residual is not None},
        num_warps=settings.num_warps,
    )


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Raise ValueError where the tensors do not fit each other."""
    hidden = x.shape[-1]
    if weight.dtype != torch.float32 or weight.shape != (hidden,) or not weight.is_contiguous():
        raise ValueError(f"weight: expected contiguous float32 [{hidden}], got {weight.dtype} {list(weight.shape)}")
    if x.stride(-1) != 1:
        raise ValueError("x: expected unit stride along the hidden dimension")
    if residual is not None and (
        residual.dtype != torch.float32 or residual.shape != x.shape or not residual.is_contiguous()
    ):
        raise ValueError(f"residual: expected contiguous float32 {list(x.shape)}, got {list(residual.shape)}")
