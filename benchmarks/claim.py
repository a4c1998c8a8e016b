"""What a claim is made of: settings all of them share, and the line of the table each comes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recorder import RecordingRunner, record

from paged_infer.llm import LLM
from paged_infer.types import Completion, SamplingParams

KV_BYTES = 2 << 30
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `holds` is None where the claim has no number to hold this to."""

    claim: str
    claimed: str
    measured: str
    holds: bool | None
    how: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What all claims share."""

    model: str
    dtype: str
    threads: int

    @contextlib.contextmanager
    def engine(self, **options: object) -> Iterator[tuple[LLM, RecordingRunner]]:
        """A loaded engine with a recorder in it."""
        options = {"kv_cache_memory": KV_BYTES, "seed": 0} | options
        with LLM(self.model, dtype=self.dtype, threads=self.threads, block_size=BLOCK_SIZE, **options) as llm:
            yield llm, record(llm.engine)


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly that many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def succeeded(completions: Sequence[Completion]) -> Sequence[Completion]:
    """The completions. Raises `RuntimeError` when one is an error."""
    for completion in completions:
        if completion.finish_reason == "error":
            raise RuntimeError(completion.error)
    return completions
