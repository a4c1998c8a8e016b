"""Inputs to rows, streaming: a bad line becomes a row with an error and its neighbours do not notice.

Memory is bounded by the longest line and one record batch, never by the file.
"""

from paged_infer.io.readers.expand import is_pattern
from paged_infer.io.readers.files import STDIN, is_url
from paged_infer.io.readers.inputs import Inputs, open_source
from paged_infer.io.readers.json_rows import json_text, parse_json_line
from paged_infer.io.readers.rows import InputDamaged, Position, Row, Source

__all__ = [
    "STDIN",
    "InputDamaged",
    "Inputs",
    "Position",
    "Row",
    "Source",
    "is_pattern",
    "is_url",
    "json_text",
    "open_source",
    "parse_json_line",
]
