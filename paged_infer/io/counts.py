"""What a set of results amounts to, counted from whole columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from paged_infer.io.arrays import flags, integers, texts
from paged_infer.types import Completion

_ERROR = texts(["error"], pa.string())


@dataclass(slots=True)
class ResultCounts:
    """Figures of result rows.

    Attributes:
        rows: input rows answered, error rows included.
        samples: result rows; more than `rows` where a row asked for several samples.
        errors: result rows that are errors, by type.
        finish_reasons: result rows by finish reason.
        prompt_tokens, cached_tokens: of rows without an error, each row once; the cached ones are part of the prompt.
        output_tokens: of all samples.
    """

    rows: int = 0
    samples: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def count(self, completion: Completion) -> None:
        """Add one finished sample."""
        self.samples += 1
        self.rows += completion.sample == 0
        self.finish_reasons[completion.finish_reason] += 1
        if completion.finish_reason == "error":
            self.errors[completion.error_type or "error"] += 1
            return
        if completion.sample == 0:
            self.prompt_tokens += completion.prompt_tokens
            self.cached_tokens += completion.cached_tokens
        self.output_tokens += len(completion.token_ids)

    def count_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch of results."""
        first = flags(integers(batch["sample"]) == 0)
        failed = is_failed(batch)
        answered = pc.invert(failed)
        self.samples += batch.num_rows
        self.rows += _total(first)
        self.finish_reasons.update({str(reason): n for reason, n in _tally(batch["finish_reason"]).items()})
        self.errors.update({kind or "error": n for kind, n in _tally(batch["error_type"].filter(failed)).items()})
        once = pc.and_(first, answered)
        self.prompt_tokens += _total(batch["prompt_tokens"].filter(once))
        self.cached_tokens += _total(batch["cached_tokens"].filter(once))
        self.output_tokens += _total(batch["output_tokens"].filter(answered))

    def add(self, other: ResultCounts) -> None:
        """Add the figures of other rows."""
        self.rows += other.rows
        self.samples += other.samples
        self.errors.update(other.errors)
        self.finish_reasons.update(other.finish_reasons)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        values = {name: getattr(self, name) for name in ResultCounts.__dataclass_fields__}
        return {**values, "errors": dict(self.errors), "finish_reasons": dict(self.finish_reasons)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ResultCounts:
        """The inverse of `to_json`."""
        counters = {name: Counter(data[name]) for name in ("errors", "finish_reasons")}
        return cls(**{**data, **counters})

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens whose computation the prefix cache saved."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def is_failed(batch: pa.RecordBatch) -> pa.Array:
    """For each result row whether it is an error row."""
    return pc.is_in(batch["finish_reason"], value_set=_ERROR)


def _total(column: pa.Array) -> int:
    return pc.sum(column).as_py() or 0


def _tally(column: pa.Array) -> dict[str | None, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}
