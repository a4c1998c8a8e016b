"""Where log messages of a command go."""

from __future__ import annotations

import contextlib
import logging
import sys


class _Stderr(logging.Handler):
    """Writes to what standard error is at that moment, so that a live progress line stays below the messages."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(self.format(record), file=sys.stderr)


def log_to_stderr(level: str) -> None:
    """Show this package's messages from `level` up."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("paged-infer: %(levelname)s: %(message)s"))
    logger = logging.getLogger("paged_infer")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
