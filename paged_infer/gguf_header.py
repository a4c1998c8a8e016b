"""The header of a GGUF file: metadata, and where the tensors lie.

The `gguf` package's own reader builds an object for every vocabulary string, which takes seconds; this one walks the
file once through a memory map and skips what nobody asked for.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_infer.config import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header lists it.

    Attributes:
        shape: as torch counts it, rows first.
        ggml_type: number of its type in ggml.
        offset: of its first byte in the file.
    """

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`metadata`: key → number, text, truth value or list of them. `tensors`: in file order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_header(path: Path, *, prefix: str = "", longest_array: int | None = None) -> GGUFHeader:
    """Read the header, leaving out keys that do not start with `prefix` and arrays longer than `longest_array`.

    Raises `ConfigError` when the file is no little-endian GGUF of version 2 or 3, or its header is cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header(prefix, longest_array)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path}: not a readable GGUF file ({error})") from error


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self, prefix: str, longest_array: int | None) -> GGUFHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; versions {' and '.join(map(str, _VERSIONS))} are known")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_entries):
            key = self._string().decode()
            value = self._value(self._scalar("I"), longest_array if key.startswith(prefix) else 0)
            if key == "general.alignment":
                alignment = value
            if value is not None and key.startswith(prefix):
                metadata[key] = value
        listed = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        tensors = {name: TensorEntry(shape, kind, start + offset) for name, shape, kind, offset in listed}
        return GGUFHeader(metadata, tensors)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> bytes:
        length = self._scalar("Q")
        text = self._data[self._at : self._at + length]
        if len(text) != length:
            raise ValueError("it is cut short")
        self._at += length
        return text

    def _value(self, kind: int, longest_array: int | None) -> Any:
        """The value at the cursor; None for an array that is too long."""
        if kind == _STRING:
            return self._string().decode(errors="replace")
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        if longest_array is not None and count > longest_array:
            return self._skip(item, count)
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            values = struct.unpack_from(code, self._data, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        return [self._value(item, longest_array) for _ in range(count)]

    def _skip(self, kind: int, count: int) -> None:
        if kind == _STRING:
            at, data, unpack = self._at, self._data, struct.Struct("<Q").unpack_from
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
            self._at = at
        elif kind == _ARRAY:
            for _ in range(count):
                self._value(kind, 0)
        else:
            self._at += count * struct.calcsize(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return _SCALARS[kind]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")
