"""Input files to rows, streaming: a bad line becomes a row with an error and its neighbours do not notice.

Text formats are split on the byte 0x0A only: U+2028, U+0085, form feeds and the like may stand inside a JSON string.
Memory is bounded by the longest line and one record batch, never by the file.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from paged_infer.config import ConfigError
from paged_infer.io.schema import JSON_FIELD
from paged_infer.types import RowError

STDIN = "-"
MAX_LINE_BYTES = 1 << 28
TABLE_BATCH_ROWS = 1024

_COMPRESSIONS = (".gz", ".zst", ".bz2")
_DAMAGED = (OSError, EOFError, zlib.error, pa.ArrowException)
_BOM = b"\xef\xbb\xbf"
_LONG_INTEGER = re.compile(rb"[0-9]{19}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class Row:
    """One input row.

    Attributes:
        index: 0-based position over all inputs, blank lines not counted.
        source, line: the file and the 1-based line (text formats) or row (tables) in it.
        is_table: whether it comes from a table, where a column named like an option is data.
        data: column → value; empty when `error` is set.
        kept: values of the kept columns, in the order they were asked for; JSON text where the format has no types.
        error: why the row could not be read.
    """

    index: int
    source: str
    line: int
    is_table: bool
    data: dict[str, Any]
    kept: tuple[Any, ...] = ()
    error: RowError | None = None

    @property
    def where(self) -> str:
        return f"{self.source} line {self.line}"


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading goes on."""

    index: int
    source: int
    line: int
    offset: int

    def to_json(self) -> dict[str, int]:
        return {"index": self.index, "source": self.source, "line": self.line, "offset": self.offset}

    @classmethod
    def from_json(cls, data: Any) -> Position:
        return cls(**data)


Parsed = tuple[int, dict[str, Any] | RowError]


class Source(Protocol):
    """One input file."""

    is_table: bool

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        """How the named columns are kept. Raises `ConfigError` for a column the file cannot have."""
        ...

    def rows(self, columns: Collection[str] | None) -> Iterator[Parsed]:
        """(line, columns or error) of each row; formats that can read single columns read these only (None = all)."""
        ...

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        """The values of the named columns as `fields` types them."""
        ...

    def num_rows(self) -> int | None:
        """How many rows there are, where the file says so."""
        ...

    def fraction_read(self) -> float | None:
        """How far reading has come, 0 to 1, where that is known."""
        ...


class _Lines:
    """The lines of a possibly compressed byte stream and how far it has been read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._raw: BinaryIO | None = None
        self._size = 0 if path == STDIN else Path(path).stat().st_size

    def open(self) -> BinaryIO:
        """The decompressed bytes, from the start."""
        if self.path == STDIN:
            return sys.stdin.buffer
        self._raw = raw = open(self.path, "rb", buffering=1 << 20)  # noqa: SIM115
        suffix = Path(self.path).suffix.lower()
        if suffix == ".gz":
            return cast(BinaryIO, gzip.open(raw))
        if suffix == ".bz2":
            return cast(BinaryIO, bz2.open(raw))
        if suffix == ".zst":
            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
            return cast(BinaryIO, io.BufferedReader(stream, 1 << 16))
        return raw

    def __iter__(self) -> Iterator[tuple[int, bytes | RowError]]:
        """(1-based number, line with its end) of every line that is not blank; an over-long line is an error."""
        with self.open() as stream:
            for number in itertools.count(1):
                line = stream.readline(MAX_LINE_BYTES)
                if not line:
                    return
                if number == 1:
                    line = line.removeprefix(_BOM)
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(MAX_LINE_BYTES)
                    yield number, RowError("line_too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                elif line.strip():
                    yield number, line

    def fraction_read(self) -> float | None:
        if self._raw is None or not self._size:
            return None
        return 1.0 if self._raw.closed else self._raw.tell() / self._size


def parse_json_line(line: bytes) -> dict[str, Any]:
    """One JSON object. Integers keep every digit, lone surrogates become U+FFFD, of repeated keys the last wins.

    orjson is asked first; where it refuses or would round, the standard library decides. Raises `RowError`.
    """
    try:
        value = _parse_exactly(line) if _LONG_INTEGER.search(line) else orjson.loads(line)
    except orjson.JSONDecodeError:
        value = _parse_exactly(line)
    if not isinstance(value, dict):
        hint = "; a JSON array is no JSONL: write one object a line" if isinstance(value, list) else ""
        raise RowError("invalid_json", f"expected a JSON object, found {_KINDS[type(value)]}{hint}")
    return value


_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def _parse_exactly(line: bytes) -> Any:
    try:
        return _well_formed(_DECODER.decode(line.decode("utf-8").strip()))
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise RowError("invalid_json", f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowError("invalid_json", "not usable JSON: nested too deeply") from None


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


_DECODER = json.JSONDecoder(parse_int=_integer)


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub(_REPLACEMENT, value)
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return value


def json_text(value: Any) -> str:
    """A value as JSON; integers of any size."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value, ensure_ascii=False)


class JsonLines:
    """`.jsonl`: a JSON object a line."""

    is_table = False

    def __init__(self, path: str) -> None:
        self._lines = _Lines(path)
        self.fraction_read = self._lines.fraction_read

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        return [pa.field(name, pa.large_string(), metadata=JSON_FIELD) for name in names]

    def rows(self, columns: Collection[str] | None) -> Iterator[Parsed]:
        for number, line in self._lines:
            try:
                yield number, line if isinstance(line, RowError) else parse_json_line(line)
            except RowError as error:
                yield number, error

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(None if data.get(name) is None else json_text(data[name]) for name in names)

    def num_rows(self) -> int | None:
        return None


class TextLines:
    """`.txt`: a prompt a line, in the column `prompt`."""

    is_table = False

    def __init__(self, path: str) -> None:
        self._lines = _Lines(path)
        self.fraction_read = self._lines.fraction_read

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        for name in names:
            if name != "prompt":
                raise ConfigError(f"keep={name!r}: {self._lines.path} has lines of text and only the column 'prompt'")
        return [pa.field(name, pa.large_string()) for name in names]

    def rows(self, columns: Collection[str] | None) -> Iterator[Parsed]:
        for number, line in self._lines:
            if isinstance(line, RowError):
                yield number, line
                continue
            try:
                yield number, {"prompt": line.rstrip(b"\r\n").decode("utf-8")}
            except UnicodeDecodeError as error:
                yield number, RowError("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start} of the line")

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(data.get(name) for name in names)

    def num_rows(self) -> int | None:
        return None


class CsvFile:
    """`.csv` with a header; every value is text. A quoted value may hold line ends."""

    is_table = True

    def __init__(self, path: str) -> None:
        self._lines = _Lines(path)
        self.fraction_read = self._lines.fraction_read
        header = next(self._records(), None)
        self._header = [] if header is None or isinstance(header[1], RowError) else header[1]

    def _records(self) -> Iterator[tuple[int, list[str] | RowError]]:
        csv.field_size_limit(MAX_LINE_BYTES)
        with self._lines.open() as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            reader = csv.reader(text)
            while True:
                line = reader.line_num + 1
                try:
                    record = next(reader, None)
                except csv.Error as error:
                    yield line, RowError("invalid_csv", f"not CSV: {error}")
                    continue
                if record is None:
                    return
                if any(_SURROGATE.search(value) for value in record):
                    yield line, RowError("invalid_utf8", "the line is not UTF-8")
                elif record:
                    yield line, record

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        for name in names:
            if name not in self._header:
                raise _no_column(name, self._lines.path, self._header)
        return [pa.field(name, pa.large_string()) for name in names]

    def rows(self, columns: Collection[str] | None) -> Iterator[Parsed]:
        for number, record in itertools.islice(self._records(), 1, None):
            if isinstance(record, list) and len(record) > len(self._header):
                record = RowError("invalid_csv", f"{len(record)} values for {len(self._header)} columns")
            if isinstance(record, RowError):
                yield number, record
            else:
                yield number, dict(zip(self._header, record, strict=False))

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(data.get(name) for name in names)

    def num_rows(self) -> int | None:
        return None


class Table:
    """Parquet and Arrow files, a record batch at a time."""

    is_table = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.schema: pa.Schema
        self._fraction = 0.0
        self._num_rows: int | None = None
        if Path(path).suffix.lower() == ".parquet":
            parquet = pa.parquet.ParquetFile(path)
            self.schema = parquet.schema_arrow
            self._num_rows = parquet.metadata.num_rows
            self._read = self._read_parquet
        else:
            with pa.memory_map(path) as source:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                self.schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).schema
            self._read = self._read_file if is_file else self._read_stream

    def _read_parquet(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        read = 0
        with pa.parquet.ParquetFile(self.path) as parquet:
            for batch in parquet.iter_batches(TABLE_BATCH_ROWS, columns=columns):
                yield batch
                read += batch.num_rows
                self._fraction = read / parquet.metadata.num_rows

    def _read_file(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(self.path) as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)
                self._fraction = (i + 1) / reader.num_record_batches

    def _read_stream(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(self.path) as source:
            for batch in pa.ipc.open_stream(source):
                yield batch
                self._fraction = source.tell() / source.size()

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        for name in names:
            if name not in self.schema.names:
                raise _no_column(name, self.path, self.schema.names)
        return [self.schema.field(name) for name in names]

    def rows(self, columns: Collection[str] | None) -> Iterator[Parsed]:
        wanted = [name for name in self.schema.names if columns is None or name in columns]
        number = itertools.count(1)
        for batch in self._read(wanted):
            selected = batch.select(wanted)
            for start in range(0, batch.num_rows, TABLE_BATCH_ROWS):
                for parsed in _python_rows(selected.slice(start, TABLE_BATCH_ROWS)):
                    yield next(number), parsed

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(data[name] for name in names)

    def num_rows(self) -> int | None:
        return self._num_rows

    def fraction_read(self) -> float | None:
        return self._fraction


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | RowError]:
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            return [RowError("invalid_value", f"a value cannot be read: {_first_line(error)}")]
        return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]


def _no_column(name: str, path: str, columns: Sequence[str]) -> ConfigError:
    return ConfigError(f"{path} has no column {name!r}; its columns are {', '.join(columns)}")


_KIND: dict[str, Callable[[str], Source]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".txt": TextLines,
    ".csv": CsvFile,
    ".parquet": Table,
    ".arrow": Table,
    ".feather": Table,
}
_TEXT_SUFFIXES = frozenset({".jsonl", ".ndjson", ".txt", ".csv"})


def open_source(path: str) -> Source:
    """The reader for a file, chosen by the ending of its name; `-` is JSONL from standard input.

    Raises `ConfigError` for a missing, unreadable or unknown kind of file.
    """
    if path == STDIN:
        return JsonLines(path)
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    compressed = bool(suffixes) and suffixes[-1] in _COMPRESSIONS
    kind = suffixes[-2] if compressed and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    if kind not in _KIND or (compressed and kind not in _TEXT_SUFFIXES):
        raise ConfigError(
            f"cannot tell what {path} is by its name: expected one of {', '.join(sorted(_KIND))}; "
            f"text formats also with {', '.join(_COMPRESSIONS)}"
        )
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a folder; name the files in it")
    try:
        return _KIND[kind](path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except _DAMAGED as error:
        raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Inputs:
    """Several inputs as one sequence of rows.

    Args:
        paths: files, in order.
        keep: names of columns that go along into the output.
        columns: names of columns that are used; None = all. Only tables can leave the others unread.

    Raises:
        ConfigError: a file is missing or of unknown kind, or lacks a kept column, or two files type it differently.
    """

    def __init__(self, paths: Sequence[str], keep: Sequence[str] = (), columns: Collection[str] | None = None) -> None:
        self.paths = list(paths)
        self._sources = [open_source(path) for path in paths]
        self._keep = list(keep)
        self._columns = None if columns is None else {*columns, *keep}
        self._finished = 0
        self.position = Position(0, 0, 0, 0)
        self.first_row = 0
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
        """The columns of the first input where it is an Arrow or Parquet table."""
        first = self._sources[0] if self._sources else None
        return list(first.schema.names) if isinstance(first, Table) else None

    def rows(self, start: Position | None = None) -> Iterator[Row]:
        for row in self._all_rows():
            self.position = Position(row.index + 1, 0, row.line, 0)
            if start is None or row.index >= start.index:
                yield row

    def fingerprint(self) -> list[dict[str, Any]]:
        return [{"name": path, "size": None if path == STDIN else Path(path).stat().st_size} for path in self.paths]

    def _all_rows(self) -> Iterator[Row]:
        """All rows. A file that turns out damaged ends in an error row at that place; the next file goes on."""
        index = itertools.count()
        for path, source in zip(self.paths, self._sources, strict=True):
            name = "standard input" if path == STDIN else path
            nothing = (None,) * len(self._keep)
            line = 0
            try:
                for line, parsed in source.rows(self._columns):
                    if isinstance(parsed, RowError):
                        yield Row(next(index), name, line, source.is_table, {}, nothing, parsed)
                    else:
                        kept = source.kept(parsed, self._keep) if self._keep else ()
                        yield Row(next(index), name, line, source.is_table, parsed, kept)
            except _DAMAGED as error:
                broken = RowError("input_damaged", f"reading stops here: {_first_line(error)}")
                yield Row(next(index), name, line + 1, source.is_table, {}, nothing, broken)
            self._finished += 1

    def num_rows(self) -> int | None:
        """How many rows there are in all, where every file says so."""
        counts = [source.num_rows() for source in self._sources]
        return sum(count for count in counts if count is not None) if None not in counts else None

    def fraction_read(self) -> float | None:
        """How far reading has come, files weighted equally, where that is known."""
        if self._finished == len(self._sources):
            return 1.0
        current = self._sources[self._finished].fraction_read()
        return None if current is None else (self._finished + current) / len(self._sources)
