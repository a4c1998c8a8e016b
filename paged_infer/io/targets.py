"""Where finished segments go: into one file, or into a folder of parts. Both take a segment at a time, in input order.

What a target has is described by plain data, which the ledger keeps. After a kill a target is brought back to what the
ledger last said, so a segment counts only once the ledger has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import orjson
import pyarrow as pa

from paged_infer.config import ConfigError
from paged_infer.io.formats import OUTPUT_SUFFIXES, read_file, read_schema, sink_of, write_results
from paged_infer.io.ledger import replace_file
from paged_infer.io.schema import SETTINGS_KEY, read_settings
from paged_infer.io.stream import ArrowStream, file_crc32, read_batch, stream_schema, sync_folder, whole_batches

PARTIAL_SUFFIX = ".partial"
MANIFEST_SUFFIX = "manifest.json"


class Target(Protocol):
    """The final place of a job's results.

    Attributes:
        path: what the user asked for.
        stem: the path that the names of all working files begin with.
        keeps_settings: whether complete results say how they were made; where they cannot, the ledger stays with them.
    """

    path: Path
    stem: Path
    keeps_settings: bool

    def recover(self, sealed: Mapping[str, Any] | None, schema: pa.Schema) -> None:
        """Be exactly as described; None = empty. Raises `ConfigError` when the files are not what they were."""
        ...

    def seal(self, batches: Iterable[pa.RecordBatch], num_rows: int) -> dict[str, Any]:
        """Append a segment of `num_rows` input rows. It is durable on return, which is the new description."""
        ...

    def present(self) -> None:
        """Give the results their final name. A job that is killed in here calls it again."""
        ...

    def is_complete(self) -> bool:
        """Whether results stand under the final name."""
        ...

    def is_presented(self) -> bool:
        """Whether, of a job known to have finished, nothing is left to do but to remove its working files."""
        ...

    def is_lost(self) -> bool:
        """Whether, of a job known to have finished, somebody has removed the results since."""
        ...

    def clear(self) -> None:
        """Remove results that must not stand beside those of a new job; what is replaced in the end stays."""
        ...

    def read(self) -> Iterator[pa.RecordBatch]:
        """The complete results."""
        ...

    def settings(self) -> dict[str, Any]:
        """The settings that complete results say they were made with; empty where their format cannot."""
        ...

    def read_sealed(self, sealed: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """The results that a description covers."""
        ...

    def close(self) -> None: ...


def make_target(path: Path, shard: str | None = None) -> Target:
    """The target that a path stands for: a name without an ending is a folder. Raises `ConfigError`.

    Args:
        shard: `I-of-N`, part of the names in a folder that several jobs share.
    """
    if (path.is_dir() and path.suffix not in OUTPUT_SUFFIXES) or not path.suffix:
        return PartsTarget(path, shard)
    if path.suffix not in OUTPUT_SUFFIXES:
        raise ConfigError(
            f"output {path}: expected a name that ends in {', '.join(OUTPUT_SUFFIXES)}, or a folder: a name without "
            f"an ending"
        )
    return FileTarget(path)


def check_writable(target: Target) -> None:
    """Raise `ConfigError` when nothing can be written where the results are to go."""
    if target.stem.is_dir():
        raise ConfigError(f"output {target.path} is a folder")
    folder = target.stem.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"output {target.path}: {folder} is a file and no folder")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"output {target.path}: the folder {folder} is not writable")


class FileTarget:
    """One file. Segments are appended to `OUT.sealed`, an Arrow stream, which is renamed in the end; the other formats
    cannot be appended to and are written from it.

    Attributes:
        make_sink: what writes these formats; may be replaced before `present`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stem = path
        self.keeps_settings = path.suffix != ".jsonl"
        self.make_sink = sink_of(path.suffix)
        self._sealed = path.with_name(path.name + ".sealed")
        self._schema: pa.Schema
        self._stream: ArrowStream | None = None
        self._segment_begin = 0

    def recover(self, sealed: Mapping[str, Any] | None, schema: pa.Schema) -> None:
        self._schema = schema
        if sealed is None:
            self._sealed.unlink(missing_ok=True)
            return
        size, begin = sealed["bytes"], sealed["segment_begin"]
        try:
            intact = file_crc32(self._sealed, size, begin) == sealed["segment_crc32"]
        except FileNotFoundError:
            intact = False
        if not intact:
            raise ConfigError(f"{self._sealed} is damaged: restore it, or --overwrite to start again")
        self._stream = ArrowStream.reopen(self._sealed, schema, size, 0)

    def seal(self, batches: Iterable[pa.RecordBatch], num_rows: int) -> dict[str, Any]:
        stream = self._stream
        if stream is None:
            stream = self._stream = ArrowStream.create(self._sealed, self._schema)
            sync_folder(self.path.parent)
        begin, stream.crc32 = stream.size, 0
        for batch in batches:
            stream.append(batch)
        stream.sync()
        return {"bytes": stream.size, "segment_begin": begin, "segment_crc32": stream.crc32}

    def present(self) -> None:
        stream = self._stream or ArrowStream.create(self._sealed, self._schema)
        if self.path.suffix == ".arrow":
            stream.end()
            os.replace(self._sealed, self.path)
            sync_folder(self.path.parent)
            return
        stream.close()
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            write_results(self.make_sink, file, self._schema, _whole(self._sealed, stream.size))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        sync_folder(self.path.parent)
        self._sealed.unlink()

    def is_complete(self) -> bool:
        return self.path.exists()

    def is_presented(self) -> bool:
        return self.path.exists() and not self._sealed.exists()

    def is_lost(self) -> bool:
        return not self.path.exists() and not self._sealed.exists()

    def clear(self) -> None:
        pass

    def read(self) -> Iterator[pa.RecordBatch]:
        return read_file(self.path)

    def settings(self) -> dict[str, Any]:
        try:
            schema = read_schema(self.path)
        except (OSError, pa.ArrowException):
            return {}
        return {} if schema is None else read_settings(schema)

    def read_sealed(self, sealed: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        return _whole(self._sealed, sealed["bytes"])

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class PartsTarget:
    """A folder with a file for each segment and, when all are there, a manifest that lists them."""

    def __init__(self, folder: Path, shard: str | None) -> None:
        self.path = folder
        self._prefix = f"{shard}-" if shard else ""
        self._shard = shard
        self.stem = folder / f"{self._prefix}results"
        self.keeps_settings = True
        self._schema: pa.Schema
        self._parts: list[Mapping[str, Any]] = []

    @property
    def _manifest(self) -> Path:
        return self.path / f"{self._prefix}{MANIFEST_SUFFIX}"

    def recover(self, sealed: Mapping[str, Any] | None, schema: pa.Schema) -> None:
        self._schema = schema
        self._parts = list(sealed["parts"]) if sealed else []
        for part in self._parts:
            path = self.path / part["name"]
            if not path.is_file() or path.stat().st_size != part["bytes"]:
                raise ConfigError(f"{path} is not what was written: restore it, or --overwrite to start again")

    def seal(self, batches: Iterable[pa.RecordBatch], num_rows: int) -> dict[str, Any]:
        name = f"{self._prefix}part-{len(self._parts):05}.arrow"
        temporary = self.path / f"{name}.tmp"
        stream = ArrowStream.create(temporary, self._schema)
        for batch in batches:
            stream.append(batch)
        stream.end()
        os.replace(temporary, self.path / name)
        sync_folder(self.path)
        size = (self.path / name).stat().st_size
        self._parts.append({"name": name, "rows": num_rows, "bytes": size, "crc32": file_crc32(self.path / name, size)})
        return {"parts": [*self._parts]}

    def present(self) -> None:
        if not self._parts:
            self.seal([], 0)
        settings = (self._schema.metadata or {}).get(SETTINGS_KEY, b"{}")
        manifest = {"shard": self._shard, "parts": self._parts, "settings": orjson.loads(settings)}
        replace_file(self._manifest, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))

    def is_complete(self) -> bool:
        return self._manifest.exists()

    is_presented = is_complete

    def is_lost(self) -> bool:
        return False

    def clear(self) -> None:
        self._manifest.unlink(missing_ok=True)
        for path in self.path.glob(f"{self._prefix}part-*.arrow"):
            path.unlink()

    def read(self) -> Iterator[pa.RecordBatch]:
        for part in self.manifest()["parts"]:
            yield from read_file(self.path / part["name"])

    def settings(self) -> dict[str, Any]:
        return self.manifest().get("settings", {})

    def manifest(self) -> dict[str, Any]:
        """Contents of the manifest. Raises `ConfigError`."""
        return read_manifest(self._manifest)

    def read_sealed(self, sealed: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        for part in sealed["parts"]:
            yield from read_file(self.path / part["name"])

    def close(self) -> None:
        pass


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest of parts. Raises `ConfigError`."""
    try:
        manifest = orjson.loads(path.read_bytes())
        if not isinstance(manifest, dict) or not isinstance(manifest.get("parts"), list):
            raise ConfigError(f"{path} is no manifest of results")
        return manifest
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _whole(path: Path, size: int) -> Iterator[pa.RecordBatch]:
    """The batches in the first `size` bytes of a stream."""
    schema = stream_schema(path)
    if schema is None:
        return
    offsets, _ = whole_batches(path, schema)
    with pa.memory_map(str(path)) as source:
        for offset in offsets:
            if offset < size:
                yield read_batch(source, offset, schema)
