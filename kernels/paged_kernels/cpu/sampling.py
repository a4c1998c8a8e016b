"""The typed call into the compiled sampler."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paged_kernels.interface import SamplingRows

_ARGTYPES: tuple[type[ctypes.c_void_p] | type[ctypes.c_int], ...] = (*[ctypes.c_void_p] * 9, *[ctypes.c_int] * 3)
_ROW_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "noise_key": torch.int64,
    "sample": torch.int32,
    "position": torch.int32,
}


def sample(library: ctypes.CDLL, logits: Tensor, rows: SamplingRows, vocab_size: int) -> Tensor:
    """`interface.Backend.sample` on the CPU: logits [R, V] float32, contiguous -> ids [R] int64.

    Noise is computed in float32: where two scores lie within 1e-5 of each other the reference may choose the other one.
    Raises ValueError for a tensor of the wrong dtype, shape or layout, or a `vocab_size` outside 1..V.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous() or logits.device.type != "cpu":
        raise ValueError(f"logits: expected contiguous CPU float32 [R, V], got {logits.dtype} {list(logits.shape)}")
    num_rows, stride = logits.shape
    if not 1 <= vocab_size <= stride:
        raise ValueError(f"vocab_size={vocab_size}: expected 1..{stride}")
    pointers = [logits.data_ptr()]
    for name, dtype in _ROW_DTYPES.items():
        values: Tensor = getattr(rows, name)
        if values.dtype != dtype or values.shape != (num_rows,) or not values.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous {dtype} [{num_rows}], got {values.dtype} {list(values.shape)}"
            )
        pointers.append(values.data_ptr())
    out = torch.empty(num_rows, dtype=torch.int64)
    function = library.paged_sample
    function.argtypes, function.restype = _ARGTYPES, None
    function(*pointers, out.data_ptr(), num_rows, stride, vocab_size)
    return out
