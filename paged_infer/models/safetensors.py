"""Reads the weights of a Hugging Face folder: one safetensors file, or shards listed by an index."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paged_infer.models.weights import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def shard_paths(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises `CheckpointError` naming those that are not there."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt")))
            hint = f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors" if pickled else ""
            raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX} is there{hint}")
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {INDEX} lists shards that are not there: {', '.join(missing)}")
    return [folder / name for name in names]


class Checkpoint:
    """The tensors of a folder by name, in the order of its files.

    Raises `CheckpointError` for files that are missing or damaged and for a tensor that comes twice.
    """

    def __init__(self, folder: Path) -> None:
        self._paths: dict[str, Path] = {}
        for path in shard_paths(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if name in self._paths:
                        raise CheckpointError(f"{path}: tensor {name} is in {self._paths[name].name} already")
                    self._paths[name] = path

    @property
    def names(self) -> Iterable[str]:
        return self._paths.keys()

    def tensor(self, name: str) -> Tensor:
        """As stored, a view of its file: copy what is to be kept.

        The file is mapped anew for each tensor, so that pages of tensors already used do not stay resident.
        """
        with _opened(self._paths[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        _read_ahead(tensor)
        return tensor


def _read_ahead(tensor: Tensor) -> None:
    """Have the system read all of a mapped tensor at the disk's own pace, not a page fault at a time."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(AttributeError, OSError):  # another C library
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start), mmap.MADV_WILLNEED)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error
