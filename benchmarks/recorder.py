"""Watches an engine from the seam between scheduler and runner: which tokens, blocks and times each step had."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from paged_infer.engine.batch import ScheduledBatch, StepOutput
from paged_infer.engine.engine import Engine
from paged_infer.engine.runner import Runner


@dataclass(frozen=True, slots=True)
class Step:
    """One executed batch.

    Attributes:
        num_tokens: tokens run through the model.
        sampled: the sequences that got a token.
        running: sequences that hold blocks.
        stored_tokens, held_blocks: tokens in the cache and blocks in use, a block shared by several counted once.
        worst_waste: most unused token places of a single sequence.
        seconds: from submission until the output was there; `end` is when that was.
    """

    num_tokens: int
    sampled: tuple[int, ...]
    running: int
    stored_tokens: int
    held_blocks: int
    worst_waste: int
    seconds: float
    end: float


@dataclass(slots=True)
class _Held:
    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class RecordingRunner:
    """A runner around a runner. Keeps the same books as the runner it wraps: a block table for each sequence."""

    def __init__(self, inner: Runner, block_size: int) -> None:
        self.depth = inner.depth
        self.steps: list[Step] = []
        self._inner = inner
        self._block_size = block_size
        self._held: dict[int, _Held] = {}
        self._submitted: list[tuple[ScheduledBatch, float]] = []

    def submit(self, batch: ScheduledBatch) -> None:
        for seq_id in batch.finished_ids:
            self._held.pop(seq_id, None)
        for new in batch.new:
            self._held[new.seq_id] = _Held()
        for item in batch.scheduled:
            held = self._held[item.seq_id]
            held.blocks += item.new_block_ids
            held.tokens = item.num_computed_tokens + item.num_scheduled_tokens
        self._submitted.append((batch, perf_counter()))
        self._inner.submit(batch)

    def collect(self) -> StepOutput:
        output = self._inner.collect()
        end = perf_counter()
        batch, start = self._submitted.pop(0)
        size = self._block_size
        fill: dict[int, int] = {}
        for held in self._held.values():
            for i, block in enumerate(held.blocks):
                fill[block] = max(fill.get(block, 0), min(size, held.tokens - i * size))
        self.steps.append(
            Step(
                num_tokens=batch.num_tokens,
                sampled=tuple(output.seq_ids),
                running=len(self._held),
                stored_tokens=sum(fill.values()),
                held_blocks=len(fill),
                worst_waste=max((len(h.blocks) * size - h.tokens for h in self._held.values()), default=0),
                seconds=end - start,
                end=end,
            )
        )
        return output

    def close(self) -> None:
        self._inner.close()


def record(engine: Engine) -> RecordingRunner:
    """Put a recorder between an engine and its runner."""
    recorder = RecordingRunner(engine._runner, engine.memory.block_size)
    engine._runner = recorder
    return recorder
