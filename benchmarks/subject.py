"""Runs one adapter in a process of its own and watches it from outside: time, memory, and who else used the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from peers.protocol import MARK

SAMPLE_S = 0.2


class SubjectFailed(RuntimeError):
    """The adapter ended, or ran out of time, without a result; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one engine.

    Attributes:
        wall_s: tokenise + generate + detokenise, by the adapter's own clock.
        ready_s: from process start until the engine had answered a small warm-up.
        peak_rss: bytes, process tree, sampled.
        cores: CPU time of the process tree over wall time.
        other_share: CPU time of everything else on the machine meanwhile (stolen time included), as a share of all of
            its CPU time.
    """

    engine: str
    version: str
    settings: dict[str, object]
    wall_s: float
    ready_s: float
    prompt_tokens: int
    generated_tokens: int
    peak_rss: int
    cores: float
    other_share: float

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.wall_s


@dataclass(slots=True)
class Subject:
    """An engine to measure: the adapter's command line, and the port of its server where it is only a client."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    server_port: int | None = None

    def measure(self, timeout_s: float) -> Measurement:
        """Run once. Raises `SubjectFailed`."""
        with tempfile.TemporaryFile("w+") as errors:
            started = time.monotonic()
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | self.environment,
            )
            watch = _Watch(process.pid, self.server_port)
            timer = threading.Timer(timeout_s, watch.kill)
            timer.start()
            try:
                ready = _await(process.stdout, "ready")
                ready_s = time.monotonic() - started
                before = watch.cpu_times()
                _send(process.stdin, "go\n")
                done = _await(process.stdout, "done")
                own, busy = (after - first for after, first in zip(watch.cpu_times(), before, strict=True))
            except EOFError:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
                raise SubjectFailed(f"{self.name}: no result within {timeout_s:.0f} s\n{errors.read()}") from None
            finally:
                timer.cancel()
                watch.kill()
                process.wait()
        wall = done["wall_s"]
        return Measurement(
            engine=self.name,
            version=ready["version"],
            settings=ready["settings"],
            wall_s=wall,
            ready_s=ready_s,
            prompt_tokens=done["prompt_tokens"],
            generated_tokens=done["generated_tokens"],
            peak_rss=watch.peak_rss,
            cores=own / wall,
            other_share=max(0.0, busy - own) / (wall * (os.cpu_count() or 1)),
        )


def machine_cpu_s() -> float:
    """CPU seconds the whole machine has spent since it started, stolen ones included."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class OtherShare:
    """Share of the machine's CPU time that others than this process and its ended children take, from creation on."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), machine_cpu_s(), self._own()

    @staticmethod
    def _own() -> float:
        return sum(os.times()[:4])

    def __call__(self) -> float:
        wall, machine, own = self._start
        spent = (time.perf_counter() - wall) * (os.cpu_count() or 1)
        return max(0.0, (machine_cpu_s() - machine) - (self._own() - own)) / spent


def _await(lines: IO[str], event: str) -> dict[str, object]:
    for line in lines:
        if line.startswith(MARK) and (said := json.loads(line.removeprefix(MARK)))["event"] == event:
            return said
    raise EOFError


def _send(pipe: IO[str], text: str) -> None:
    pipe.write(text)
    pipe.flush()


class _Watch:
    """Samples the memory of a process tree (and of the server it talks to) from a thread."""

    def __init__(self, pid: int, server_port: int | None) -> None:
        self._root = psutil.Process(pid)
        self._server = None if server_port is None else _listener(server_port)
        self.peak_rss = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _tree(self) -> list[psutil.Process]:
        """The processes to count; empty once the adapter has ended."""
        roots = [self._root] + ([self._server] if self._server else [])
        try:
            return roots + [child for root in roots for child in root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _sample(self) -> None:
        while tree := self._tree():
            rss = 0
            for process in tree:
                try:
                    rss += process.memory_info().rss
                except psutil.Error:
                    continue
            self.peak_rss = max(self.peak_rss, rss)
            time.sleep(SAMPLE_S)

    def cpu_times(self) -> tuple[float, float]:
        """CPU seconds used so far by the tree, and by the whole machine."""
        own = 0.0
        for process in self._tree():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            own += times.user + times.system
        return own, machine_cpu_s()

    def kill(self) -> None:
        """End the adapter and its children; a server it only talked to stays."""
        try:
            family = [*self._root.children(recursive=True), self._root]
        except psutil.Error:
            return
        for process in family:
            try:
                process.kill()
            except psutil.Error:
                continue


def _listener(port: int) -> psutil.Process | None:
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    return None
