"""CSV with a header. Every value is text; a quoted one may hold line ends."""

from __future__ import annotations

import csv
import itertools
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
        self._stream = stream
        self._first = number
        self._undecoded = False
        self._ended = False

    def _physical_lines(self) -> Iterator[str]:
        """Lines with their ends, be they CR, LF or both; the csv module joins those of one record."""
        number = self._first
        while block := self._stream.readline(lines.MAX_LINE_BYTES):
            for line in block.splitlines(keepends=True):
                self.offset += len(line)
                text = line.removeprefix(BOM) if number == 1 else line
                number += 1
                try:
                    yield text.decode("utf-8")
                except UnicodeDecodeError:
                    self._undecoded = True
                    yield text.decode("utf-8", "replace")
        self._ended = True

    def __iter__(self) -> Iterator[tuple[int, int, int, list[str] | RowError]]:
        csv.field_size_limit(lines.MAX_LINE_BYTES)
        reader = csv.reader(self._physical_lines())
        before = self._first - 1
        record: list[str] | RowError | None
        while True:
            number = before + reader.line_num + 1
            try:
                record = next(reader, None)
            except csv.Error as error:
                record = RowError("invalid_csv", f"not CSV: {error}")
            if record is None:
                return
            if not record:
                continue
            if self._ended:
                record = RowError("invalid_csv", "a quoted value that begins here is never closed")
            elif self._undecoded:
                record = RowError("invalid_utf8", "the line is not UTF-8")
            self._undecoded = False
            yield number, before + reader.line_num, self.offset, record


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
