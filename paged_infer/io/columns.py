"""From finished samples to record batches, a column at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from paged_infer.io.arrays import flags, lists, numbers, texts
from paged_infer.io.schema import RESULT_FIELDS
from paged_infer.types import Completion, Logprobs


class Sample(NamedTuple):
    """One result row in the making; `kept` are the values of the kept input columns, () = all null."""

    id_text: str | None
    completion: Completion
    kept: Sequence[Any]

    def num_bytes(self) -> int:
        """About how much it takes in memory and on disk."""
        completion = self.completion
        size = 128 + len(completion.text) + 4 * len(completion.token_ids)
        for logprobs in (completion.logprobs, completion.prompt_logprobs):
            if logprobs is not None and len(logprobs.token_ids):
                size += len(logprobs.token_ids) * (16 + 8 * len(logprobs.top_token_ids[-1]))
        for value in self.kept:
            size += len(value) if isinstance(value, str | bytes) else 64
        return size


def result_batch(samples: Sequence[Sample], schema: pa.Schema) -> pa.RecordBatch:
    """The samples in the given order; `schema` is of `io.schema.result_schema`."""
    completions = [sample.completion for sample in samples]
    arrays = [
        _COLUMNS[field.name](completions, field.type) if field.name in _COLUMNS else None for field in RESULT_FIELDS
    ]
    arrays[1] = texts([sample.id_text for sample in samples], pa.large_string())
    for place, field in enumerate(list(schema)[len(RESULT_FIELDS) :]):
        values = [sample.kept[place] if sample.kept else None for sample in samples]
        arrays.append(_any_array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def completions_of(batch: pa.RecordBatch) -> list[Completion]:
    """The samples that a batch was made of, without their log-probabilities."""
    columns = [name for name in _COLUMNS if name not in ("row", "output_tokens", "logprobs", "prompt_logprobs")]
    rows = batch["row"].to_pylist()
    values = batch.select(columns).to_pylist()
    return [Completion(request_id=row, **each) for row, each in zip(rows, values, strict=True)]


def _any_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return texts(values, kind)
    return pa.array(values, kind)


_Column = Callable[[list[Completion], pa.DataType], pa.Array]


def _plain(name: str, array: Callable[[list[Any], pa.DataType], pa.Array]) -> _Column:
    value = attrgetter(name)
    return lambda completions, kind: array([*map(value, completions)], kind)


def _unless_failed(name: str, array: Callable[[list[Any], pa.DataType], pa.Array]) -> _Column:
    value = attrgetter(name)
    return lambda completions, kind: array(
        [None if completion.finish_reason == "error" else value(completion) for completion in completions], kind
    )


def logprobs_array(values: Sequence[Logprobs | None], kind: pa.DataType) -> pa.Array:
    """`large_list<struct>` of the schema's logprob columns; a position that has no logprob is null."""
    present = [value for value in values if value is not None]
    if not present:
        return pa.nulls(len(values), kind)
    offsets = np.cumsum([0, *(0 if value is None else len(value.token_ids) for value in values)])
    ranks = _joined([value.ranks for value in present], np.int32)
    has_one = ranks > 0
    entry = kind.value_type
    counts, top_ids, top_logprobs = _tops(present, has_one)
    top_kind = entry.field("top").type
    top = pa.ListArray.from_arrays(
        numbers(np.cumsum([0, *counts]), pa.int32()),
        pa.StructArray.from_arrays(
            [numbers(top_ids, pa.int32()), numbers(top_logprobs, pa.float32())], fields=list(top_kind.value_type)
        ),
        type=top_kind,
    )
    token_ids = numbers(_joined([value.token_ids for value in present], np.int32), pa.int32())
    logprobs = numbers(_joined([value.logprobs for value in present], np.float32), pa.float32())
    entries = pa.StructArray.from_arrays(
        [token_ids, logprobs, numbers(ranks, pa.int32()), top], fields=list(entry), mask=flags(~has_one)
    )
    missing = flags([value is None for value in values])
    return pa.LargeListArray.from_arrays(numbers(offsets, pa.int64()), entries, type=kind, mask=missing)


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _tops(present: Sequence[Logprobs], has_one: Any) -> tuple[Any, Any, Any]:
    """How many alternatives each position has, their ids and their logprobs, end to end."""
    counts, ids, logprobs = [], [], []
    begin = 0
    for value in present:
        end = begin + len(value.token_ids)
        mine = has_one[begin:end]
        begin = end
        if isinstance(value.top_token_ids, np.ndarray):
            counts.append(np.where(mine, value.top_token_ids.shape[1], 0))
            ids.append(value.top_token_ids[mine].reshape(-1))
            logprobs.append(np.asarray(value.top_logprobs)[mine].reshape(-1))
        else:
            counts.append([len(best) if one else 0 for best, one in zip(value.top_token_ids, mine, strict=True)])
            ids.append([*itertools.chain.from_iterable(itertools.compress(value.top_token_ids, mine))])
            logprobs.append([*itertools.chain.from_iterable(itertools.compress(value.top_logprobs, mine))])
    return _joined(counts, np.int64), _joined(ids, np.int32), _joined(logprobs, np.float32)


def _logprobs(name: str) -> _Column:
    value = attrgetter(name)
    return lambda completions, kind: logprobs_array([*map(value, completions)], kind)


_COLUMNS: dict[str, _Column] = {
    "row": _plain("request_id", numbers),
    "sample": _plain("sample", numbers),
    "text": _unless_failed("text", texts),
    "token_ids": _unless_failed("token_ids", lists),
    "finish_reason": _plain("finish_reason", texts),
    "stop_reason": _plain("stop_reason", texts),
    "prompt_tokens": _plain("prompt_tokens", numbers),
    "cached_tokens": _plain("cached_tokens", numbers),
    "output_tokens": lambda completions, kind: numbers([len(each.token_ids) for each in completions], kind),
    "cumulative_logprob": _plain("cumulative_logprob", numbers),
    "score": _plain("score", numbers),
    "valid": lambda completions, _: flags([completion.valid for completion in completions]),
    "adapter": _plain("adapter", texts),
    "logprobs": _logprobs("logprobs"),
    "prompt_logprobs": _logprobs("prompt_logprobs"),
    "error": _plain("error", texts),
    "error_type": _plain("error_type", texts),
}
