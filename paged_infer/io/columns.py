"""From finished samples to record batches, a column at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

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
    arrays[1] = pa.array([sample.id_text for sample in samples], pa.large_string())
    for i, field in enumerate(schema):
        if i >= len(RESULT_FIELDS):
            place = i - len(RESULT_FIELDS)
            arrays.append(pa.array([sample.kept[place] if sample.kept else None for sample in samples], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_Column = Callable[[list[Completion], pa.DataType], pa.Array]


def _plain(name: str) -> _Column:
    return lambda completions, kind: pa.array([getattr(completion, name) for completion in completions], kind)


def _unless_failed(name: str) -> _Column:
    return lambda completions, kind: pa.array(
        [None if completion.finish_reason == "error" else getattr(completion, name) for completion in completions], kind
    )


def _output_tokens(completions: list[Completion], kind: pa.DataType) -> pa.Array:
    return pa.array([len(completion.token_ids) for completion in completions], kind)


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
        pa.array(np.cumsum([0, *counts]), pa.int32()),
        pa.StructArray.from_arrays([pa.array(top_ids), pa.array(top_logprobs)], fields=list(top_kind.value_type)),
        type=top_kind,
    )
    token_ids = pa.array(_joined([value.token_ids for value in present], np.int32))
    logprobs = pa.array(_joined([value.logprobs for value in present], np.float32))
    entries = pa.StructArray.from_arrays(
        [token_ids, logprobs, pa.array(ranks), top], fields=list(entry), mask=pa.array(~has_one)
    )
    missing = pa.array([value is None for value in values])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), entries, type=kind, mask=missing)


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
    return lambda completions, kind: logprobs_array([getattr(completion, name) for completion in completions], kind)


_COLUMNS: dict[str, _Column] = {
    "row": lambda completions, kind: pa.array([completion.request_id for completion in completions], kind),
    "sample": _plain("sample"),
    "text": _unless_failed("text"),
    "token_ids": _unless_failed("token_ids"),
    "finish_reason": _plain("finish_reason"),
    "stop_reason": _plain("stop_reason"),
    "prompt_tokens": _plain("prompt_tokens"),
    "cached_tokens": _plain("cached_tokens"),
    "output_tokens": _output_tokens,
    "cumulative_logprob": _plain("cumulative_logprob"),
    "score": _plain("score"),
    "valid": _plain("valid"),
    "adapter": _plain("adapter"),
    "logprobs": _logprobs("logprobs"),
    "prompt_logprobs": _logprobs("prompt_logprobs"),
    "error": _plain("error"),
    "error_type": _plain("error_type"),
}
