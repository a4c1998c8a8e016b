"""From what a user names to files: globs, folders, saved datasets."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from pathlib import Path

from paged_infer.config import ConfigError
from paged_infer.io.readers.files import STDIN, filesystem, is_url, suffixes
from paged_infer.io.readers.hub import PREFIX

TEXT_SUFFIXES = frozenset({".jsonl", ".ndjson", ".txt", ".csv"})
TABLE_SUFFIXES = frozenset({".parquet", ".arrow", ".feather"})

_SAME_KIND = {".ndjson": ".jsonl", ".feather": ".arrow"}


def is_data_file(path: str) -> bool:
    """Whether the name's ending is one that can be read."""
    kind, compression = suffixes(path)
    return kind in TEXT_SUFFIXES or (kind in TABLE_SUFFIXES and not compression)


def is_hub_dataset(path: str) -> bool:
    return path.startswith(PREFIX) and not is_data_file(path)


def is_pattern(path: str) -> bool:
    """Whether the name stands for several files."""
    web = path.startswith(("http://", "https://"))
    return path != STDIN and not web and not is_hub_dataset(path) and glob.has_magic(path) and not Path(path).exists()


def expand(paths: Iterable[str]) -> list[str]:
    """The files that are meant, in order; those of a folder or pattern in the order of their names.

    Raises `ConfigError` for a pattern nothing fits, and for a folder that has no data files or several kinds of them.
    """
    files: list[str] = []
    for path in paths:
        if path == STDIN or is_hub_dataset(path):
            files.append(path)
        elif is_url(path):
            files += _expand_url(path)
        elif is_pattern(path):
            files += _matches(path, sorted(glob.glob(path, recursive=True)))
        elif Path(path).is_dir():
            files += _folder(Path(path))
        else:
            files.append(path)
    if files.count(STDIN) > 1:
        raise ConfigError("standard input (-) can be read only once")
    return files


def _matches(pattern: str, found: list[str]) -> list[str]:
    files = [path for path in found if is_data_file(path)]
    if not files:
        raise ConfigError(f"{pattern}: nothing that can be read fits this pattern")
    return files


def _expand_url(url: str) -> list[str]:
    if is_pattern(url):
        system, key = filesystem(url)
        return _matches(url, sorted(system.unstrip_protocol(path) for path in system.glob(key)))
    if is_data_file(url):
        return [url]
    system, key = filesystem(url)
    if not system.isdir(key):
        return [url]
    return _one_kind(
        url, sorted(system.unstrip_protocol(path) for path in system.find(key)), system.unstrip_protocol(key)
    )


def _folder(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").is_file():
        splits = _names(folder / "dataset_dict.json", "splits")
        raise ConfigError(
            f"{folder} holds the splits {', '.join(splits)}; name one: {folder / (splits or ['train'])[0]}"
        )
    if (folder / "state.json").is_file():
        return [str(folder / name) for name in _names(folder / "state.json", "_data_files")]
    return _one_kind(str(folder), sorted(str(path) for path in folder.rglob("*") if path.is_file()), str(folder))


def _names(file: Path, key: str) -> list[str]:
    """A list of names out of the files that `datasets.save_to_disk` writes."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))[key]
        return [entry["filename"] if isinstance(entry, dict) else str(entry) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not what a saved dataset has there: {error}") from None


def _one_kind(folder: str, found: list[str], root: str) -> list[str]:
    """The data files among those of a folder, hidden and bookkeeping ones (`.x`, `_x`) left out."""
    files: dict[str, list[str]] = {}
    for path in found:
        parts = path.removeprefix(root).strip("/").split("/")
        if is_data_file(path) and not any(part.startswith((".", "_")) for part in parts):
            kind = suffixes(path)[0]
            files.setdefault(_SAME_KIND.get(kind, kind), []).append(path)
    if not files:
        raise ConfigError(
            f"{folder} is a folder without data files: expected {', '.join(sorted(TEXT_SUFFIXES | TABLE_SUFFIXES))}"
        )
    if len(files) > 1:
        raise ConfigError(
            f"{folder} is a folder with several kinds of files ({', '.join(sorted(files))}); "
            f"name those you mean, for example '{folder.rstrip('/')}/*{min(files)}'"
        )
    return next(iter(files.values()))
