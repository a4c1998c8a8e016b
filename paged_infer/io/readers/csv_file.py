"""CSV with a header. Every value is text; a quoted one may hold line ends."""

from __future__ import annotations

import csv
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from paged_infer.io.readers import lines
from paged_infer.io.readers.lines import BOM, TextSource
from paged_infer.io.readers.rows import Record, no_column
from paged_infer.types import RowError


class _Records:
    """The records of a stream, the number of the line each begins on, and where it ends."""

    def __init__(self, stream: BinaryIO, number: int, offset: int) -> None:
        self.offset = offset
        self.line = number - 1
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._undecoded = False
        self._ended = False

    def _next_line(self) -> str:
        """A line with its end, be that CR, LF or both; the csv module joins those of one record. "" is the end.

        Raises `RowError` for a line that is too long, behind it.
        """
        while not self._lines:
            block = self._stream.readline(lines.MAX_LINE_BYTES)
            pieces = (self._rest + block).splitlines(keepends=True)
            self._rest = pieces.pop() if pieces and block and not block.endswith(b"\n") else b""
            if len(self._rest) >= lines.MAX_LINE_BYTES and not self._rest.endswith(b"\r"):
                self._skip_line()
                raise lines.too_long()
            self._lines.extend(pieces)
            if not block and not pieces:
                self._ended = True
                return ""
        line = self._lines.popleft()
        self.offset += len(line)
        self.line += 1
        text = line.removeprefix(BOM) if self.line == 1 else line
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            self._undecoded = True
            return text.decode("utf-8", "replace")

    def _skip_line(self) -> None:
        """Read past the end of a line whose beginning is `_rest`."""
        while self._rest:
            self.offset += len(self._rest)
            self._rest = b"" if self._rest.endswith(b"\n") else self._stream.readline(lines.MAX_LINE_BYTES)
        self.line += 1

    def __iter__(self) -> Iterator[tuple[int, int, int, list[str] | RowError]]:
        csv.field_size_limit(lines.MAX_LINE_BYTES)
        reader = csv.reader(iter(self._next_line, ""))
        record: list[str] | RowError | None
        while True:
            begin = self.line + 1
            try:
                record = next(reader, None)
            except csv.Error as error:
                record = RowError("invalid_csv", f"not CSV: {error}")
            except RowError as error:
                record = error
            if record is None:
                return
            if not record:
                continue
            if self._ended:
                record = RowError("invalid_csv", "a quoted value that begins here is never closed")
            elif self._undecoded:
                record = RowError("invalid_utf8", "the line is not UTF-8")
            self._undecoded = False
            yield begin, self.line, self.offset, record


class CsvFile(TextSource):
    """`.csv`."""

    is_table = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        header: list[str] = []
        self._start = (0, 0)
        with self.file.open() as stream:
            for _, line, offset, record in _Records(stream, 1, 0):
                header = record if isinstance(record, list) else []
                self._start = (line, offset)
                break
        self.columns = header
        self._header = header

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        for name in names:
            if name not in self._header:
                raise no_column(name, self.name, self._header)
        return [pa.field(name, pa.large_string()) for name in names]

    def rows(self, line: int, offset: int, columns: Collection[str] | None) -> Iterator[Record]:
        if not self._start[1]:
            return
        line, offset = max((line, offset), self._start)
        width = len(self._header)
        stream, number = self.open_at(line, offset)
        with stream:
            for begin, line, end, record in _Records(stream, number, offset):
                if isinstance(record, RowError):
                    yield begin, line, end, record
                elif len(record) > width:
                    yield begin, line, end, RowError("invalid_csv", f"{len(record)} values for {width} columns")
                else:
                    yield begin, line, end, dict(zip(self._header, record, strict=False))

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(data.get(name) for name in names)

    def count(self) -> int:
        return sum(1 for _ in self.rows(0, 0, None))

    def locate(self, rows: int) -> tuple[int, int]:
        place = self._start
        for _, line, offset, _ in itertools.islice(self.rows(0, 0, None), rows):
            place = line, offset
        return place
