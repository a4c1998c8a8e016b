"""The one Arrow schema of a results file: the same columns with the same types in every batch, whatever the data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

SETTINGS_KEY = b"paged_infer"
"""Schema metadata key under which the settings of the run stand as JSON."""

JSON_FIELD = {b"format": b"json"}
"""Field metadata of a kept input column whose values are JSON text."""

_TOP = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
_LOGPROB = pa.struct(
    [
        ("token_id", pa.int32()),
        ("logprob", pa.float32()),
        ("rank", pa.int32()),
        ("top", pa.list_(pa.field("item", _TOP))),
    ]
)

RESULT_FIELDS: tuple[pa.Field, ...] = (
    pa.field("row", pa.int64(), nullable=False),
    pa.field("id", pa.large_string()),
    pa.field("sample", pa.int32(), nullable=False),
    pa.field("text", pa.large_string()),
    pa.field("token_ids", pa.large_list(pa.int32())),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("stop_reason", pa.large_string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("cached_tokens", pa.int32()),
    pa.field("output_tokens", pa.int32()),
    pa.field("cumulative_logprob", pa.float64()),
    pa.field("score", pa.float64()),
    pa.field("valid", pa.bool_()),
    pa.field("adapter", pa.string()),
    pa.field("logprobs", pa.large_list(_LOGPROB)),
    pa.field("prompt_logprobs", pa.large_list(_LOGPROB)),
    pa.field("error", pa.large_string()),
    pa.field("error_type", pa.string()),
)

RESULT_COLUMNS = frozenset(field.name for field in RESULT_FIELDS)


def result_schema(kept: Iterable[pa.Field] = (), settings: Mapping[str, Any] | None = None) -> pa.Schema:
    """The result columns, then the kept input columns; `settings` goes into the schema's metadata.

    A kept column named like a result column is stored as `input_<name>`. Dictionary-encoded columns are stored plain,
    so that every batch can be read by itself.
    """
    extra = [
        pa.field(
            f"input_{field.name}" if field.name in RESULT_COLUMNS else field.name,
            plain_type(field.type),
            metadata=field.metadata,
        )
        for field in kept
    ]
    metadata = None
    if settings is not None:
        metadata = {SETTINGS_KEY: json.dumps(settings, sort_keys=True, ensure_ascii=False).encode()}
    return pa.schema([*RESULT_FIELDS, *extra], metadata=metadata)


def read_settings(schema: pa.Schema) -> dict[str, Any]:
    """The settings that `result_schema` stored; empty where there are none."""
    stored = (schema.metadata or {}).get(SETTINGS_KEY)
    return json.loads(stored) if stored else {}


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type with dictionary encoding taken away at every depth of lists and structs."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, plain_type(f.type), f.nullable, f.metadata) for f in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind
