"""A runner whose steps run in a thread of their own, so that the next one is scheduled meanwhile."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from paged_infer.engine.batch import ScheduledBatch, StepOutput
from paged_infer.engine.runner import Runner


class PipelinedRunner:
    """Hands batches to another runner, strictly in order, and never waits before `collect`.

    Worth it where that runner mostly waits for a device, since it lets go of the interpreter meanwhile. A batch that
    fails raises in the `collect` that asks for it.
    """

    depth = 2

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        self._steps: deque[Future[StepOutput]] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        self._steps.append(self._thread.submit(self._run, batch))

    def _run(self, batch: ScheduledBatch) -> StepOutput:
        self._runner.submit(batch)
        return self._runner.collect()

    def collect(self) -> StepOutput:
        return self._steps.popleft().result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._steps.clear()
        self._runner.close()
