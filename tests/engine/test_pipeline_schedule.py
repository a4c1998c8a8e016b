"""Scheduling for a pipeline: no stage is asked for what it cannot know, no row is lost, and stages do not idle.

The stages run in a time that is counted, not waited for, so that the share of it in which they work is exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from paged_infer.engine.batch import ScheduledBatch
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.types import Request, SamplingParams
from tests.fakes import FakeRunner, fake_outputs

VOCAB = 512


@dataclass
class Pipeline:
    """Equal stages over a checking runner, and the driver's loop.

    Attributes:
        driver: seconds that the driver takes for each batch.
        now: of the driver; done_at: of each stage, when it is through with all it has; busy: seconds it has worked.
    """

    stages: int
    depth: int
    num_blocks: int = 512
    budget: int = 64
    driver: float = 0.0
    now: float = 0.0
    submitted: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self):
        self.scheduler = Scheduler(
            BlockManager(self.num_blocks, 16, True),
            WaitingQueue("input", 4096, 16),
            max_num_seqs=32,
            max_num_batched_tokens=self.budget,
            max_in_flight=self.depth,
            num_micro_batches=self.depth,
        )
        self.runner = FakeRunner(self.num_blocks, 16, VOCAB, self.depth)
        self.done_at = [0.0] * self.stages
        self.busy = [0.0] * self.stages
        self.in_flight: list[tuple[float, ScheduledBatch]] = []
        self.finished: dict[int, list[int]] = {}

    def run(self, rows):
        sequences = [
            Sequence(i, Request(i, prompt, SamplingParams()), max_tokens) for i, (prompt, max_tokens) in enumerate(rows)
        ]
        for seq in sequences:
            self.scheduler.add(seq)
        while self.scheduler.has_work or self.in_flight:
            while (batch := self.scheduler.schedule()) is not None:
                self.submit(batch)
                self.scheduler.check_invariants()
            assert self.in_flight, "nothing can run, and nothing is running: a hang"
            done, _ = self.in_flight.pop(0)
            self.now = max(self.now + self.driver, done)
            for seq, _ in self.scheduler.update(self.runner.collect()):
                if seq.num_output_tokens >= seq.max_output_tokens:
                    self.scheduler.finish(seq)
                    self.finished[seq.seq_id] = seq.output_token_ids

    def submit(self, batch):
        unknown = {s.seq_id for _, earlier in self.in_flight for s in earlier.scheduled if s.samples}
        assert not unknown & {s.seq_id for s in batch.scheduled}, "the first stage cannot know this token yet"
        self.runner.submit(batch)
        self.submitted.append(batch)
        seconds = 1.0 + 0.05 * batch.num_tokens
        at = self.now
        for stage in range(self.stages):
            at = self.done_at[stage] = max(at, self.done_at[stage]) + seconds
            self.busy[stage] += seconds
        self.in_flight.append((at, batch))


def rows_of(choose, count, longest=60):
    return [
        ([choose.randrange(VOCAB) for _ in range(choose.randrange(1, longest))], choose.randrange(1, 40))
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_blocks", [512, 8])
@pytest.mark.parametrize(("stages", "depth"), [(2, 2), (2, 3), (3, 4)])
def test_every_row_comes_out_as_it_would_alone(stages, depth, num_blocks):
    num_preemptions = 0
    for seed in range(6):
        rows = rows_of(random.Random(seed), 30)
        pipeline = Pipeline(stages, depth, num_blocks)
        pipeline.run(rows)
        assert pipeline.finished == {i: fake_outputs(prompt, most, VOCAB) for i, (prompt, most) in enumerate(rows)}
        num_preemptions += pipeline.scheduler.stats.num_preemptions
    assert (num_preemptions > 0) == (num_blocks < 100)


@pytest.mark.parametrize("stages", [2, 3])
def test_equal_stages_are_busy_on_a_steady_workload(stages):
    choose = random.Random(1)
    rows = [([choose.randrange(VOCAB) for _ in range(20)], 60) for _ in range(96)]
    pipeline = Pipeline(stages, stages + 1, driver=0.05)
    pipeline.run(rows)
    fractions = [busy / pipeline.now for busy in pipeline.busy]
    assert min(fractions) >= 0.85, fractions


def test_running_rows_are_spread_evenly():
    pipeline = Pipeline(2, 3)
    pipeline.run([([1 + i, 2, 3], 30) for i in range(30)])
    sizes = [len(batch.scheduled) for batch in pipeline.submitted[20:60]]
    assert max(sizes) <= 12
    assert sum(sizes) / len(sizes) >= 8
