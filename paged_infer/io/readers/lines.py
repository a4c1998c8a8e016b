"""Text formats with a row a line: JSONL and plain text.

Lines end at the byte 0x0A only: U+2028, U+0085, form feeds and the like may stand inside a JSON string.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.io.readers.files import STDIN, InputFile
from paged_infer.io.readers.json_rows import decode, json_text, parse_json_line
from paged_infer.io.readers.rows import Record
from paged_infer.io.schema import JSON_FIELD
from paged_infer.types import RowError

MAX_LINE_BYTES = 1 << 28
BOM = b"\xef\xbb\xbf"

_SCAN_BYTES = 1 << 22
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(b" \t\n\r\x0b\x0c")] = True


class TextSource:
    """What text formats share: a stream of bytes, in which rows can be counted only by reading."""

    is_table = False
    unit = "line"

    def __init__(self, path: str) -> None:
        self.file = InputFile(path)
        self.columns: list[str] | None = None
        self.appendable = path != STDIN and not self.file.compression
        self.fraction_read = self.file.fraction_read
        self.identity = self.file.identity

    @property
    def name(self) -> str:
        return self.file.name

    def num_rows(self) -> int | None:
        return None

    def count(self) -> int:
        with self.file.open() as stream:
            return scan_lines(stream)[0]

    def locate(self, rows: int) -> tuple[int, int]:
        with self.file.open() as stream:
            return scan_lines(stream, rows)[1:]

    def open_at(self, line: int, offset: int) -> tuple[BinaryIO, int]:
        """The bytes from a place on, and the number of the first line there.

        Where a file without a line end at its end has grown, that is the number of its last line once more.
        """
        if not offset:
            return self.file.open(), 1
        stream = self.file.open(offset - 1)
        return stream, line + (stream.read(1) in (b"\n", b"\r"))


def read_lines(stream: BinaryIO, number: int, offset: int) -> Iterator[tuple[int, int, bytes | RowError]]:
    """The lines that are not blank.

    Args:
        number, offset: of the stream's first line.

    Yields:
        (number, offset right behind it, the line with its end, or an error for one that is too long).
    """
    limit = MAX_LINE_BYTES
    for line_number in itertools.count(number):
        line = stream.readline(limit)
        if not line:
            return
        offset += len(line)
        if len(line) == limit and line[-1:] != b"\n":
            while line and line[-1:] != b"\n":
                line = stream.readline(limit)
                offset += len(line)
            yield line_number, offset, too_long()
            continue
        if line_number == 1:
            line = line.removeprefix(BOM)
        if line and not line.isspace():
            yield line_number, offset, line


def too_long() -> RowError:
    return RowError("line_too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")


def scan_lines(stream: BinaryIO, stop: int | None = None) -> tuple[int, int, int]:
    """Count rows (lines that are not blank), lines and bytes up to the end of row `stop`, or of the stream."""
    rows = lines = offset = 0
    begun = full = False  # whether a line has begun in an earlier block, and whether anything in it was not white space
    while stop is None or rows < stop:
        block = stream.read(_SCAN_BYTES)
        text = block if offset else block.removeprefix(BOM)
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 0x0A) + 1
        if not block and begun:
            ends = np.zeros(1, np.int64)  # the end of the stream ends a line
        if not block and not begun:
            break
        if not len(ends):
            begun, full = True, full or not _is_blank(text)
            offset += len(block)
            continue
        are_full = _not_blank(text, ends)
        are_full[0] |= full
        count = int(np.count_nonzero(are_full))
        if stop is not None and rows + count >= stop:
            last = int(np.flatnonzero(are_full)[stop - rows - 1])
            return stop, lines + last + 1, offset + len(block) - len(text) + int(ends[last])
        rows, lines, offset = rows + count, lines + len(ends), offset + len(block)
        begun, full = len(text) > ends[-1], not _is_blank(text[ends[-1] :])
    return rows, lines, offset


def _is_blank(text: bytes) -> bool:
    return not text or text.isspace()


def _not_blank(text: bytes, ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each line, given by where it ends, whether anything but white space is in it."""
    full = np.ones(len(ends), dtype=bool)
    full[1:] = ~_IS_SPACE[np.frombuffer(text, np.uint8)[ends[:-1]]]
    full[0] = False
    for i in np.flatnonzero(~full):
        full[i] = not _is_blank(text[ends[i - 1] if i else 0 : ends[i]])
    return full


class JsonLines(TextSource):
    """`.jsonl`: a JSON object a line."""

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        return [pa.field(name, pa.large_string(), metadata=JSON_FIELD) for name in names]

    def rows(self, line: int, offset: int, columns: Collection[str] | None) -> Iterator[Record]:
        stream, first = self.open_at(line, offset)
        with stream:
            for number, end, content in read_lines(stream, first, offset):
                try:
                    yield number, number, end, content if isinstance(content, RowError) else parse_json_line(content)
                except RowError as error:
                    yield number, number, end, error

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(None if data.get(name) is None else json_text(data[name]) for name in names)


class TextLines(TextSource):
    """`.txt`: a prompt a line, in the column `prompt`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.columns = ["prompt"]

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        for name in names:
            if name != "prompt":
                raise ConfigError(f"keep={name!r}: {self.name} has lines of text and only the column 'prompt'")
        return [pa.field(name, pa.large_string()) for name in names]

    def rows(self, line: int, offset: int, columns: Collection[str] | None) -> Iterator[Record]:
        stream, first = self.open_at(line, offset)
        with stream:
            for number, end, content in read_lines(stream, first, offset):
                try:
                    if isinstance(content, RowError):
                        raise content
                    yield number, number, end, {"prompt": decode(content.rstrip(b"\r\n"))}
                except RowError as error:
                    yield number, number, end, error

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(data.get(name) for name in names)
