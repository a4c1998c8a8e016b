"""An Arrow IPC stream that is only appended to, and that a kill cannot spoil beyond its last whole batch."""

from __future__ import annotations

import os
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_CRC_BYTES = 1 << 24


class ArrowStream:
    """The stream at `path`: a schema message, then record batches without dictionaries or compression.

    What was appended is safe after `sync`. Any reader may follow the file; it is never shortened while a writer has it.

    Attributes:
        size: bytes appended so far, the schema included.
        crc32: of these bytes.
    """

    def __init__(self, path: Path, schema: pa.Schema, file: FileIO, size: int, crc32: int) -> None:
        self.path = path
        self.schema = schema
        self.size = size
        self.crc32 = crc32
        self._file = file

    @classmethod
    def create(cls, path: Path, schema: pa.Schema) -> ArrowStream:
        """A new stream in the place of whatever was there."""
        file = open(path, "wb", buffering=0)  # noqa: SIM115
        stream = cls(path, schema, file, 0, 0)
        stream._write(schema.serialize())
        stream.sync()
        return stream

    @classmethod
    def reopen(cls, path: Path, schema: pa.Schema, size: int, crc32: int) -> ArrowStream:
        """Go on after the first `size` bytes, which end with a whole message; the rest is cut off."""
        file = open(path, "r+b", buffering=0)  # noqa: SIM115
        file.truncate(size)
        file.seek(size)
        return cls(path, schema, file, size, crc32)

    def append(self, batch: pa.RecordBatch) -> int:
        """Write a batch; returns where it begins."""
        offset = self.size
        self._write(batch.serialize())
        return offset

    def _write(self, data: pa.Buffer) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self.size += data.size
        self.crc32 = zlib.crc32(data, self.crc32)

    def sync(self) -> None:
        """Make everything appended durable."""
        os.fsync(self._file.fileno())

    def end(self) -> None:
        """Write the end marker and close."""
        self._file.write(END_OF_STREAM)
        self.sync()
        self._file.close()

    def close(self) -> None:
        """Close without an end marker."""
        self._file.close()


def stream_schema(path: Path) -> pa.Schema | None:
    """The schema a stream begins with; None where there is no file or not even that is whole."""
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.read_schema(source)
    except (FileNotFoundError, OSError, EOFError, pa.ArrowInvalid):
        return None


def whole_batches(path: Path, schema: pa.Schema) -> tuple[list[int], int]:
    """Where each whole record batch begins, and where the last one ends; what follows is torn or an end marker."""
    offsets: list[int] = []
    with pa.memory_map(str(path)) as source:
        end = 0
        while True:
            try:
                message = pa.ipc.read_message(source)
                if message.type == "record batch":
                    pa.ipc.read_record_batch(message, schema)
                    offsets.append(end)
            except (OSError, EOFError, pa.ArrowInvalid):
                return offsets, end
            end = source.tell()


def read_batch(source: Any, offset: int, schema: pa.Schema) -> pa.RecordBatch:
    """The record batch that begins at `offset` of a memory map."""
    source.seek(offset)
    return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def file_crc32(path: Path, end: int, start: int = 0) -> int:
    """crc32 of the bytes [start, end) of a file; of fewer where it is shorter."""
    crc32 = 0
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(_CRC_BYTES, end - start))):
            crc32 = zlib.crc32(data, crc32)
            start += len(data)
    return crc32


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
