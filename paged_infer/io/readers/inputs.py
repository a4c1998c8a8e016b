"""All inputs of a job as one sequence of rows that can be entered anywhere."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.io.readers.csv_file import CsvFile
from paged_infer.io.readers.expand import TABLE_SUFFIXES, TEXT_SUFFIXES, expand, is_data_file, is_hub_dataset
from paged_infer.io.readers.files import COMPRESSIONS, STDIN, suffixes
from paged_infer.io.readers.hub import open_hub_dataset
from paged_infer.io.readers.lines import JsonLines, TextLines
from paged_infer.io.readers.rows import InputDamaged, Position, Row, Source
from paged_infer.io.readers.tables import open_table
from paged_infer.types import RowError

_TEXT: dict[str, Callable[[str], Source]] = {".csv": CsvFile, ".txt": TextLines}


def open_source(path: str) -> Source:
    """The reader for a file, chosen by the ending of its name; `-` is JSONL from standard input.

    Raises `ConfigError` for a missing, unreadable or unknown kind of file.
    """
    if path == STDIN:
        return JsonLines(path)
    if is_hub_dataset(path):
        return open_hub_dataset(path)
    kind = suffixes(path)[0]
    if not is_data_file(path):
        hint = "" if kind != ".json" else "; name it .jsonl if it has an object a line, and write an array that way"
        known = ", ".join(sorted(TEXT_SUFFIXES | TABLE_SUFFIXES))
        raise ConfigError(
            f"cannot tell what {path} is by its name: expected one of {known}; text formats also with "
            f"{', '.join(COMPRESSIONS)}{hint}"
        )
    if kind in TABLE_SUFFIXES:
        return open_table(path)
    try:
        return _TEXT.get(kind, JsonLines)(path)
    except InputDamaged as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


class Inputs:
    """Several inputs as one sequence of rows.

    Args:
        paths: what to read, in order: files, folders, patterns, URLs, `-`.
        keep: names of columns that go along into the output.
        columns: names of columns that are used; None = all. Only tables can leave the others unread.

    Attributes:
        paths: the files that are meant.
        kept_fields: the types of the kept columns.

    Raises:
        ConfigError: a file is missing or of unknown kind, or lacks a kept column, or two files type it differently.
    """

    def __init__(self, paths: Sequence[str], keep: Sequence[str] = (), columns: Collection[str] | None = None) -> None:
        self.paths = expand(paths)
        self._sources = [open_source(path) for path in self.paths]
        self._keep = list(keep)
        self._columns = None if columns is None else {*columns, *keep}
        self._place = (0, 0, 0, 0)
        self._current = 0
        kept = [source.fields(self._keep) for source in self._sources]
        for path, fields in zip(self.paths, kept, strict=True):
            for field, first in zip(fields, kept[0], strict=True):
                if field.type != first.type:
                    raise ConfigError(
                        f"keep={field.name!r}: {first.type} in {self.paths[0]} but {field.type} in {path}; "
                        f"run files of one kind together"
                    )
        self.kept_fields: list[pa.Field] = kept[0] if kept else []

    def columns(self) -> list[str] | None:
        """The columns of the first input; None where its rows differ, as those of JSONL do."""
        return self._sources[0].columns if self._sources else None

    def rows(self, start: Position | None = None) -> Iterator[Row]:
        """All rows from a place on.

        A file that turns out damaged ends in an error row at that place, and the next file goes on.

        Raises:
            ConfigError: `start` is within standard input, or behind the last file.
            InputFailed: disk or network failed; `position` is where to go on.
        """
        start = start or Position()
        if start.source > len(self._sources):
            raise ConfigError(f"there is no input number {start.source + 1} to go on with")
        if start.offset and self.paths[start.source] == STDIN:
            raise ConfigError("standard input cannot be entered in the middle: save it as a file and name that")
        self._place = (start.index, start.source, start.line, start.offset)
        return self._rows(start)

    def _rows(self, start: Position) -> Iterator[Row]:
        index, nothing = start.index, (None,) * len(self._keep)
        place = (start.line, start.offset)
        for ordinal in range(start.source, len(self._sources)):
            source = self._sources[ordinal]
            self._current = ordinal
            name, is_table, unit = source.name, source.is_table, source.unit
            line = place[0]
            kept: tuple[Any, ...] = ()
            try:
                for begin, line, offset, parsed in source.rows(*place, self._columns):
                    self._place = (index + 1, ordinal, line, offset)
                    if isinstance(parsed, RowError):
                        yield Row(index, name, begin, is_table, {}, nothing, parsed, unit)
                    else:
                        if self._keep:
                            kept = source.kept(parsed, self._keep)
                        yield Row(index, name, begin, is_table, parsed, kept, None, unit)
                    index += 1
            except InputDamaged as error:
                self._place = (index + 1, ordinal + 1, 0, 0)
                broken = RowError("input_damaged", f"reading stops here: {error}")
                yield Row(index, name, line + 1, is_table, {}, nothing, broken, unit)
                index += 1
            place = (0, 0)
        self._current = len(self._sources)

    @property
    def position(self) -> Position:
        """The place right behind the row that `rows` yielded last."""
        return Position(*self._place)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Of each file `name`, `size`, `head` and `tail`: the SHA-256 of its first and last 64 KiB as stored.

        All but the name is None for standard input and whatever has no size.
        """
        return [source.identity() for source in self._sources]

    @property
    def sources(self) -> Sequence[Source]:
        """The files' readers, in the order of `paths`."""
        return self._sources

    def count(self) -> int:
        """How many rows there are. Reads text files through. Raises `ConfigError` for standard input."""
        return sum(self._counts())

    def _counts(self) -> list[int]:
        if STDIN in self.paths:
            raise ConfigError(
                "the rows of standard input cannot be counted beforehand: save it as a file and name that"
            )
        return [_count(source) for source in self._sources]

    def shard(self, i: int, n: int) -> tuple[Position, int]:
        """The i-th of n contiguous parts, 1 <= i <= n, whose sizes differ by one row at most.

        Returns:
            Where it begins (for `rows`), and the index of the row it stops before.
        """
        counts = self._counts()
        total = sum(counts)
        begin, end = total * (i - 1) // n, total * i // n
        before = 0
        for ordinal, (source, count) in enumerate(zip(self._sources, counts, strict=True)):
            if begin < before + count:
                return Position(begin, ordinal, *_locate(source, begin - before)), end
            before += count
        return Position(begin, len(self._sources), 0, 0), end

    def num_rows(self) -> int | None:
        """How many rows there are in all, where every file says so."""
        counts = [source.num_rows() for source in self._sources]
        return sum(count for count in counts if count is not None) if None not in counts else None

    def fraction_read(self) -> float | None:
        """How far reading has come, files weighted equally, where that is known."""
        if self._current == len(self._sources):
            return 1.0
        current = self._sources[self._current].fraction_read()
        return None if current is None else (self._current + current) / len(self._sources)


def _count(source: Source) -> int:
    """The rows of a file; where it is damaged, those before that and the error row that stands for the rest."""
    try:
        return source.count()
    except InputDamaged:
        return _walk(source, None)[0] + 1


def _locate(source: Source, rows: int) -> tuple[int, int]:
    try:
        return source.locate(rows)
    except InputDamaged:
        return _walk(source, rows)[1]


def _walk(source: Source, stop: int | None) -> tuple[int, tuple[int, int]]:
    """(rows read, place behind them) up to row `stop`, or to where the file is damaged."""
    rows, place = 0, (0, 0)
    with contextlib.suppress(InputDamaged):
        for _, line, offset, _ in itertools.islice(source.rows(0, 0, ()), stop):
            rows, place = rows + 1, (line, offset)
    return rows, place
