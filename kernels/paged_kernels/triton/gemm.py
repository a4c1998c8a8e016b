"""Matrix products that cuBLAS does not do: low-bit weights, low-bit activations, one weight for each expert.

All compute x [M, K] @ weight [N, K].T with float32 (int8: int32) sums. Few rows leave processors idle; then the inputs
are cut into pieces whose sums are added in order, so that a result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.quantized import GroupWeight
from paged_kernels.triton.launch import Launch
from paged_kernels.triton.rope import round_half_even
from paged_kernels.triton.settings import Chip, cdiv, gemm_settings, next_power_of_2

BLOCK_SCALE = 128
"""Inputs and outputs that share a scale in block-scaled float8 weights."""


@triton.jit
def _group_gemm_kernel(
    x,  # [M, K]
    qweight,  # [K / PER_WORD, N] int32
    scales,  # [K / GROUP_SIZE, N]
    zeros,  # [K / GROUP_SIZE, N] uint8
    bias,  # [N]
    out,  # [M, N], or [SPLITS, M, N] float32
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
):
    PER_WORD: tl.constexpr = 32 // BITS
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_inside = row < num_rows
    column_inside = column < N
    depth = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // PER_WORD)
    shift = tl.arange(0, PER_WORD) * BITS
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    start = split * steps * BLOCK_K
    for k in range(start, tl.minimum(start + steps * BLOCK_K, K), BLOCK_K):
        left = tl.load(
            x + row[:, None] * x_stride + k + depth[None, :],
            mask=row_inside[:, None] & (k + depth < K)[None, :],
            other=0.0,
        )
        at_word = k // PER_WORD + word
        packed = tl.load(
            qweight + at_word[:, None].to(tl.int64) * N + column[None, :],
            mask=(at_word < K // PER_WORD)[:, None] & column_inside[None, :],
            other=0,
        )
        numbers = (packed[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)
        numbers = tl.reshape(numbers, [BLOCK_K, BLOCK_N])
        group = (k // GROUP_SIZE) * N
        zero = tl.load(zeros + group + column, mask=column_inside, other=0).to(tl.int32)
        scale = tl.load(scales + group + column, mask=column_inside, other=0.0).to(tl.float32)
        right = (numbers - zero[None, :]).to(tl.float32).to(left.dtype)  # whole numbers below 256: exact
        acc += tl.dot(left, right, input_precision="ieee") * scale[None, :]
    if BIAS:
        addend = tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, addend, 0.0)[None, :]
    at = split.to(tl.int64) * num_rows * N + row[:, None] * N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def group_gemm(chip: Chip, x: Tensor, weight: GroupWeight, bias: Tensor | None, out: Tensor) -> list[Launch]:
    """x [M, K], unit stride along K, inputs in the weight's own order -> out [M, N]."""
    outputs, inputs = weight.shape
    _check_rows(x, inputs)
    settings = gemm_settings(
        chip, rows=len(x), outputs=outputs, inputs=inputs, itemsize=x.itemsize, weight_bits=weight.bits
    )
    block_k = min(settings.block_k, weight.group_size & -weight.group_size)
    if block_k < 16:
        raise ValueError(f"group_size={weight.group_size}: expected a multiple of 16")
    partial = out if settings.splits == 1 else out.new_empty(settings.splits, *out.shape, dtype=torch.float32)
    return [
        Launch(
            _group_gemm_kernel,
            (cdiv(len(x), settings.block_m), cdiv(outputs, settings.block_n), settings.splits),
            {
                "x": x,
                "qweight": weight.qweight,
                "scales": weight.scales,
                "zeros": weight.zeros,
                "bias": weight.scales if bias is None else bias,
                "out": partial,
                "num_rows": len(x),
                "x_stride": x.stride(0),
            },
            {
                "N": outputs,
                "K": inputs,
                "GROUP_SIZE": weight.group_size,
                "BITS": weight.bits,
                "BLOCK_M": settings.block_m,
                "BLOCK_N": settings.block_n,
                "BLOCK_K": block_k,
                "SPLITS": settings.splits,
                "BIAS": bias is not None,
            },
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        ),
        *_add_splits(partial, out),
    ]


@triton.jit
def _scaled_gemm_kernel(
    x,  # [M, K] int8 or float8
    x_scales,  # [M, K / SCALE_K] float32
    weight,  # [N, K]
    weight_scales,  # [N / SCALE_N, K / SCALE_K] float32
    bias,  # [N]
    out,  # [M, N], or [SPLITS, M, N] float32
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    INTEGER: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_inside = row < num_rows
    column_inside = column < N
    depth = tl.arange(0, BLOCK_K)
    SCALES: tl.constexpr = (K + SCALE_K - 1) // SCALE_K
    if INTEGER and SCALES == 1:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    start = split * steps * BLOCK_K
    for k in range(start, tl.minimum(start + steps * BLOCK_K, K), BLOCK_K):
        inside = k + depth < K
        left = tl.load(x + row[:, None] * K + k + depth[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight + column[None, :].to(tl.int64) * K + k + depth[:, None],
            mask=column_inside[None, :] & inside[:, None],
            other=0.0,
        )
        if SCALES == 1:
            acc = tl.dot(left, right, acc, out_dtype=acc.dtype)
        else:
            group = k // SCALE_K
            x_scale = tl.load(x_scales + row * SCALES + group, mask=row_inside, other=0.0)
            w_scale = tl.load(weight_scales + column // SCALE_N * SCALES + group, mask=column_inside, other=0.0)
            if INTEGER:
                product = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
            else:
                product = tl.dot(left, right)
            acc += product * (x_scale[:, None] * w_scale[None, :])
    result = acc.to(tl.float32)
    if SCALES == 1:
        x_scale = tl.load(x_scales + row, mask=row_inside, other=0.0)
        w_scale = tl.load(weight_scales + column // SCALE_N, mask=column_inside, other=0.0)
        result = result * (x_scale[:, None] * w_scale[None, :])
    if BIAS:
        addend = tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)
        result += tl.where(split == 0, addend, 0.0)[None, :]
    at = split.to(tl.int64) * num_rows * N + row[:, None] * N + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def scaled_gemm(
    chip: Chip,
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """`reference_quant.scaled_linear` into out [M, N]; x [M, K] and weight [N, K] contiguous."""
    outputs, inputs = weight.shape
    _check_rows(x, inputs)
    blocks = x_scales.shape[1] > 1
    scale_k = BLOCK_SCALE if blocks else inputs
    scale_n = 1 if len(weight_scales) == outputs else BLOCK_SCALE
    expected = (cdiv(outputs, scale_n), cdiv(inputs, scale_k))
    if weight_scales.shape != expected or x_scales.shape != (len(x), expected[1]) or x.dtype != weight.dtype:
        raise ValueError(
            f"weight_scales: expected {list(expected)} beside x_scales [{len(x)}, {expected[1]}], got "
            f"{list(weight_scales.shape)} beside {list(x_scales.shape)}"
        )
    settings = gemm_settings(chip, rows=len(x), outputs=outputs, inputs=inputs, itemsize=1, weight_bits=8)
    partial = out if settings.splits == 1 else out.new_empty(settings.splits, *out.shape, dtype=torch.float32)
    return [
        Launch(
            _scaled_gemm_kernel,
            (cdiv(len(x), settings.block_m), cdiv(outputs, settings.block_n), settings.splits),
            {
                "x": x,
                "x_scales": x_scales,
                "weight": weight,
                "weight_scales": weight_scales,
                "bias": weight_scales if bias is None else bias,
                "out": partial,
                "num_rows": len(x),
            },
            {
                "N": outputs,
                "K": inputs,
                "SCALE_N": scale_n,
                "SCALE_K": scale_k,
                "BLOCK_M": settings.block_m,
                "BLOCK_N": settings.block_n,
                "BLOCK_K": settings.block_k,
                "SPLITS": settings.splits,
                "BIAS": bias is not None,
                "INTEGER": x.dtype == torch.int8,
            },
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        ),
        *_add_splits(partial, out),
    ]


@triton.jit
def _add_splits_kernel(partial, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def _add_splits(partial: Tensor, out: Tensor) -> list[Launch]:
    if partial is out:
        return []
    return [
        Launch(
            _add_splits_kernel,
            (cdiv(out.numel(), 1024),),
            {"partial": partial, "out": out, "size": out.numel()},
            {"SPLITS": len(partial), "BLOCK": 1024},
        )
    ]


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_gemm_kernel(
    x,  # [T, K]
    weight,  # [E, N, K]
    expert_offsets,  # [E + 1] int32
    out,  # [T, N]
    num_tiles,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    number = tl.program_id(1)
    low = 0
    high = NUM_EXPERTS
    while low < high:  # the expert of this tile; tile numbers have a gap after most experts
        middle = (low + high) // 2
        if tl.load(expert_offsets + middle) // BLOCK_M + middle <= number:
            low = middle + 1
        else:
            high = middle
    expert = low - 1
    first = tl.load(expert_offsets + expert)
    stop = tl.load(expert_offsets + expert + 1)
    first_row = first + (number - first // BLOCK_M - expert) * BLOCK_M
    if first_row >= stop:
        return
    row = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = row < stop
    column_inside = column < N
    depth = tl.arange(0, BLOCK_K)
    matrix = weight + tl.cast(expert, tl.int64) * N * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + depth < K
        left = tl.load(
            x + row[:, None] * x_stride + k + depth[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            matrix + column[None, :].to(tl.int64) * K + k + depth[:, None],
            mask=column_inside[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    at = row[:, None] * N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def grouped_gemm(chip: Chip, x: Tensor, expert_offsets: Tensor, weight: Tensor, out: Tensor) -> Launch:
    """`reference_quant.grouped_linear` into out [T, N], which must be zero past the last offset; all contiguous."""
    experts, outputs, inputs = weight.shape
    _check_rows(x, inputs)
    settings = gemm_settings(
        chip,
        rows=cdiv(len(x), experts),
        outputs=outputs,
        inputs=inputs,
        itemsize=x.itemsize,
        weight_bits=8 * x.itemsize,
    )
    num_tiles = len(x) // settings.block_m + experts
    return Launch(
        _grouped_gemm_kernel,
        (cdiv(outputs, settings.block_n), num_tiles),
        {
            "x": x,
            "weight": weight,
            "expert_offsets": expert_offsets,
            "out": out,
            "num_tiles": num_tiles,
            "x_stride": x.stride(0),
        },
        {
            "N": outputs,
            "K": inputs,
            "NUM_EXPERTS": experts,
            "BLOCK_M": settings.block_m,
            "BLOCK_N": settings.block_n,
            "BLOCK_K": settings.block_k,
        },
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
    )


@triton.jit
def _quantize_rows_kernel(
    x,  # [M, K]
    numbers,  # [M, K] int8 or float8
    scales,  # [M, K / GROUP_SIZE] float32
    x_stride,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < GROUP_SIZE
    at = group * GROUP_SIZE + column
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), axis=0) / LARGEST
    scaled = values / tl.where(scale > 0, scale, 1.0)
    kind = numbers.dtype.element_ty
    if kind == tl.int8:
        scaled = round_half_even(scaled)
    tl.store(numbers + row * K + at, scaled.to(kind), mask=inside)
    tl.store(scales + row * (K // GROUP_SIZE) + group, scale)


def quantize_rows(x: Tensor, numbers: Tensor, scales: Tensor, largest: float) -> Launch:
    """`reference_quant.quantize_rows` into numbers [M, K] and scales [M, groups], both contiguous."""
    rows, inputs = x.shape
    groups = scales.shape[1]
    if inputs % groups or x.stride(1) != 1:
        raise ValueError(f"x: expected unit stride and {groups} groups of equal size in {inputs} inputs")
    block = next_power_of_2(inputs // groups)
    return Launch(
        _quantize_rows_kernel,
        (rows, groups),
        {"x": x, "numbers": numbers, "scales": scales, "x_stride": x.stride(0)},
        {"K": inputs, "GROUP_SIZE": inputs // groups, "BLOCK": block, "LARGEST": largest},
        num_warps=min(16, max(1, block // 512)),
    )


def _check_rows(x: Tensor, inputs: int) -> None:
    if x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
        raise ValueError(f"x: expected [M, {inputs}] with unit stride, got {list(x.shape)}")
