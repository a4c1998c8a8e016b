"""A job in a process of its own that can be killed: at any moment from outside, or by itself at a named point."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_infer.config import ConfigError
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.engine import Engine
from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.structured import Grammars
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.io import ledger, stream, targets, writers
from paged_infer.job.config import RunConfig
from paged_infer.job.run import run_job
from tests.fakes import FakeRunner
from tests.job.fake_engine import FakeTokenizer

SEGMENT_ROWS = 90
NUM_BLOCKS, BLOCK_SIZE = 512, 16


class _ByteTokenizer(FakeTokenizer):
    def encode_batch(self, texts):
        return [list(text.encode()) for text in texts]


def scheduled_engine(delay: float = 0.0) -> Engine:
    """The engine with its scheduler and block manager over a runner without a model, each step `delay` seconds long."""
    tokenizer = _ByteTokenizer()
    return Engine(
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, 256, [0]),
        scheduler=Scheduler(
            BlockManager(NUM_BLOCKS, BLOCK_SIZE, True),
            WaitingQueue("auto", 4096, BLOCK_SIZE),
            max_num_seqs=64,
            max_num_batched_tokens=256,
            max_in_flight=2,
        ),
        runner=FakeRunner(NUM_BLOCKS, BLOCK_SIZE, 256, 2, eos_token_id=0, eos_probability=0.05, delay=delay),
        memory=MemoryPlan(1 << 30, 1 << 20, 1 << 10, BLOCK_SIZE, NUM_BLOCKS, 512),
        eos_token_ids=[0],
        vocab_size=256,
    )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(owner: Any, name: str, countdown: int, when: Callable[..., bool] = lambda *_: True) -> None:
    """Die when the `countdown`-th call of a function that counts has returned."""
    function = getattr(owner, name)
    left = countdown

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        result = function(*args, **kwargs)
        if when(*args):
            left -= 1
            if left == 0:
                _die()
        return result

    setattr(owner, name, wrapped)


def _torn(countdown: int) -> None:
    """Die in the middle of writing a batch."""
    write, left = stream.ArrowStream._write, countdown

    def wrapped(self: stream.ArrowStream, data: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            self._file.write(memoryview(data)[: data.size // 2])
            _die()
        write(self, data)

    stream.ArrowStream._write = wrapped  # type: ignore[method-assign]


def _before_rename(countdown: int) -> None:
    """Die when a new ledger is written beside the old one and not yet in its place."""
    replace, left = os.replace, countdown

    def wrapped(source: Any, destination: Any) -> None:
        nonlocal left
        if str(destination).endswith(".ledger"):
            left -= 1
            if left == 0:
                _die()
        replace(source, destination)

    os.replace = wrapped  # type: ignore[assignment]


CRASHES: dict[str, Callable[[int], None]] = {
    "torn": _torn,
    "append": lambda n: _after(stream.ArrowStream, "append", n),
    "fsync": lambda n: _after(stream.ArrowStream, "sync", n),
    "seal": lambda n: _after(targets.FileTarget, "seal", n),
    "ledger": lambda n: _after(ledger.Ledger, "save", n),
    "ledger-before": _before_rename,
    "shorten": lambda n: _after(os, "replace", n, lambda _, to: str(to).endswith(".partial")),
    "present": lambda n: _after(os, "replace", n, lambda _, to: str(to).endswith("out.arrow")),
    "rename": lambda n: _after(targets.FileTarget, "present", n),
}
"""Points at which a job can kill itself, each at its n-th passing."""


def job(path: Path, output: Path, crash: tuple[str, int] | None = None, delay: float = 0.0, **options: Any) -> None:
    """Run the job to its end or its crash; `SystemExit` with its exit code."""
    writers.SEGMENT_ROWS = SEGMENT_ROWS
    writers.FLUSH_SECONDS = 0.01
    if crash is not None:
        CRASHES[crash[0]](crash[1])
    settings = {"inputs": [str(path)], "output": str(output), "progress": "none", "seed": 1, "keep": ["note"]}
    try:
        summary = run_job(RunConfig.resolve(settings, options), scheduled_engine(delay))
    except ConfigError:
        raise SystemExit(2) from None
    raise SystemExit(summary.exit_code)


def start(path: Path, output: Path, **options: Any) -> Any:
    """`job` in a process of its own, forked from one that has everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.job.crash_job"])
    process = context.Process(target=job, args=(path, output), kwargs=options)
    process.start()
    return process
