"""Worker processes: started by name, watched, and never left behind.

A worker is a fresh interpreter that runs a function `target(channel, *arguments)`. It shares nothing with the process
that started it but a socket: when either end dies, the other sees the end of the stream at once, whatever it was that
killed it. A thread of its own gives signs of life meanwhile, so that a stopped worker can be told from a slow one. What
a worker prints goes to a file of its own; its end is quoted when it dies. It leads a session of its
own, so that Ctrl-C in a terminal is the business of the job alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any

LOG_LINES = 20
"""Lines of a dead worker's log that are quoted."""

STOP_SECONDS = 3.0
"""How long a worker may take to end by itself once nobody listens to it any more."""

HUNG_SECONDS = 120.0
"""A worker without a sign of life for so long is taken for dead. Any Python code gives signs, and so do calls that let
go of the interpreter; loading a large library from a slow disk may not for a while."""

LOOK_SECONDS = 0.5
"""How often whoever waits for workers should ask whether they are hung."""


class WorkerFailed(Exception):
    """A worker process has died; the message names it, says how, and quotes the end of its log."""


class Worker:
    """A process that runs `target(channel, *arguments)`, both of which must be picklable by name.

    Args:
        name: what people are told it is, as `engine 1 of 2`.
        cpus: the CPUs it may use; None = those of this process.
        environment: variables that differ from this process's.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        *arguments: Any,
        cpus: Collection[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile(prefix="paged-infer-")  # noqa: SIM115
        self._told = 0
        self._deaf, self._silent, self._looked = False, 0.0, time.monotonic()
        self.connection, theirs = Pipe()
        _limit_waiting(self.connection.fileno())
        self._signs, their_signs = os.pipe()
        os.set_blocking(self._signs, False)
        with theirs, open(their_signs, "wb", buffering=0):
            call = f"main({theirs.fileno()}, {their_signs})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from paged_infer.parallel.worker import main; {call}"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno(), their_signs],
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # dead already, which the reader will notice
            self.connection.send((None if cpus is None else frozenset(cpus), pickle.dumps((target, arguments))))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message; one to a dead worker is dropped, since whoever reads from it learns of that."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, message: bytes) -> None:
        """`send` of what is pickled already."""
        if self._deaf:
            return
        try:
            self.connection.send_bytes(message)
        except BlockingIOError:  # with a part of it on the way there is no going on
            self._deaf = True
        except OSError:
            pass

    def receive(self) -> Any:
        """The next message; waits for it. Raises `WorkerFailed` when the worker is dead."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self.failure() from None

    def new_output(self) -> str:
        """What the worker has printed since the last call."""
        text = os.pread(self._log.fileno(), 1 << 20, self._told)
        self._told += len(text)
        return text.decode(errors="replace")

    def was_killed(self) -> bool:
        """Whether the process is dead, and not by its own doing."""
        code = self._process.poll()
        return code is not None and code < 0

    def is_hung(self) -> bool:
        """Whether it gave no sign of life for `HUNG_SECONDS`, of which only those count that somebody looked."""
        now = time.monotonic()
        try:
            seen = os.read(self._signs, 1 << 16)
        except BlockingIOError:
            seen = b""
        self._silent = 0.0 if seen else self._silent + min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        return self._deaf or self._silent > HUNG_SECONDS

    def failure(self) -> WorkerFailed:
        """How the worker ended, which it is made to do if it has not."""
        hung = self._deaf or self._silent > HUNG_SECONDS
        self.stop(0.0 if hung else STOP_SECONDS)
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if hung:
            how = f"gave no sign of life for {HUNG_SECONDS:g} s"
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 1 << 14, max(0, size - (1 << 14))).decode(errors="replace")
        lines = tail.splitlines()[-LOG_LINES:]
        quoted = "".join(f"\n  {line}" for line in lines) if lines else " nothing"
        return WorkerFailed(f"{self.name} (process {self.pid}) {how}; its log ends with:{quoted}")

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """End the process and whatever it has started; waits for it."""
        self.connection.close()
        if self._signs >= 0:
            os.close(self._signs)
            self._signs = -1
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


def stop_all(workers: Sequence[Worker]) -> None:
    """End them all, together rather than one after the other."""
    for worker in workers:
        worker.connection.close()
    until = time.monotonic() + STOP_SECONDS
    for worker in workers:
        worker.stop(max(0.0, until - time.monotonic()))


def _limit_waiting(descriptor: int) -> None:
    """Let a socket's reads and writes fail that get nowhere for `HUNG_SECONDS`."""
    limit = struct.pack("ll", int(HUNG_SECONDS), 0)
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
