"""The child's side of a worker process: what it runs, and how it ends with the process that started it.

Standard library only until the target itself is unpickled, so that a worker answers for its death from the first
moment on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SIGN_SECONDS = 0.5
"""Between two signs of life."""


class Channel:
    """Messages from and to the process that started this one.

    A thread reads them as they come, so that neither side ever waits for the other to read. When that process is gone,
    however it ended, this one ends at once; it must lead a process group of its own.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)  # with whatever it has started
            self._inbox.put(message)

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def receive(self) -> Any:
        """The next message; waits for it."""
        return self._inbox.get()

    def pending(self) -> list[Any]:
        """The messages that have come and were not taken."""
        messages = []
        while True:
            try:
                messages.append(self._inbox.get_nowait())
            except queue.Empty:
                return messages


def _give_signs(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    while True:
        with contextlib.suppress(OSError):  # full, or nobody reads: whoever started this one is busy, or gone
            os.write(descriptor, b".")
        time.sleep(SIGN_SECONDS)


def main(descriptor: int, signs: int) -> None:
    """Entry point: run what comes over the connection with this file descriptor; give signs of life over the other."""
    threading.Thread(target=_give_signs, args=(signs,), name="signs of life", daemon=True).start()
    connection = Connection(descriptor)
    cpus, work = connection.recv()
    if cpus is not None:
        os.sched_setaffinity(0, cpus)  # before any library counts the cores
    channel = Channel(connection)
    target: Callable[..., None]
    target, arguments = pickle.loads(work)
    target(channel, *arguments)
