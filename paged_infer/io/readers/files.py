"""Bytes of inputs: local files, anything fsspec has a URL for, standard input; compressed or not."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from paged_infer.config import ConfigError
from paged_infer.io.readers.rows import InputDamaged, first_line
from paged_infer.types import InputFailed

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STDIN = "-"
COMPRESSIONS = (".gz", ".zst", ".bz2")
DIGEST_BYTES = 1 << 16

_READ_BYTES = 1 << 20
_URL = re.compile(r"[a-z][a-z0-9+.-]+(::|://)", re.IGNORECASE)


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def suffixes(path: str) -> tuple[str, str]:
    """(ending that names the format, ending that names the compression), in lower case; empty where there is none."""
    name = urlsplit(path).path if path.startswith(("http://", "https://")) else path
    endings = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    compression = endings.pop() if endings and endings[-1] in COMPRESSIONS else ""
    return (endings[-1] if endings else ""), compression


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path on it. Raises `ConfigError` when it cannot be used."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        remedy = "pip install 'paged-infer[remote]' brings S3 and HTTP"
        raise ConfigError(f"{url} cannot be opened: {first_line(error)} ({remedy})") from None
    except Exception as error:  # an unknown protocol, missing credentials
        raise ConfigError(f"{url} cannot be opened: {first_line(error)}") from None


class _Pieces(io.RawIOBase):
    """A stream made of a function that puts the next bytes into a buffer and says how many."""

    def __init__(self, fill: Callable[[WriteableBuffer], int], close: Callable[[], object]) -> None:
        self._fill = fill
        self._close = close

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._fill(buffer)

    def close(self) -> None:
        if not self.closed:
            self._close()
        super().close()


class InputFile:
    """One file.

    Raises `ConfigError` when it is missing. Reading raises `InputFailed` when disk or network fail, and `InputDamaged`
    where compressed bytes are no good, after all that could be decompressed has come.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.compression = "" if path == STDIN else suffixes(path)[1]
        self._fs: Any = None
        self._key = path
        if is_url(path):
            self._fs, self._key = filesystem(path)
        self._options: dict[str, Any] = {}
        self._stored_read = 0
        self.size = self._find_size()

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path

    @property
    def is_local(self) -> bool:
        """Whether it is a file of this machine, which can be mapped into memory."""
        return self._fs is None and self.path != STDIN

    def _find_size(self) -> int | None:
        if self.path == STDIN:
            return None
        if self._fs is None and Path(self.path).exists() and not os.access(self.path, os.R_OK):
            raise ConfigError(f"{self.path} cannot be read: permission denied")
        try:
            if self._fs is None:
                status = Path(self.path).stat()
                return status.st_size if stat.S_ISREG(status.st_mode) else None  # a pipe must not be read to look at it
            known = self._fs.info(self._key)
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: no such file") from None
        except Exception as error:  # whatever the file system raises
            raise ConfigError(f"{self.path} cannot be read: {first_line(error)}") from None
        if self.path.startswith(("http://", "https://")) and not known.get("partial"):
            self._options = {"block_size": 0}  # a server that knows no ranges is read in one go
        size = known.get("size")
        return None if size is None else int(size)

    def open_stored(self) -> BinaryIO:
        """The bytes as they are stored; seekable, but for standard input and servers that cannot."""
        if self.path == STDIN:
            return sys.stdin.buffer
        try:
            if self._fs is None:
                return cast(BinaryIO, open(self.path, "rb", buffering=0))
            return cast(BinaryIO, self._fs.open(self._key, "rb", **self._options))
        except Exception as error:  # whatever the file system raises
            raise InputFailed(f"{self.name} cannot be opened: {first_line(error)}") from error

    def open(self, offset: int = 0) -> BinaryIO:
        """The decompressed bytes from an offset on."""
        stored = self.open_stored()
        skip = 0 if offset and not self.compression and _sought(stored, offset) else offset
        self._stored_read = offset - skip
        stream = self._decompressed(self._buffered(stored))
        while skip:
            skipped = len(stream.read(min(skip, _READ_BYTES)))
            if not skipped:
                break
            skip -= skipped
        return stream

    def _buffered(self, stored: BinaryIO) -> io.BufferedReader:
        fill: Callable[[WriteableBuffer], int]
        fill = getattr(stored, "readinto1", None) or stored.readinto  # type: ignore[attr-defined]

        def guarded(buffer: WriteableBuffer) -> int:
            try:
                count = fill(buffer)
            except Exception as error:  # whatever the file system raises
                raise InputFailed(f"reading {self.name} failed: {first_line(error)}") from error
            self._stored_read += count
            return count

        close = _leave_open if self.path == STDIN else stored.close
        return io.BufferedReader(_Pieces(guarded, close), _READ_BYTES)

    def _decompressed(self, stored: io.BufferedReader) -> BinaryIO:
        if not self.compression:
            return stored
        if not stored.peek(1):
            raise InputDamaged("the file is empty, which no compressed file is")
        unpacked: Any
        if self.compression == ".gz":
            unpacked = gzip.GzipFile(fileobj=stored)
        elif self.compression == ".bz2":
            unpacked = bz2.BZ2File(stored)
        else:
            unpacked = _zstd_file(stored)

        def fill(buffer: WriteableBuffer) -> int:
            try:
                return int(unpacked.readinto1(buffer))  # hands on what was decompressed before a damaged piece
            except InputFailed:
                raise
            except Exception as error:  # each decoder has its own
                raise InputDamaged(first_line(error)) from error

        def close() -> None:
            unpacked.close()
            stored.close()

        return io.BufferedReader(_Pieces(fill, close), _READ_BYTES)

    def fraction_read(self) -> float | None:
        """How much of the stored bytes has been read, 0 to 1."""
        return self._stored_read / self.size if self.size else None

    def identity(self) -> dict[str, Any]:
        """`name`, `size`, and `head` and `tail`: the SHA-256 of the first and last 64 KiB; None where not to be had."""
        if self.size is None:
            return {"name": self.path, "size": None, "head": None, "tail": None}
        head, tail = self.digest(0, DIGEST_BYTES), self.digest(self.size - DIGEST_BYTES, self.size)
        return {"name": self.path, "size": self.size, "head": head, "tail": tail}

    def digest(self, start: int, end: int) -> str | None:
        """SHA-256 of stored bytes [start, end)."""
        content = self.stored_bytes(start, end)
        return None if content is None else hashlib.sha256(content).hexdigest()

    def stored_bytes(self, start: int, end: int) -> bytes | None:
        """Stored bytes [start, end), as far as the file goes; None where one cannot seek."""
        start = max(0, start)
        with self.open_stored() as stored:
            return self._buffered(stored).read(end - start) if not start or _sought(stored, start) else None


def _sought(stream: BinaryIO, offset: int) -> bool:
    try:
        stream.seek(offset)
    except (OSError, ValueError, NotImplementedError):  # a server that knows no ranges
        return False
    return True


def _leave_open() -> None:
    pass


def _zstd_file(stored: BinaryIO) -> Any:
    if sys.version_info >= (3, 14):
        from compression.zstd import ZstdFile
    else:
        from backports.zstd import ZstdFile
    return ZstdFile(stored)
