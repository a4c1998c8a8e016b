"""One engine for several jobs at once, so that it does not run dry when one of them comes to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from paged_infer.engine.interface import AnyEngine
from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.speculative import SpeculationStats
from paged_infer.engine.stats import EngineLoad, EngineStats
from paged_infer.types import Completion, Request

if TYPE_CHECKING:
    from paged_infer.text.tokenizer import Tokenizer


class SharedEngine:
    """Takes turns: whoever steps moves all requests on, and each gets the completions of its own.

    Ids of requests must be unique over all views.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self.engine = engine
        self._lock = Lock()
        self._owner: dict[int, EngineView] = {}
        self._finished: defaultdict[EngineView, list[Completion]] = defaultdict(list)

    def view(self) -> EngineView:
        """The engine as one job sees it; each thread needs its own."""
        return EngineView(self)

    def add(self, view: EngineView, request: Request) -> None:
        with self._lock:
            self._owner[request.request_id] = view
            self.engine.add(request)

    def step(self, view: EngineView) -> list[Completion]:
        """Move on, unless something is there already."""
        with self._lock:
            if not self._finished[view] and self.engine.has_unfinished():
                for completion in self.engine.step():
                    self._finished[self._owner[completion.request_id]].append(completion)
            return self._finished.pop(view, [])

    def abort(self, view: EngineView, request_id: int) -> None:
        """Take a request of this view out of the engine."""
        with self._lock:
            if self._owner.pop(request_id, None) is view:
                self.engine.abort(request_id)
                self._finished[view] = [done for done in self._finished[view] if done.request_id != request_id]

    def forget(self, ids: set[int]) -> None:
        """These requests are answered."""
        with self._lock:
            for request_id in ids:
                del self._owner[request_id]


class EngineView:
    """A job's share of an engine: its own requests, and the figures of all."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._unfinished: set[int] = set()
        engine = shared.engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.memory: MemoryPlan = engine.memory
        self.eos_token_ids: frozenset[int] = engine.eos_token_ids
        self.sampling_defaults: dict[str, Any] = engine.sampling_defaults
        self.description: dict[str, Mapping[str, Any]] = engine.description

    @property
    def stats(self) -> EngineStats:
        return self._shared.engine.stats

    @property
    def num_waiting(self) -> int:
        return min(len(self._unfinished), self._shared.engine.num_waiting)

    @property
    def num_running(self) -> int:
        return self._shared.engine.num_running

    @property
    def load(self) -> EngineLoad:
        return self._shared.engine.load

    @property
    def speculation(self) -> SpeculationStats | None:
        return self._shared.engine.speculation

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def add(self, request: Request) -> None:
        self._unfinished.add(request.request_id)
        self._shared.add(self, request)

    def abort(self, request_id: int) -> None:
        if request_id in self._unfinished:
            self._unfinished.remove(request_id)
            self._shared.abort(self, request_id)

    def step(self) -> list[Completion]:
        finished = self._shared.step(self)
        ids = {completion.request_id for completion in finished}
        self._unfinished -= ids
        self._shared.forget(ids)
        return finished

    def close(self) -> None:
        """Nothing: the engine is everybody's."""
