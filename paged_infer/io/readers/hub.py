"""Datasets of the Hugging Face Hub, streamed through the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.io.readers.rows import first_line
from paged_infer.io.readers.tables import TABLE_BATCH_ROWS, Table, Unreadable
from paged_infer.types import InputFailed

PREFIX = "hf://datasets/"
_NAME = re.compile(r"(?P<path>[^:]+?)(:(?P<split>[\w.-]+))?")


def open_hub_dataset(url: str) -> Table:
    """`hf://datasets/ORG/NAME[/CONFIGURATION][:SPLIT]`. Raises `ConfigError` when there is no such dataset or split."""
    found = _NAME.fullmatch(url.removeprefix(PREFIX))
    if found is None:
        raise ConfigError(f"{url}: expected {PREFIX}ORG/NAME, {PREFIX}ORG/NAME:SPLIT or a file of a dataset")
    return Table(url, _Streamed(url, found["path"], found["split"]))


class _Streamed:
    def __init__(self, url: str, path: str, split: str | None) -> None:
        try:
            from datasets import IterableDataset, load_dataset
        except ImportError as error:
            raise ConfigError(f"{url}: {error}: pip install 'paged-infer[hub]' brings the datasets library") from None
        self._url = url
        name, configuration = path, None
        if not path.startswith("/") and path.count("/") == 2:
            name, configuration = path.rsplit("/", 1)
        try:
            loaded = load_dataset(name, configuration, split=split, streaming=True)
        except Exception as error:  # network, authorisation, unknown names: the library has no common base
            raise ConfigError(f"{url} cannot be loaded: {first_line(error)}") from None
        if not isinstance(loaded, IterableDataset):
            if len(loaded) > 1:
                raise ConfigError(f"{url} has the splits {', '.join(loaded)}; name one: {url}:{next(iter(loaded))}")
            loaded = next(iter(loaded.values()))
        self._dataset: Any = loaded if loaded.features is not None else loaded._resolve_features()
        self.schema: pa.Schema = self._dataset.features.arrow_schema
        self._read = 0

    def read(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch | Unreadable]:
        dataset = self._dataset.skip(start) if start else self._dataset
        self._read = start
        batches = dataset.with_format("arrow").iter(TABLE_BATCH_ROWS)
        while True:
            try:
                table = next(batches, None)
            except Exception as error:  # as above
                raise InputFailed(f"reading {self._url} failed: {first_line(error)}") from error
            if table is None:
                return
            for batch in table.cast(self.schema).to_batches():
                yield batch
                self._read += batch.num_rows

    def num_rows(self) -> int | None:
        splits = self._dataset.info.splits or {}
        known = splits.get(str(self._dataset.split)) if self._dataset.split is not None else None
        return known.num_examples or None if known is not None else None

    def count(self) -> int:
        known = self.num_rows()
        return sum(batch.num_rows for batch in self.read(0, [])) if known is None else known

    def fraction_read(self) -> float | None:
        known = self.num_rows()
        return self._read / known if known else None

    def identity(self) -> dict[str, Any]:
        return {"name": self._url, "size": None, "head": None, "tail": None}
