"""Arrow arrays out of Python values and back, by way of their buffers.

`pa.array` and `pa.scalar` ask first whether they were given a pandas object, `to_numpy` whether one is wanted, and for
that import pandas where it is installed: most of a second and 25 MB before a job's first row is written. Nothing here
does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_DTYPES: dict[pa.DataType, np.dtype[Any]] = {
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
}


def numbers(values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Of an int32, int64, float32 or float64 `kind`; None is null."""
    dtype = _DTYPES[kind]
    if isinstance(values, np.ndarray):
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values, dtype))])
    if _is_missing(values):
        return pa.nulls(len(values), kind)
    valid, present = _validity(values, 0)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(np.array(present, dtype))])


def integers(array: pa.Array) -> np.ndarray[Any, np.dtype[np.signedinteger]]:
    """The values of an int32 or int64 array without nulls; they are the array's own memory."""
    return np.frombuffer(array.buffers()[1], _DTYPES[array.type], len(array), array.offset * array.type.byte_width)


def flags(values: Sequence[bool | None] | np.ndarray) -> pa.Array:
    """Booleans; None is null."""
    valid, present = (None, values) if isinstance(values, np.ndarray) else _validity(values, False)
    return pa.Array.from_buffers(pa.bool_(), len(values), [valid, _bits(present)])


def texts(values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    """Of a string or large_string `kind`; None is null. Raises `UnicodeEncodeError` for half a surrogate pair."""
    if _is_missing(values):
        return pa.nulls(len(values), kind)
    valid, present = _validity(values, "")
    encoded = [*map(str.encode, present)]
    data = pa.py_buffer(b"".join(encoded))
    return pa.Array.from_buffers(kind, len(values), [valid, _offsets(encoded, pa.types.is_large_string(kind)), data])


def lists(values: Sequence[Sequence[Any] | None], kind: pa.DataType) -> pa.Array:
    """Of a `large_list` of numbers; None is null."""
    valid, present = _validity(values, ())
    items = np.fromiter(itertools.chain.from_iterable(present), _DTYPES[kind.value_type])
    children = [numbers(items, kind.value_type)]
    return pa.Array.from_buffers(kind, len(values), [valid, _offsets(present, True)], children=children)


def _is_missing(values: Sequence[Any]) -> bool:
    """Whether all are None, as in most columns of most jobs."""
    return len(values) > 0 and values[0] is None and values.count(None) == len(values)


def _validity(values: Sequence[Any], filler: Any) -> tuple[pa.Buffer | None, Sequence[Any]]:
    """The bitmap of what is not None, None where everything is, and the values with `filler` in the gaps."""
    if None not in values:
        return None, values
    return _bits([value is not None for value in values]), [filler if value is None else value for value in values]


def _bits(values: Sequence[bool] | np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.asarray(values, np.bool_), bitorder="little"))


def _offsets(values: Sequence[Any], large: bool) -> pa.Buffer:
    offsets = np.zeros(len(values) + 1, np.int64 if large else np.int32)
    np.cumsum([*map(len, values)], out=offsets[1:])
    return pa.py_buffer(offsets)
