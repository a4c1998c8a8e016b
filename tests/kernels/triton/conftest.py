"""Triton's kernels on CPU tensors, run by Triton's interpreter (`tests/conftest.py` switches it on).

Three things about the interpreter are mended here: it takes bfloat16 operands of a product for integers, loses carries
when it rounds to 8- and 16-bit floats, and copies every tensor back to where it came from, even when that is the same
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FLOATS = {
    tl.float32: (torch.float32, torch.int32, np.uint32),
    tl.float16: (torch.float16, torch.int16, np.uint16),
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.int8, np.uint8),
}
_create_dot = interpreter.InterpreterBuilder.create_dot
_convert_float = interpreter._convert_float


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _create_dot(self, _widened(a), _widened(b), *rest)


def _convert(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """Bits of `source` floats to bits of `target` floats, as torch rounds."""
    if source not in _FLOATS or target not in _FLOATS:
        return _convert_float(data, source, target, rounding_mode)
    source_float, source_bits, _ = _FLOATS[source]
    target_float, target_bits, unsigned = _FLOATS[target]
    bits = np.ascontiguousarray(data).view(f"i{source_bits.itemsize}")
    return torch.from_numpy(bits).view(source_float).to(target_float).view(target_bits).numpy().view(unsigned)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter._convert_float = _convert
interpreter.GridExecutor._restore_args_dev = lambda *_: None
