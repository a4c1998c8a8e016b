"""Parquet and Arrow files, a record batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from paged_infer.config import ConfigError
from paged_infer.io.readers.files import InputFile
from paged_infer.io.readers.rows import InputDamaged, Record, first_line, no_column
from paged_infer.types import InputFailed, RowError

TABLE_BATCH_ROWS = 1024

_BAD_TABLE = (OSError, ValueError, pa.ArrowException)


class Unreadable:
    """Stands for rows that cannot be read, though those behind them can."""

    def __init__(self, num_rows: int, reason: str) -> None:
        self.num_rows = num_rows
        self.reason = reason


class Batches(Protocol):
    """A file as a sequence of record batches."""

    schema: pa.Schema

    def read(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch | Unreadable]:
        """All rows from row `start` on; `columns` is a hint."""
        ...

    def num_rows(self) -> int | None:
        """How many rows there are, where that costs nothing to say."""
        ...

    def count(self) -> int:
        """How many rows there are."""
        ...

    def fraction_read(self) -> float | None: ...

    def identity(self) -> dict[str, Any]: ...


class Table:
    """Rows of a file that comes in record batches."""

    is_table = True
    unit = "row"
    appendable = False

    def __init__(self, name: str, batches: Batches) -> None:
        self.name = name
        self._batches = batches
        self.schema = batches.schema
        names: list[str] = batches.schema.names
        self.columns: list[str] | None = names
        self._names = names
        self.num_rows = batches.num_rows
        self.fraction_read = batches.fraction_read
        self.identity = batches.identity

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        for name in names:
            if name not in self._names:
                raise no_column(name, self.name, self._names)
        return [self.schema.field(name) for name in names]

    def rows(self, line: int, offset: int, columns: Collection[str] | None) -> Iterator[Record]:
        wanted = [name for name in self._names if columns is None or name in columns]
        numbers = itertools.count(offset + 1)
        try:
            for batch in self._batches.read(offset, wanted):
                if isinstance(batch, Unreadable):
                    for number in itertools.islice(numbers, batch.num_rows):
                        yield number, number, number, RowError("input_damaged", batch.reason)
                    continue
                selected = batch.select(wanted)
                for start in range(0, batch.num_rows, TABLE_BATCH_ROWS):
                    for row in _python_rows(selected.slice(start, TABLE_BATCH_ROWS)):
                        number = next(numbers)
                        yield number, number, number, row
        except InputFailed:
            raise
        except _BAD_TABLE as error:
            raise InputDamaged(first_line(error)) from error

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(data[name] for name in names)

    def count(self) -> int:
        try:
            return self._batches.count()
        except InputFailed:
            raise
        except _BAD_TABLE as error:
            raise InputDamaged(first_line(error)) from error

    def locate(self, rows: int) -> tuple[int, int]:
        return rows, rows


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | RowError]:
    """Rows as Python values. Arrow trusts a file's offsets, and a wrong one ends the process: so they are checked."""
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    try:
        batch.validate(full=True)
        return batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            return [RowError("invalid_value", f"a value cannot be read: {first_line(error)}")]
        return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]


def open_table(path: str) -> Table:
    """A Parquet file, or an Arrow file of either IPC form. Raises `ConfigError` when it is none."""
    file = InputFile(path)
    kind = _Parquet if Path(path).suffix.lower() == ".parquet" else _arrow_kind(file)
    try:
        return Table(file.name, kind(file))
    except InputFailed:
        raise
    except _BAD_TABLE as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from None


class _File:
    """The part that the formats share: one file, and how far reading has come in it."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._fraction = 0.0
        self.identity = file.identity

    @contextmanager
    def _opened(self) -> Iterator[pa.NativeFile]:
        """The file, mapped into memory where it can be, so that skipping costs nothing."""
        if self._file.is_local:
            with pa.memory_map(self._file.path) as source:
                yield source
        else:
            with self._file.open_stored() as stored, pa.PythonFile(stored, mode="r") as source:
                yield source

    def fraction_read(self) -> float | None:
        return self._fraction


class _Parquet(_File):
    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        with self._opened() as source:
            parquet = pa.parquet.ParquetFile(source)
            self.schema: pa.Schema = parquet.schema_arrow
            self._metadata = parquet.metadata

    def read(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch | Unreadable]:
        with self._opened() as source:
            parquet = pa.parquet.ParquetFile(source, metadata=self._metadata, buffer_size=1 << 20)
            position = 0
            for group in range(self._metadata.num_row_groups):
                end = position + self._metadata.row_group(group).num_rows
                if end > start:
                    yield from self._read_group(parquet, group, position, end, start, columns)
                position = end
                self._fraction = end / self._metadata.num_rows if self._metadata.num_rows else 1.0

    def _read_group(
        self, parquet: pa.parquet.ParquetFile, group: int, position: int, end: int, start: int, columns: list[str]
    ) -> Iterator[pa.RecordBatch | Unreadable]:
        """Rows [max(position, start), end) of a row group that holds [position, end)."""
        try:
            for batch in parquet.iter_batches(TABLE_BATCH_ROWS, row_groups=[group], columns=columns):
                position += batch.num_rows
                if position > start:
                    yield batch.slice(max(0, batch.num_rows - (position - start)))
                    self._fraction = position / self._metadata.num_rows
        except InputFailed:
            raise
        except _BAD_TABLE as error:
            yield Unreadable(end - max(position, start), f"row group {group} cannot be read: {first_line(error)}")

    def num_rows(self) -> int | None:
        return self.count()

    def count(self) -> int:
        return int(self._metadata.num_rows)


class _ArrowFile(_File):
    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        with self._opened() as source:
            self.schema: pa.Schema = pa.ipc.open_file(source).schema

    def read(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch | Unreadable]:
        with self._opened() as source:
            reader = pa.ipc.open_file(source)
            position = 0
            for i in range(reader.num_record_batches):
                batch = reader.get_batch(i)
                position += batch.num_rows
                if position > start:
                    yield batch.slice(max(0, batch.num_rows - (position - start)))
                self._fraction = (i + 1) / reader.num_record_batches

    def num_rows(self) -> int | None:
        return None

    def count(self) -> int:
        with self._opened() as source:
            reader = pa.ipc.open_file(source)
            return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


class _ArrowStream(_File):
    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        with self._opened() as source:
            self.schema: pa.Schema = pa.ipc.open_stream(source).schema

    def read(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch | Unreadable]:
        with self._opened() as source:
            position = 0
            for batch in pa.ipc.open_stream(source):
                position += batch.num_rows
                if position > start:
                    yield batch.slice(max(0, batch.num_rows - (position - start)))
                self._fraction = source.tell() / self._file.size if self._file.size else 0.0

    def num_rows(self) -> int | None:
        return None

    def count(self) -> int:
        with self._opened() as source:
            return sum(batch.num_rows for batch in pa.ipc.open_stream(source))


def _arrow_kind(file: InputFile) -> type[_ArrowFile] | type[_ArrowStream]:
    return _ArrowFile if file.stored_bytes(0, 6) == b"ARROW1" else _ArrowStream
