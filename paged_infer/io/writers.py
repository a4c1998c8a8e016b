"""Results on their way to disk: appended as they finish, presented complete and in input order.

While a job runs, rows go in batches to `OUT.partial`, an Arrow IPC stream that any reader can follow and that survives
a kill up to its last whole batch. `OUT` appears by an atomic rename and only when every row is in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from paged_infer.config import ConfigError
from paged_infer.io.schema import JSON_FIELD, RESULT_COLUMNS, RESULT_FIELDS
from paged_infer.types import Completion

FLUSH_SECONDS = 2.0
FLUSH_BYTES = 8 << 20
ORDERED_BATCH_ROWS = 4096
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


NOT_YET = frozenset({"cumulative_logprob", "score", "valid", "adapter", "logprobs", "prompt_logprobs"})
"""Result columns whose values no completion has."""


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


def _sink(suffix: str, file: BinaryIO, schema: pa.Schema) -> Sink:
    if suffix == ".jsonl":
        return _JsonLines(file, schema)
    if suffix == ".parquet":
        return _Batches(pa.parquet.ParquetWriter(file, schema))
    return _Batches((pa.ipc.new_file if suffix == ".feather" else pa.ipc.new_stream)(file, schema))


PARTIAL_SUFFIX = ".partial"
OUTPUT_SUFFIXES = (".arrow", ".feather", ".parquet", ".jsonl")


def partial_path(output: Path) -> Path:
    """Where the rows of an unfinished run stand."""
    return output.with_name(output.name + PARTIAL_SUFFIX)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raises `ConfigError` when results cannot or should not be written there."""
    if output.suffix not in OUTPUT_SUFFIXES:
        raise ConfigError(f"output {output}: expected a name that ends in {', '.join(OUTPUT_SUFFIXES)}")
    if output.is_dir():
        raise ConfigError(f"output {output} is a folder")
    if not overwrite:
        if output.exists():
            raise ConfigError(f"{output} exists already: choose another -o, or --overwrite to replace it")
        if partial_path(output).exists():
            raise ConfigError(
                f"{partial_path(output)} holds the rows of an unfinished run: move it away, or --overwrite to drop it"
            )
    folder = output.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"output {output}: the folder {folder} is not writable")


class ResultWriter:
    """Collects rows and writes `output`.

    Rows may come in any order; a row's samples come together. Used as a context manager: leaving it without `finish`
    keeps the partial file with every row that was added.

    Args:
        output: the final file; its ending chooses the format.
        schema: of `io.schema.result_schema`.
    """

    def __init__(self, output: Path, schema: pa.Schema) -> None:
        self.output = output
        self.partial = partial_path(output)
        self._schema = schema
        self._num_kept = len(schema) - len(RESULT_FIELDS)
        self._pending: list[tuple[Any, ...]] = []
        self._pending_bytes = 0
        self._last_flush = time.monotonic()
        self._offsets: list[int] = []
        self._rows: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        output.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self.partial, "wb")  # noqa: SIM115
        self._file.write(schema.serialize())
        self._sync()

    @property
    def num_rows(self) -> int:
        """Rows written so far, those not yet flushed included."""
        return sum(map(len, self._rows)) + len(self._pending)

    def add(self, id_text: str | None, completion: Completion, kept: Sequence[Any] = ()) -> None:
        """Append one finished sample; `kept` are the values of the kept columns. Flushes when it is time."""
        failed = completion.finish_reason == "error"
        self._pending.append(
            (
                completion.request_id,
                id_text,
                completion.sample,
                None if failed else completion.text,
                None if failed else completion.token_ids,
                completion.finish_reason,
                completion.stop_reason,
                completion.prompt_tokens,
                completion.cached_tokens,
                len(completion.token_ids),
                completion.error,
                completion.error_type,
                *(kept or (None,) * self._num_kept),
            )
        )
        self._pending_bytes += 128 + len(completion.text) + 4 * len(completion.token_ids)
        if kept:
            self._pending_bytes += sum(len(value) if isinstance(value, str) else 64 for value in kept)
        if self._pending_bytes >= FLUSH_BYTES or time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make every added row durable."""
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [
                pa.nulls(len(self._pending), field.type)
                if field.name in NOT_YET
                else pa.array(next(columns), field.type)
                for field in self._schema
            ]
            batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            self._offsets.append(self._file.tell())
            self._file.write(batch.serialize())
            self._sync()
            self._rows.append(np.asarray(arrays[0]))
            self._pending = []
            self._pending_bytes = 0
        self._last_flush = time.monotonic()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Write `output` in input order and remove the partial file."""
        self.flush()
        self._close()
        temporary = self.output.with_name(self.output.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                sink = _sink(self.output.suffix, file, self._schema)
                for batch in self._ordered():
                    sink.write(batch)
                sink.close()
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.output)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self.output.parent)
        self.partial.unlink()

    def _ordered(self) -> Iterator[pa.RecordBatch]:
        """The rows by row number, stable, read back from the partial file a batch at a time."""
        if not self._rows:
            return
        rows = np.concatenate(self._rows)
        order = np.argsort(rows, kind="stable")
        starts = np.cumsum([0, *map(len, self._rows)])
        del rows
        with pa.memory_map(str(self.partial)) as source:
            per_row = max(1, source.size() // len(order))
            step = max(1, min(ORDERED_BATCH_ROWS, FLUSH_BYTES // per_row))
            for begin in range(0, len(order), step):
                yield self._gather(source, order[begin : begin + step], starts)

    def _gather(self, source: Any, positions: Any, starts: Any) -> pa.RecordBatch:
        """Rows by their position in the partial file, in the given order."""
        by_place = np.argsort(positions, kind="stable")
        sorted_positions = positions[by_place]
        batch_of = np.searchsorted(starts, sorted_positions, side="right") - 1
        parts = []
        for number in np.unique(batch_of):
            source.seek(self._offsets[number])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), self._schema)
            parts.append(batch.take(pa.array(sorted_positions[batch_of == number] - starts[number])))
        back = np.empty_like(by_place)
        back[by_place] = np.arange(len(by_place))
        return pa.concat_batches(parts).take(pa.array(back))

    def _close(self) -> None:
        self._file.write(END_OF_STREAM)
        self._sync()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            self.flush()
            self._close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_results(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a results file of any format, or of the partial file of a run that still goes on or was killed.

    A partial file is read up to its last whole batch; any other file that ends early is an error.

    Raises `ConfigError` when there is no such file or it holds no results.
    """
    try:
        for batch in _read_results(path):
            if not RESULT_COLUMNS.issubset(batch.schema.names):
                raise ConfigError(f"{path} holds no results: it has the columns {', '.join(batch.schema.names)}")
            yield batch
    except FileNotFoundError:
        hint = f"; {partial_path(path)} is there, unfinished" if partial_path(path).exists() else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, pa.ArrowException, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} holds no readable results: {str(error).splitlines()[0]}") from None


def _read_results(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
        with pa.parquet.ParquetFile(path) as parquet:
            yield from parquet.iter_batches()
        return
    if path.suffix == ".jsonl":
        with open(path, "rb") as lines:
            for line in lines:
                row = orjson.loads(line)
                fields = [field for field in RESULT_FIELDS if isinstance(row, dict) and field.name in row]
                yield pa.RecordBatch.from_pylist([row], schema=pa.schema(fields))
        return
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            return
        reader = pa.ipc.open_stream(source)
        while True:
            try:
                yield reader.read_next_batch()
            except StopIteration:
                return
            except (OSError, pa.ArrowInvalid):
                if path.suffix == PARTIAL_SUFFIX:
                    return
                raise
