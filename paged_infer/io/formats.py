"""The formats results are presented in, and how results of any of them are read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from paged_infer.config import ConfigError
from paged_infer.io.schema import JSON_FIELD, RESULT_COLUMNS, RESULT_FIELDS

OUTPUT_SUFFIXES = (".arrow", ".feather", ".parquet", ".jsonl")
JSON_LINES_AT_ONCE = 256


class Sink(Protocol):
    """A results file in the making; batches arrive in input order."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None: ...


class _JsonLines:
    """One JSON object a line; NaN and infinities are null, JSON text of kept columns is embedded as JSON."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._file = file
        self._json_columns = [f.name for f in schema if f.metadata and JSON_FIELD.items() <= f.metadata.items()]

    def write(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            for name in self._json_columns:
                if row[name] is not None:
                    row[name] = orjson.Fragment(row[name])
            self._file.write(orjson.dumps(row, default=_as_json, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        pass


def _as_json(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


class _Batches:
    """Arrow and Parquet files by their pyarrow writers."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.close = writer.close

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)


MakeSink = Callable[[BinaryIO, pa.Schema], Sink]


def sink_of(suffix: str) -> MakeSink:
    """What writes the format that a name's ending stands for."""
    if suffix == ".jsonl":
        return _JsonLines
    if suffix == ".parquet":
        return lambda file, schema: _Batches(pa.parquet.ParquetWriter(file, schema))
    new = pa.ipc.new_file if suffix == ".feather" else pa.ipc.new_stream
    return lambda file, schema: _Batches(new(file, schema))


def write_results(make: MakeSink, file: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches through a sink."""
    sink = make(file, schema)
    for batch in batches:
        sink.write(batch)
    sink.close()


def read_schema(path: Path) -> pa.Schema | None:
    """The schema of a results file; None for JSON lines, which have none."""
    if path.suffix == ".jsonl":
        return None
    if path.suffix == ".parquet":
        return pa.parquet.read_schema(path)
    with pa.memory_map(str(path)) as source:
        return _open_arrow(source).schema


def read_file(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a complete results file. Raises `ConfigError` when it holds none or ends early."""
    try:
        for batch in _read_file(path):
            if not RESULT_COLUMNS.issubset(batch.schema.names):
                raise ConfigError(f"{path} holds no results: it has the columns {', '.join(batch.schema.names)}")
            yield batch
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path} holds no readable results: {str(error).splitlines()[0]}") from None


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
        with pa.parquet.ParquetFile(path) as parquet:
            yield from parquet.iter_batches()
    elif path.suffix == ".jsonl":
        yield from _read_json_lines(path)
    else:
        with pa.memory_map(str(path)) as source:
            reader = _open_arrow(source)
            if isinstance(reader, pa.ipc.RecordBatchFileReader):
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from reader


def _open_arrow(source: Any) -> Any:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)


def _read_json_lines(path: Path) -> Iterator[pa.RecordBatch]:
    """Result columns as they are typed; kept ones as JSON text, in the columns of the first line."""
    fields = {field.name: field for field in RESULT_FIELDS}
    schema: pa.Schema | None = None
    rows: list[dict[str, Any]] = []
    with open(path, "rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            if not isinstance(row, dict):
                raise ConfigError(f"{path} holds no results: {line[:40]!r} is no object")
            for name in row.keys() - RESULT_COLUMNS:
                row[name] = None if row[name] is None else orjson.dumps(row[name]).decode()
            if schema is None:
                schema = pa.schema(
                    [fields.get(name) or pa.field(name, pa.large_string(), metadata=JSON_FIELD) for name in row]
                )
            rows.append(row)
            if len(rows) == JSON_LINES_AT_ONCE:
                yield pa.RecordBatch.from_pylist(rows, schema=schema)
                rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=schema)
