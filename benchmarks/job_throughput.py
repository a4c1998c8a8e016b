"""How many rows a second pass through the job itself: read, put into a template, tokenised, handed over, written.

No model is involved.

    python benchmarks/job_throughput.py --rows 1000000 --engine echo
    python benchmarks/job_throughput.py --rows 1000000 --engine scheduler

`echo` answers at once, so that reading and writing are all there is. `scheduler` runs the engine with its scheduler,
block manager and detokenisation over a runner that returns a token for every row it is asked about.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import deque
from pathlib import Path
from time import perf_counter, process_time
from typing import ClassVar

from paged_infer.engine.batch import ScheduledBatch, StepOutput
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.engine import Engine
from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.stats import EngineLoad, EngineStats
from paged_infer.engine.structured import Grammars
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.job.config import RunConfig
from paged_infer.job.run import run_job
from paged_infer.types import Completion, Request

TEMPLATE = "Question {{ number }}: what is {{ factor }} times three?"
OUTPUT_TOKENS = 4
BLOCK_SIZE, NUM_BLOCKS = 16, 8192


class ByteTokenizer:
    """A token is a UTF-8 byte."""

    special_ids: frozenset[int] = frozenset()
    fallback_bytes: ClassVar[dict[int, int]] = {}
    bos_token_id = None
    has_chat_template = False

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class EchoEngine:
    """Answers every request in the next step with the beginning of its prompt."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.memory = MemoryPlan(1 << 30, 1 << 20, 1 << 10, BLOCK_SIZE, NUM_BLOCKS, 512)
        self.sampling_defaults: dict[str, object] = {}
        self.description: dict[str, dict[str, object]] = {}
        self.stats = EngineStats()
        self.load = EngineLoad()
        self.speculation = None
        self.eos_token_ids = frozenset({0})
        self.num_running = 0
        self._waiting: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        waiting, self._waiting = self._waiting, []
        decode = self.tokenizer.decode
        return [
            Completion(
                request.request_id,
                ids := list(request.prompt_token_ids[:OUTPUT_TOKENS]),
                "length",
                decode(ids),
                prompt_tokens=len(request.prompt_token_ids),
            )
            for request in waiting
        ]


class ConstantRunner:
    """Samples the letter `a` for every row of a batch; keeps no state."""

    depth = 1

    def __init__(self) -> None:
        self._outputs: deque[StepOutput] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        ids = [scheduled.seq_id for scheduled in batch.scheduled if scheduled.samples]
        self._outputs.append(StepOutput(batch.step, ids, [[97] for _ in ids]))

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def close(self) -> None:
        pass


def scheduled_engine() -> Engine:
    """The engine over `ConstantRunner`."""
    tokenizer = ByteTokenizer()
    return Engine(
        tokenizer=tokenizer,  # type: ignore[arg-type]
        grammars=Grammars(tokenizer, 256, [0]),  # type: ignore[arg-type]
        scheduler=Scheduler(
            BlockManager(NUM_BLOCKS, BLOCK_SIZE, True),
            WaitingQueue("auto", 4096, BLOCK_SIZE),
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        ),
        runner=ConstantRunner(),  # type: ignore[arg-type]
        memory=MemoryPlan(1 << 30, 1 << 20, 1 << 10, BLOCK_SIZE, NUM_BLOCKS, 512),
        eos_token_ids=[0],
        vocab_size=256,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=["echo", "scheduler"], default="echo")
    parser.add_argument("--folder", help="where input and results go; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "rows.jsonl"
        with open(path, "w") as file:
            for i in range(arguments.rows):
                file.write(f'{{"id": "row-{i}", "number": {i}, "factor": {i * 7 % 1000}}}\n')
        report = Path(folder) / "report.json"
        settings = {"inputs": [str(path)], "template": TEMPLATE, "max_tokens": OUTPUT_TOKENS, "seed": 1}
        config = RunConfig.resolve(settings, {"report": str(report), "progress": "none"})
        engine = EchoEngine() if arguments.engine == "echo" else scheduled_engine()
        began, cpu = perf_counter(), process_time()
        summary = run_job(config, engine)  # type: ignore[arg-type]
        seconds, cpu = perf_counter() - began, process_time() - cpu
        figures = json.loads(report.read_text())
        print(
            f"{arguments.engine}: {summary.rows:,} rows in {seconds:.1f} s, {summary.rows / seconds:,.0f} rows/s "
            f"({summary.rows / cpu:,.0f} a CPU second), "
            f"peak memory {figures['peak_memory_bytes'] / 1e6:,.0f} MB, load {os.getloadavg()[0]:.1f}; "
            f"reading and tokenising {figures['seconds']['input']:.1f} s, writing {figures['seconds']['output']:.1f} s"
        )


if __name__ == "__main__":
    main()
