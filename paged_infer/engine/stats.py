"""What an engine has done and how busy it is, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(slots=True)
class EngineStats:
    """Tokens since the engine was made; prompts count when their sequence is finished, outputs as they come."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One moment of an engine, or of several together.

    Attributes:
        num_running, num_waiting: sequences. used_blocks, num_blocks: of the KV cache.
        num_preemptions: sequences put back so far.
        stored_tokens, used_slots: see `scheduler.SchedulerStats`.
        core_seconds, memory_bytes: processor time taken so far, and most memory, by processes other than this one.
    """

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    stored_tokens: int = 0
    used_slots: int = 0
    core_seconds: float = 0.0
    memory_bytes: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def kv_share(self) -> float:
        """Share of the KV cache in use."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def kv_utilisation(self) -> float:
        """Share of the slots in use that hold a token, over all steps."""
        return self.stored_tokens / self.used_slots if self.used_slots else 1.0
