"""What workers in tests run: quick to import, so that they start quickly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from paged_infer.config import ConfigError
from paged_infer.engine.batch import StepOutput
from paged_infer.parallel.worker import Channel
from tests.job.fake_engine import FakeEngine


def echo(channel: Channel, prefix: str) -> None:
    while True:
        channel.send(prefix + channel.receive())


def report_cpus(channel: Channel) -> None:
    channel.send((os.getpid(), os.getsid(0), sorted(os.sched_getaffinity(0)), os.environ.get("MARK")))
    channel.receive()


def fail(channel: Channel) -> None:
    for i in range(40):
        print(f"line {i}", file=sys.stderr)
    raise ValueError("cannot go on")


def busy_forever(channel: Channel) -> None:
    """Never looks at its channel, and has a child that would outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    channel.send((os.getpid(), child.pid))
    while True:
        time.sleep(600)


def flood(channel: Channel, size: int) -> None:
    """Sends more than a socket holds before it reads anything."""
    for _ in range(64):
        channel.send(bytes(size))
    channel.send(len(channel.receive()))


def slow_engine() -> FakeEngine:
    return FakeEngine(rate=2, on_step=lambda engine: time.sleep(0.004))


def refused_engine() -> FakeEngine:
    raise ConfigError("no memory for the KV cache")


def hanging_engine() -> FakeEngine:
    time.sleep(600)
    raise AssertionError


def fake_rank(channel: Channel, rank: int) -> None:
    """Agrees, and answers each batch of sequences with a token that says which step it was."""
    channel.send(rank)
    channel.receive()
    channel.send(None)
    while True:
        batch = channel.receive()
        if rank == 2:
            sampled = [item.seq_id for item in batch.scheduled if item.samples]
            channel.send(StepOutput(batch.step, sampled, [[100 + batch.step]] * len(sampled)))


def hanging_rank(channel: Channel, rank: int) -> None:
    time.sleep(600)


def stopped_rank(channel: Channel, rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_rank(channel: Channel, rank: int) -> None:
    """Takes long to load, without a word to anybody."""
    time.sleep(2.5)
    fake_rank(channel, rank)


def refusing_rank(channel: Channel, rank: int) -> None:
    channel.send(ConfigError("no memory for the KV cache"))
    time.sleep(600)
