"""Tokenizer files that had to be converted, kept so that the conversion happens once a machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from paged_infer.config import ConfigError

_FORMAT = 1
"""Part of every key: raise it when a converter's output changes, so that older folders are no longer found."""


def converted_folder(sources: Sequence[Path], cache_dir: Path, write: Callable[[Path], None]) -> Path:
    """The folder that `write` fills from `sources`, made on the first call and found again on later ones.

    The key covers each source's path, size and modification time. The folder appears whole, by rename, so processes
    that convert at the same time do no harm. Raises `ConfigError` when the cache cannot be written.
    """
    key = hashlib.sha256(str(_FORMAT).encode())
    for source in sources:
        stat = source.stat()
        key.update(f"\0{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    parent = cache_dir / "tokenizers"
    target = parent / f"{sources[0].stem}-{key.hexdigest()[:16]}"
    if (target / "tokenizer.json").is_file():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
        try:
            write(draft)
            if not (target / "tokenizer.json").is_file():
                os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        if (target / "tokenizer.json").is_file():
            return target
        raise ConfigError(f"cannot keep a converted tokenizer in {parent}: {error}; set PAGED_INFER_CACHE") from error
    return target
