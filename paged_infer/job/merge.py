"""Joining the shards of a job into one file, after making sure that nothing is missing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.io.arrays import integers
from paged_infer.io.counts import ResultCounts
from paged_infer.io.formats import OUTPUT_SUFFIXES, read_file, read_schema, sink_of, write_results
from paged_infer.io.schema import SETTINGS_KEY, read_settings
from paged_infer.io.stream import file_crc32, sync_folder
from paged_infer.io.targets import MANIFEST_SUFFIX, PARTIAL_SUFFIX, read_manifest

_SHARD_NAME = re.compile(r"(?P<stem>.*)\.(?P<i>[0-9]+)-of-(?P<n>[0-9]+)(?P<suffix>\.[a-z]+)")
_MANIFEST_NAME = re.compile(rf"(?:(?P<i>[0-9]+)-of-(?P<n>[0-9]+)-)?{re.escape(MANIFEST_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Share:
    """The results of one shard: its number, of how many, and the files that hold them in order."""

    number: int
    count: int
    files: tuple[Path, ...]
    checksums: tuple[int, ...] = ()


def merge(paths: list[Path], output: Path) -> ResultCounts:
    """Join complete results into `output`.

    Args:
        paths: a folder of parts, the files of all shards, or the name they were to have without `I-of-N`.
        output: `.arrow`, `.feather`, `.parquet` or `.jsonl`.

    Returns:
        The figures of the joined results.

    Raises:
        ConfigError: a shard is missing, unfinished, damaged or of another job, or rows are missing between them.
    """
    if output.suffix not in OUTPUT_SUFFIXES:
        raise ConfigError(f"output {output}: expected a name that ends in {', '.join(OUTPUT_SUFFIXES)}")
    if output.exists():
        raise ConfigError(f"{output} exists already: choose another -o")
    shares = _shares(paths)
    schema = _common_schema(shares)
    counts = ResultCounts()
    temporary = output.with_name(output.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write_results(sink_of(output.suffix), file, schema, _joined(shares, schema, counts))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(output.parent)
    return counts


def _shares(paths: list[Path]) -> list[Share]:
    """All shards in order, none missing."""
    if len(paths) == 1 and paths[0].is_dir():
        found = _shares_of_folder(paths[0])
    else:
        found = [_share_of_file(path) for path in _shard_files(paths)]
    counts = {share.count for share in found}
    if len(counts) != 1:
        raise ConfigError(f"shards of different jobs: of {', '.join(map(str, sorted(counts)))}")
    [count] = counts
    by_number = {share.number: share for share in found}
    missing = [str(number) for number in range(1, count + 1) if number not in by_number]
    if missing or len(by_number) != len(found):
        raise ConfigError(f"{len(found)} of {count} shards given, missing: {', '.join(missing) or 'none'}")
    return [by_number[number] for number in range(1, count + 1)]


def _shares_of_folder(folder: Path) -> list[Share]:
    found = []
    for path in sorted(folder.glob(f"*{MANIFEST_SUFFIX}")):
        match = _MANIFEST_NAME.fullmatch(path.name)
        if match is not None:
            parts = read_manifest(path)["parts"]
            files = tuple(folder / part["name"] for part in parts)
            checksums = tuple(part["crc32"] for part in parts)
            found.append(Share(int(match["i"] or 1), int(match["n"] or 1), files, checksums))
    if not found:
        raise ConfigError(f"{folder} has no {MANIFEST_SUFFIX}: its job is not finished, or it holds no results")
    return found


def _shard_files(paths: list[Path]) -> list[Path]:
    if len(paths) > 1 or _SHARD_NAME.fullmatch(paths[0].name):
        return paths
    stem = paths[0]
    found = sorted(stem.parent.glob(f"{stem.stem}.*-of-*{stem.suffix}"))
    if not found:
        raise ConfigError(f"there are no shards named like {stem.stem}.1-of-8{stem.suffix} in {stem.parent}")
    return found


def _share_of_file(path: Path) -> Share:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        raise ConfigError(f"{path}: expected the name of a shard, such as results.3-of-8.arrow")
    if path.with_name(path.name + PARTIAL_SUFFIX).exists() or not path.exists():
        raise ConfigError(f"{path} is not finished: run its shard again first")
    return Share(int(match["i"]), int(match["n"]), (path,))


def _common_schema(shares: list[Share]) -> pa.Schema:
    """The schema all shards have; their settings may differ in nothing but the shard. None is in the result's."""
    first: tuple[pa.Schema, dict[str, Any]] | None = None
    for path in (path for share in shares for path in share.files):
        try:
            schema = read_schema(path) or next(read_file(path)).schema
        except StopIteration:
            continue
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        settings = read_settings(schema)
        settings.get("fingerprint", {}).get("settings", {}).pop("shard", None)
        if first is None:
            first = schema, settings
        same = all(settings.get(name) == first[1].get(name) for name in ("fingerprint", "sampling", "model"))
        if not same or not schema.equals(first[0]):
            raise ConfigError(f"{path} was made with other settings or columns than {shares[0].files[0]}")
    if first is None:
        raise ConfigError("there are no rows to join")
    schema, settings = first
    metadata = {SETTINGS_KEY: orjson.dumps(settings)} if settings else None
    return schema.with_metadata(metadata)


def _joined(shares: list[Share], schema: pa.Schema, counts: ResultCounts) -> Iterator[pa.RecordBatch]:
    next_row = 0
    for share in shares:
        for i, path in enumerate(share.files):
            if share.checksums and file_crc32(path, path.stat().st_size) != share.checksums[i]:
                raise ConfigError(f"{path} is damaged: run its shard again with --overwrite")
            for batch in read_file(path):
                if not batch.num_rows:
                    continue
                rows = integers(batch["row"])
                if rows[0] not in (next_row, next_row - 1):
                    raise ConfigError(f"{path}: row {next_row} is missing, {rows[0]} is there instead")
                gaps = np.flatnonzero(np.diff(rows) > 1)
                if len(gaps):
                    raise ConfigError(f"{path}: row {rows[gaps[0]] + 1} is missing")
                next_row = int(rows[-1]) + 1
                counts.count_batch(batch)
                yield batch.cast(schema)
