"""Two steps under way at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paged_infer.engine import build
from paged_infer.engine.batch import ScheduledBatch, StepOutput
from paged_infer.engine.pipelined_runner import PipelinedRunner
from paged_infer.engine.runner import ModelRunner
from paged_infer.llm import LLM
from tests.engine.test_engine import assert_greedy_equal, greedy, prompts_of


class Gate:
    """A runner that takes a step only when it is let."""

    depth = 1

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.steps: list[int] = []

    def submit(self, batch: ScheduledBatch) -> None:
        assert self.open.acquire(timeout=10)
        if batch.step == 2:
            raise RuntimeError("step 2 fails")
        self.steps.append(batch.step)

    def collect(self) -> StepOutput:
        return StepOutput(self.steps[-1], [], [])

    def close(self) -> None:
        self.steps.append(-1)


def test_submit_does_not_wait_and_results_come_in_order() -> None:
    gate = Gate()
    runner = PipelinedRunner(gate)
    runner.submit(ScheduledBatch(0))
    runner.submit(ScheduledBatch(1))
    assert gate.steps == []
    gate.open.release(2)
    assert [runner.collect().step, runner.collect().step] == [0, 1]
    runner.submit(ScheduledBatch(2))
    gate.open.release()
    with pytest.raises(RuntimeError, match="step 2 fails"):
        runner.collect()
    runner.close()
    assert gate.steps == [0, 1, -1]


def test_greedy_equals_hugging_face(random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler plans a step before the tokens of the one before are known, preempts and frees blocks meanwhile."""
    monkeypatch.setattr(build, "ModelRunner", lambda *args, **kwargs: PipelinedRunner(ModelRunner(*args, **kwargs)))
    folder = random_model("llama")
    prompts = prompts_of([1, 5, 16, 17, 33, 64, 100])
    for options in ({"num_kv_blocks": 9}, {"max_num_batched_tokens": 16}):
        with LLM(str(folder), attention_backend="reference", dtype="float32", **options) as llm:
            outputs = [c.token_ids for c in llm.generate(prompts, greedy(12))]
            llm.engine.scheduler.check_invariants()
        assert_greedy_equal(folder, prompts, outputs, 12)
