"""A JSON object a row: orjson's speed, and the standard library's verdict where orjson refuses or would round."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from paged_infer.types import RowError

_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_LONG_INTEGER = b"0" * 19
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def parse_json_line(line: bytes) -> dict[str, Any]:
    """One JSON object. Integers keep every digit, lone surrogates become U+FFFD, of repeated keys the last wins.

    Raises `RowError`.
    """
    try:
        value = _parse_exactly(line) if _LONG_INTEGER in line.translate(_DIGITS_ALIKE) else orjson.loads(line)
    except orjson.JSONDecodeError:
        value = _parse_exactly(line)
    if not isinstance(value, dict):
        hint = "; a JSON array is no JSONL: write one object a line" if isinstance(value, list) else ""
        raise RowError("invalid_json", f"expected a JSON object, found {_KINDS[type(value)]}{hint}")
    return value


def _parse_exactly(line: bytes) -> Any:
    try:
        return _well_formed(_DECODER.decode(decode(line).strip()))
    except json.JSONDecodeError as error:
        raise RowError("invalid_json", f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowError("invalid_json", "not usable JSON: nested too deeply") from None


def decode(line: bytes) -> str:
    """The text of a line. Raises `RowError`."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start} of the line") from None


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
