"""What readers hand out: rows, and the places in the inputs between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.types import RowError


class InputDamaged(Exception):
    """The bytes of an input are not what they should be from here on; the message says how."""


@dataclass(slots=True)
class Row:
    """One input row.

    Attributes:
        index: 0-based position over all inputs, blank lines not counted.
        source, line: the file and the 1-based line (text formats) or row (Parquet, Arrow, hub) in it.
        is_table: whether it comes from a table, where a column named like an option is data.
        data: column → value; empty when `error` is set.
        kept: values of the kept columns, in the order they were asked for; JSON text where the format has no types.
        error: why the row could not be read.
        unit: what `line` counts.
    """

    index: int
    source: str
    line: int
    is_table: bool
    data: dict[str, Any]
    kept: tuple[Any, ...] = ()
    error: RowError | None = None
    unit: str = "line"

    @property
    def where(self) -> str:
        return f"{self.source} {self.unit} {self.line}"


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two rows.

    Attributes:
        index: index of the next row.
        source: ordinal of the file.
        line: lines (text) or rows (tables) of that file before this place.
        offset: decompressed bytes (text) or rows (tables) of that file before this place.
    """

    index: int = 0
    source: int = 0
    line: int = 0
    offset: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        """Raises `ValueError` for anything `to_json` did not make."""
        counts = [value.get(name) for name in cls.__dataclass_fields__]
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError(f"{dict(value)!r} is no position in an input")
        return cls(*(int(count) for count in counts if count is not None))


Record = tuple[int, int, int, dict[str, Any] | RowError]
"""(1-based line or row where it begins, `Position.line` and `.offset` right behind it, columns or error)."""


class Source(Protocol):
    """One input file."""

    is_table: bool
    unit: str
    appendable: bool
    """Whether more at the end of the file leaves the rows before it as they are."""
    columns: list[str] | None
    """The columns that every row has; None where rows differ."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    def fields(self, names: Sequence[str]) -> list[pa.Field]:
        """How the named columns are kept. Raises `ConfigError` for a column the file cannot have."""
        ...

    def rows(self, line: int, offset: int, columns: Collection[str] | None) -> Iterator[Record]:
        """The rows from a place on; formats that can read single columns read these only (None = all)."""
        ...

    def kept(self, data: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
        """The values of the named columns as `fields` types them."""
        ...

    def num_rows(self) -> int | None:
        """How many rows there are, where the file says so."""
        ...

    def count(self) -> int:
        """How many rows there are, read through if need be."""
        ...

    def locate(self, rows: int) -> tuple[int, int]:
        """`Position.line` and `.offset` behind that many rows."""
        ...

    def fraction_read(self) -> float | None:
        """How far reading has come, 0 to 1, where that is known."""
        ...

    def identity(self) -> dict[str, Any]:
        """`name`, `size`, `head` and `tail`, by which the same content is known again (see `InputFile.identity`)."""
        ...


def no_column(name: str, path: str, columns: Sequence[str]) -> ConfigError:
    return ConfigError(f"{path} has no column {name!r}; its columns are {', '.join(columns)}")


def first_line(error: BaseException) -> str:
    """The part of an error's message that fits into ours."""
    return (str(error).splitlines() or [type(error).__name__])[0]
