"""One process at a time on one output."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from paged_infer.config import ConfigError

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class OutputLock:
    """Held while entered; gone when the process is, however it ends.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._descriptor < 0:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 100).decode(errors="replace").strip()
                os.close(descriptor)
                raise ConfigError(
                    f"another process{f' ({holder})' if holder else ''} is writing these results: wait for it, or "
                    f"choose another -o ({self._path} is locked)"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    os.close(descriptor)
                    raise
            try:
                is_current = os.path.samestat(os.fstat(descriptor), os.stat(self._path))
            except FileNotFoundError:
                is_current = False
            if not is_current:  # its last holder removed it between our two looks
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
            self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
