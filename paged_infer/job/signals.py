"""Ctrl-C and SIGTERM: the first one asks for a clean stop, the second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(BaseException):
    """A signal came while there was nothing yet that had to be finished first."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class StopSignals:
    """Catches SIGINT and SIGTERM while entered.

    The first one raises `Stopped` wherever the main thread is, or, once `defer` was called, only sets `received`. The
    second one ends the process. Outside the main thread, where Python cannot catch signals, nothing is caught.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def defer(self) -> None:
        """From now on the owner looks at `received` and ends in its own time."""
        self._deferred = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for caught in self._before:
            signal.signal(caught, signal.SIG_DFL)
        if not self._deferred:
            raise Stopped(self.received)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
