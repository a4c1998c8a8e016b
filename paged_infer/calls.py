"""Several callers of one engine, each with rows of its own. What a step finishes goes back to whom it belongs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from paged_infer.engine.interface import AnyEngine
from paged_infer.types import Completion, Request, RowError, SamplingParams, noise_key

Encoded = Sequence[int] | RowError
"""Token ids of a prompt, or why there are none."""


class Call:
    """The rows of one caller.

    Attributes:
        ready: completions that have come back, in the order of their coming; `request_id` is the row.
    """

    def __init__(self, calls: Calls) -> None:
        self.ready: deque[Completion] = deque()
        self._calls = calls
        self._ids: dict[int, int] = {}  # row → request id

    @property
    def num_unfinished(self) -> int:
        """Rows whose completions have not come back."""
        return len(self._ids)

    def add(self, row: int, prompt: Encoded, params: SamplingParams, *, score_from: int = 0) -> None:
        """Queue a row, whose number the caller has not used before; see `Request` for `score_from`."""
        if isinstance(prompt, RowError):
            self.ready.append(Completion.failed(row, prompt))
        else:
            self._ids[row] = self._calls.add(self, row, prompt, params, score_from)

    def abandon(self, row: int) -> None:
        """Take a row out of the engine, if it is there."""
        request_id = self._ids.pop(row, None)
        if request_id is not None:
            self._calls.remove(request_id)

    def abandon_all(self) -> None:
        """Take all rows out of the engine."""
        for row in list(self._ids):
            self.abandon(row)

    def receive(self, row: int, completions: Sequence[Completion]) -> None:
        """Take the samples of a row."""
        del self._ids[row]
        self.ready += [replace(completion, request_id=row) for completion in completions]


class Calls:
    """The engine as its callers share it. For one thread.

    Args:
        engine: nobody else adds to it or steps it.
        run_seed: where the noise of rows without a seed comes from, together with the number of the row.
    """

    def __init__(self, engine: AnyEngine, run_seed: int) -> None:
        self._engine = engine
        self._run_seed = run_seed
        self._new_ids = itertools.count()
        self._owners: dict[int, tuple[Call, int]] = {}  # request id → whose it is, and which row

    def open(self) -> Call:
        """A new caller."""
        return Call(self)

    def add(self, call: Call, row: int, prompt: Sequence[int], params: SamplingParams, score_from: int) -> int:
        """Queue a row of `call`; returns the id of its request."""
        request_id = next(self._new_ids)
        self._owners[request_id] = call, row
        key = noise_key(params.seed, self._run_seed, row)
        self._engine.add(Request(request_id, prompt, params, key, score_from=score_from))
        return request_id

    def remove(self, request_id: int) -> None:
        """Forget a request."""
        del self._owners[request_id]
        self._engine.abort(request_id)

    def step(self) -> None:
        """Run one step of the engine and hand out what it has finished."""
        for request_id, samples in itertools.groupby(self._engine.step(), key=lambda done: done.request_id):
            call, row = self._owners.pop(request_id)
            call.receive(row, list(samples))
