"""Results on their way to disk: durable soon after they are added, presented complete and in input order.

Rows are appended as they finish to `OUT.partial`, the journal, an Arrow stream that any reader can follow and that
survives a kill up to its last whole batch. Input rows fall into segments. Once all rows of the first open one are done,
it is sealed: written in order to the target, after which the journal no longer needs its rows. So the disk holds every
row once, and twice only those of the open segments. `OUT` appears by a rename when all rows are sealed.

The order in which things become durable, and what a kill in between leaves:

1. batch → journal, fsync, ledger. Before the ledger: whole batches beyond it count, a torn one is cut off.
2. segment → target, fsync, ledger. Before the ledger: the target is brought back, the rows are still in the journal.
   After it: the journal's rows below `open_row` are known to be sealed and ignored.
3. A journal without the sealed rows is written beside the old one; the ledger describes both; a rename decides.
4. ledger says `finished`, the target is renamed, the working files go.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.io.arrays import flags, integers, numbers
from paged_infer.io.columns import Sample, completions_of, result_batch
from paged_infer.io.counts import ResultCounts
from paged_infer.io.formats import read_file
from paged_infer.io.ledger import Ledger, State
from paged_infer.io.readers import Position
from paged_infer.io.stream import ArrowStream, file_crc32, read_batch, stream_schema, sync_folder, whole_batches
from paged_infer.io.targets import PARTIAL_SUFFIX, PartsTarget, Target, make_target
from paged_infer.types import Completion

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
FLUSH_BYTES = 8 << 20
ORDERED_BATCH_ROWS = 4096
SEGMENT_ROWS = 1 << 16
OPEN_SEGMENTS = 2
"""Segments that may be open at once: rows are not taken from beyond them."""


def journal_path(target: Target) -> Path:
    """Where the rows stand that are not sealed yet."""
    return target.stem.with_name(target.stem.name + PARTIAL_SUFFIX)


def ledger_path(target: Target) -> Path:
    """Where the job's state stands."""
    return target.stem.with_name(target.stem.name + ".ledger")


def lock_path(target: Target) -> Path:
    """The file that a process writing these results holds."""
    return target.stem.with_name(target.stem.name + ".lock")


def discard(target: Target) -> None:
    """Forget an unfinished job."""
    ledger_path(target).unlink(missing_ok=True)
    journal_path(target).unlink(missing_ok=True)
    target.recover(None, pa.schema([]))


class ResultWriter:
    """Collects rows and makes results of them.

    Rows may come in any order, each once, with all its samples. Used as a context manager: leaving it without `finish`
    keeps everything that was added, and a writer made later from the saved ledger goes on from there.

    Args:
        schema: of `io.schema.result_schema`; a journal that is there already keeps the one it has.
        ledger: as saved, or a new one, whose `state.open_row` is the number of the first input row.

    Attributes:
        schema: of the results.
        answers: what the ledger remembers of answers to requests; whoever keeps it replaces it by a live one.
        counts: figures of everything there was when the writer was made.

    Raises:
        ConfigError: the files are not what the ledger says.
        OSError: the disk refuses. What was durable before stays so.
    """

    def __init__(self, target: Target, schema: pa.Schema, ledger: Ledger) -> None:
        self._target = target
        self._ledger = ledger
        self._segment_rows = SEGMENT_ROWS
        self._pending: list[Sample] = []
        self._pending_bytes = 0
        self._last_flush = time.monotonic()
        self._offsets: list[int] = []
        self._rows: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._positions: dict[int, Position] = {}
        self._path = journal_path(target)
        target.stem.parent.mkdir(parents=True, exist_ok=True)
        self._journal = self._open_journal(schema)
        self.schema = self._journal.schema
        state = self._ledger.state
        target.recover(state.sealed, self.schema)
        self._sealed_counts = ResultCounts() if state.counts is None else ResultCounts.from_json(state.counts)
        self.counts = ResultCounts()
        self.counts.add(self._sealed_counts)
        self.answers = self._ledger.answers
        self._base = state.open_row
        self._done = bytearray()
        self._num_done_in_segment = 0
        self._index_journal()

    def _open_journal(self, schema: pa.Schema) -> ArrowStream:
        """The journal as the ledger, or what was about to follow, describes it; a new one where there is none."""
        present = stream_schema(self._path)
        if present is not None:
            for state in (self._ledger.state, self._ledger.successor):
                if state is not None and file_crc32(self._path, state.journal_bytes) == state.journal_crc32:
                    self._ledger = replace(self._ledger, state=state, successor=None)
                    _, end = whole_batches(self._path, present)
                    return ArrowStream.reopen(self._path, present, end, file_crc32(self._path, end))
            logger.warning("%s is damaged: the rows in it are answered again", self._path)
        state = replace(self._ledger.state, journal_bytes=0, journal_crc32=0)
        self._ledger = replace(self._ledger, state=state, successor=None)
        self._ledger.save(ledger_path(self._target))
        journal = ArrowStream.create(self._path, schema)
        sync_folder(self._path.parent)
        return journal

    def _index_journal(self) -> None:
        offsets, _ = whole_batches(self._path, self.schema)
        if not offsets:
            return
        with pa.memory_map(str(self._path)) as source:
            for offset in offsets:
                batch = read_batch(source, offset, self.schema)
                rows = integers(batch["row"]).copy()
                self._offsets.append(offset)
                self._rows.append(rows)
                unsealed = batch.filter(flags(integers(batch["row"]) >= self._base))
                self.counts.count_batch(unsealed)
                for row in unsealed["row"].unique().to_pylist():
                    self._mark_done(row)

    def is_done(self, row: int) -> bool:
        """Whether the row is among the results."""
        place = row - self._base
        return place < 0 or (place < len(self._done) and bool(self._done[place]))

    def recall(self, row: int) -> list[Completion] | None:
        """The samples of an answered row, log-probabilities left out; None where it failed or is sealed already."""
        if row < self._base or not self.is_done(row):
            return None
        samples = [sample.completion for sample in self._pending if sample.completion.request_id == row]
        with pa.memory_map(str(self._path)) as source:
            for offset, rows in zip(self._offsets, self._rows, strict=True) if not samples else ():
                places = np.flatnonzero(rows == row)
                if len(places):
                    batch = read_batch(source, offset, self.schema).take(numbers(places, pa.int64()))
                    samples += completions_of(batch)
        return samples if samples[0].error is None else None

    def _mark_done(self, row: int) -> None:
        place = row - self._base
        if place >= len(self._done):
            self._done.extend(bytes(max(place + 1 - len(self._done), self._segment_rows)))
        assert not self._done[place], f"row {row} is answered twice"
        self._done[place] = 1
        self._num_done_in_segment += place < self._segment_rows

    @property
    def resume_position(self) -> Position | None:
        """Where the first input row begins that is not sealed; None = at the start."""
        position = self._ledger.state.position
        return None if position is None else Position.from_json(position)

    @property
    def horizon(self) -> int:
        """Rows from this number on must wait until earlier ones are sealed."""
        return self._base + OPEN_SEGMENTS * self._segment_rows

    def ends_segment(self, row: int) -> bool:
        """Whether this row is the last of its segment, so that `reached` must be called."""
        return (row + 1 - self._base) % self._segment_rows == 0

    def reached(self, row: int, position: Position) -> None:
        """Say where the input goes on behind a row that ends a segment."""
        if row >= self._base:
            self._positions[row] = position
            self._seal_complete()

    def add(self, samples: Sequence[Sample]) -> None:
        """Append all samples of one row. Flushes when it is time."""
        self._mark_done(samples[0].completion.request_id)
        self._pending += samples
        for sample in samples:
            self._pending_bytes += sample.num_bytes()
        if self._num_done_in_segment == self._segment_rows:
            self._seal_complete()
        elif self._pending_bytes >= FLUSH_BYTES:
            self.flush()

    def flush_if_due(self) -> None:
        """Flush when the last time is a flush interval ago; without new rows the ledger still shows that we live."""
        if time.monotonic() - self._last_flush < FLUSH_SECONDS:
            return
        if not self._pending:
            self._ledger.save(ledger_path(self._target))
        self.flush()

    def flush(self) -> None:
        """Make every added row durable."""
        if self._pending:
            self._append()
            self._journal.sync()
            self._save_state()
        self._last_flush = time.monotonic()

    def _append(self) -> None:
        batch = result_batch(self._pending, self.schema)
        self._offsets.append(self._journal.append(batch))
        self._rows.append(integers(batch["row"]))
        self._pending = []
        self._pending_bytes = 0

    def _save_state(self, finished: bool = False) -> None:
        state = replace(self._ledger.state, journal_bytes=self._journal.size, journal_crc32=self._journal.crc32)
        answers = {} if finished else dict(self.answers)
        self._ledger = replace(self._ledger, state=state, successor=None, answers=answers, finished=finished)
        self._ledger.save(ledger_path(self._target))

    def _seal_complete(self) -> None:
        while self._num_done_in_segment == self._segment_rows:
            position = self._positions.pop(self._base + self._segment_rows - 1, None)
            if position is None:
                return
            self._seal(self._segment_rows, position)
            self._shorten_journal()

    def _seal(self, num_rows: int, position: Position | None) -> None:
        """Move the next `num_rows` rows to the target; the ledger has them on return."""
        self.flush()
        end = self._base + num_rows
        counts = self._sealed_counts

        def counted() -> Iterator[pa.RecordBatch]:
            for batch in self._ordered(self._base, end):
                counts.count_batch(batch)
                yield batch

        sealed = self._target.seal(counted(), num_rows)
        state = replace(
            self._ledger.state,
            open_row=end,
            sealed=sealed,
            counts=counts.to_json(),
            position=None if position is None else position.to_json(),
        )
        self._ledger = replace(self._ledger, state=state)
        self._save_state()
        del self._done[:num_rows]
        self._base = end
        self._num_done_in_segment = self._done.count(1, 0, self._segment_rows)

    def _shorten_journal(self) -> None:
        """Write the journal anew when most of its rows are sealed."""
        num_rows = sum(map(len, self._rows))
        num_open = sum(int(np.count_nonzero(rows >= self._base)) for rows in self._rows)
        if 2 * num_open > num_rows:
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        shorter = ArrowStream.create(temporary, self.schema)
        offsets, rows = [], []
        for batch in self._ordered(self._base, None):
            offsets.append(shorter.append(batch))
            rows.append(integers(batch["row"]))
        shorter.sync()
        successor = replace(self._ledger.state, journal_bytes=shorter.size, journal_crc32=shorter.crc32)
        self._ledger = replace(self._ledger, successor=successor)
        self._ledger.save(ledger_path(self._target))
        os.replace(temporary, self._path)
        sync_folder(self._path.parent)
        self._ledger = replace(self._ledger, state=successor, successor=None)
        self._journal.close()
        self._journal, self._offsets, self._rows = shorter, offsets, rows

    def _ordered(self, begin: int, end: int | None) -> Iterator[pa.RecordBatch]:
        """The journal's rows [begin, end) by row number, stable, read back a batch at a time."""
        if not self._rows:
            return
        rows = np.concatenate(self._rows)
        chosen = np.flatnonzero((rows >= begin) if end is None else (rows >= begin) & (rows < end))
        order = chosen[np.argsort(rows[chosen], kind="stable")]
        starts = np.cumsum([0, *map(len, self._rows)])
        per_row = max(1, self._journal.size // len(rows))
        del rows, chosen
        step = max(1, min(ORDERED_BATCH_ROWS, FLUSH_BYTES // per_row))
        with pa.memory_map(str(self._path)) as source:
            for begin in range(0, len(order), step):
                yield self._gather(source, order[begin : begin + step], starts)

    def _gather(self, source: Any, positions: Any, starts: Any) -> pa.RecordBatch:
        """Rows by their position in the journal, in the given order."""
        by_place = np.argsort(positions, kind="stable")
        sorted_positions = positions[by_place]
        batch_of = np.searchsorted(starts, sorted_positions, side="right") - 1
        parts = []
        for number in np.unique(batch_of):
            batch = read_batch(source, self._offsets[number], self.schema)
            parts.append(batch.take(numbers(sorted_positions[batch_of == number] - starts[number], pa.int64())))
        back = np.empty_like(by_place)
        back[by_place] = np.arange(len(by_place))
        return pa.concat_batches(parts).take(numbers(back, pa.int64()))

    def finish(self) -> None:
        """Present the results, every row up to the highest being there, and remove the working files."""
        num_left = self._done.rfind(1) + 1
        assert self._done.count(1) == num_left, "rows are missing"
        if num_left:
            self._seal(num_left, None)
        self._save_state(finished=True)
        self._target.present()
        self._journal.close()
        self._path.unlink()
        if self._target.keeps_settings:
            ledger_path(self._target).unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, OSError):
                self.flush()
        finally:
            self._journal.close()
            self._target.close()


def reopen(
    target: Target, ledger: Ledger, schema: pa.Schema, batches: Iterable[pa.RecordBatch], first_row: int
) -> Ledger:
    """Make an unfinished job of these result rows, nothing of it sealed, and return its ledger.

    `ledger` describes the job whose journal this replaces, if there is one; its fingerprint and seed are taken over.
    """
    path = journal_path(target)
    temporary = path.with_name(path.name + ".tmp")
    journal = ArrowStream.create(temporary, schema)
    for batch in batches:
        if batch.num_rows:
            journal.append(batch if batch.schema.equals(schema) else batch.cast(schema))
    journal.sync()
    journal.close()
    fresh = State(first_row, journal_bytes=journal.size, journal_crc32=journal.crc32)
    if path.exists():
        replace(ledger, successor=fresh).save(ledger_path(target))
    os.replace(temporary, path)
    sync_folder(path.parent)
    reopened = replace(ledger, state=fresh, successor=None, answers={}, finished=False)
    reopened.save(ledger_path(target))
    target.clear()
    return reopened


def read_unfinished(target: Target, ledger: Ledger) -> Iterator[pa.RecordBatch]:
    """The rows of an unfinished job: those that are sealed, then those of the journal as they came."""
    states = [ledger.state, *([] if ledger.successor is None else [ledger.successor])]
    path = journal_path(target)
    schema = stream_schema(path)
    state = states[0]
    if schema is not None:
        state = next((s for s in states if file_crc32(path, s.journal_bytes) == s.journal_crc32), state)
    if state.sealed is not None:
        yield from target.read_sealed(state.sealed)
    if schema is None:
        return
    offsets, _ = whole_batches(path, schema)
    with pa.memory_map(str(path)) as source:
        for offset in offsets:
            batch = read_batch(source, offset, schema)
            yield batch.filter(flags(integers(batch["row"]) >= state.open_row))


def read_results(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a results file or folder, or of the `.partial` file of a job that still goes on or was killed.

    An unfinished job is read up to its last whole batch; any other file that ends early is an error.

    Raises `ConfigError` when there is no such file or it holds no results.
    """
    if path.suffix == PARTIAL_SUFFIX:
        yield from _read_partial(path)
        return
    if path.is_dir():
        target = PartsTarget(path, None)
        if target.is_complete():
            yield from target.read()
            return
        raise ConfigError(f"{path} holds no complete results: merge its shards, or name a file in it")
    if not path.exists():
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        hint = f"; {partial} is there, unfinished" if partial.exists() else ""
        raise ConfigError(f"{path}: no such file{hint}")
    yield from read_file(path)


def _read_partial(path: Path) -> Iterator[pa.RecordBatch]:
    if not path.exists():
        raise ConfigError(f"{path}: no such file")
    target = make_target(path.with_suffix("")) if path.stem != "results" else PartsTarget(path.parent, None)
    yield from read_unfinished(target, Ledger.load(ledger_path(target)) or Ledger({}, 0))
