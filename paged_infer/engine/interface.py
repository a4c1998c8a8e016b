"""What a job, the Python API and harnesses ask of an engine, be it one or several behind one face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.speculative import SpeculationStats
from paged_infer.engine.stats import EngineLoad, EngineStats
from paged_infer.types import Completion, Request

if TYPE_CHECKING:
    from paged_infer.text.tokenizer import Tokenizer


class AnyEngine(Protocol):
    """Requests in, completions out. `Engine` is one in this process, `Replicas` are several in others."""

    tokenizer: Tokenizer
    memory: MemoryPlan
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    description: dict[str, Mapping[str, Any]]

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def speculation(self) -> SpeculationStats | None: ...

    def has_unfinished(self) -> bool:
        """Whether `step` still has something to return."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot be run comes out of a later `step` as a failed completion."""
        ...

    def abort(self, request_id: int) -> None:
        """Forget a request wherever it is; nothing of it comes out any more. Unknown and finished ones are ignored."""
        ...

    def step(self) -> list[Completion]:
        """Go on for a moment and return what finished, a request's samples together and in order."""
        ...

    def close(self) -> None: ...
