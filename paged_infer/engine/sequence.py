"""One token stream of a request, as the scheduler sees it: tokens, counters, block table. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from paged_infer.engine.batch import LogprobColumns, NewSequence
from paged_infer.engine.prefix import Prefix
from paged_infer.types import Request


class Status(Enum):
    """Where a sequence is. There are no phases: how far it got is what its counters say."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and counters of one stream. Only `Scheduler` and `BlockManager` write to it.

    A sequence has to catch up `num_computed_tokens` with `num_tokens`; prefill, chunks, prefix hits, decoding and
    resumption after a preemption are all this one subtraction.

    Attributes:
        seq_id: unique in the run.
        max_output_tokens: at least 1; already clipped so that neither the context nor the KV pool is outgrown.
        sample: which of the request's samples this is.
        banned_until_min_tokens: ids masked while fewer than `params.min_tokens` tokens are out.
        bad_words: token sequences that must not be completed.
        adapter_digest: identity of the adapter it is answered with; "" = none.
        num_candidates: more than 0 for a beam: it is not sampled from, the engine says how it goes on, and it is
            preempted together with the other beams of its request.
        followers: samples of the same request that share the prompt: they start as forks of this one when all of the
            prompt but its last token is stored. Empty afterwards.
        token_ids: prompt and every output token known so far.
        max_kv_tokens: most tokens it will ever store; its last output token is never run through the model.
        num_pending: tokens that batches in flight are still sampling; they follow `token_ids`.
        num_drafts: draft tokens that a batch in flight runs after the known ones.
        num_computed_tokens: tokens whose keys and values are stored once the batches in flight are done.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        block_table: ids of the blocks that hold tokens [0, num_computed_tokens).
        num_passed_blocks: of those, the first ones that are others' now, since a window has passed them.
        age: rank of its first admission (smaller is older); -1 = never admitted. A preemption does not change it.
        num_lost_tokens: tokens that its last preemption threw away; 0 otherwise.
        prefixes: the root and then one link for each full block of `token_ids`, as far as anybody asked.
        num_published_blocks: leading blocks of the table that were offered to the prefix cache.
        num_told: tokens of it that the runner was told, or found itself; 0 = the runner does not know it.
        next_scored: the first prompt token whose log-probability is wanted and not known, at least 1; None = of none.
        first_scored: what `next_scored` was at first.
        carried, scored_next: see `NewSequence`.
        logprobs, prompt_logprobs: those known so far, where asked for.
    """

    seq_id: int
    request: Request
    max_output_tokens: int
    sample: int = 0
    banned_until_min_tokens: tuple[int, ...] = ()
    bad_words: SequenceOf[SequenceOf[int]] = ()
    adapter_digest: str = ""
    num_candidates: int = 0
    followers: list[Self] = field(default_factory=list)
    scored_next: int | None = None
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_kv_tokens: int = field(init=False)
    num_pending: int = field(init=False, default=0)
    num_drafts: int = field(init=False, default=0)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    num_passed_blocks: int = field(init=False, default=0)
    status: Status = field(init=False, default=Status.WAITING)
    age: int = field(init=False, default=-1)
    num_lost_tokens: int = field(init=False, default=0)
    prefixes: list[Prefix] = field(init=False, default_factory=list)
    num_published_blocks: int = field(init=False, default=0)
    num_told: int = field(init=False, default=0)
    next_scored: int | None = field(init=False, default=None)
    first_scored: int = field(init=False, default=1)
    carried: bytes | None = field(init=False, default=None)
    logprobs: LogprobColumns | None = field(init=False, default=None)
    prompt_logprobs: LogprobColumns | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        if self.scored_next is not None:
            self.token_ids.pop()
        if not self.token_ids or self.max_output_tokens < 1:
            raise ValueError("a sequence needs at least one prompt token and room for one output token")
        self.num_prompt_tokens = len(self.token_ids)
        self.max_kv_tokens = self.num_prompt_tokens + self.max_output_tokens - 1
        if self.request.params.logprobs is not None:
            self.logprobs = LogprobColumns()
        if self.request.params.prompt_logprobs is not None and self.sample == 0:
            self.prompt_logprobs = LogprobColumns()
            self.first_scored = max(1, self.request.score_from)
            self.next_scored = self.first_scored if self.first_scored < self.num_scored_tokens else None

    @property
    def num_tokens(self) -> int:
        """Tokens known or being sampled."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_scored_tokens(self) -> int:
        """Tokens of the request's prompt, the one that is scored and not run included."""
        return self.num_prompt_tokens + (self.scored_next is not None)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens known so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_ahead(self) -> int:
        """Tokens that can be computed now: those known or being sampled, but for the one all followers share."""
        return self.num_tokens - bool(self.followers)

    @property
    def num_cacheable_tokens(self) -> int:
        """Most tokens that may come from the prefix cache as they are: the last one is run for its logits, and so is
        the one before the first that is scored.
        """
        known = len(self.token_ids)
        return (known if self.next_scored is None else min(known, self.next_scored)) - 1

    def add_prompt_logprobs(self, first: int, scored: LogprobColumns) -> None:
        """Take the log-probabilities of prompt tokens from `first` on; those that are known already are passed over,
        and so are tokens that were not asked for.
        """
        if self.prompt_logprobs is None or self.next_scored is None:
            return
        assert first <= self.next_scored
        new = scored.take(slice(self.next_scored - first, None), self.request.params.prompt_logprobs)
        self.prompt_logprobs.extend(new)
        self.next_scored += len(new)
        if self.next_scored >= self.num_scored_tokens:
            self.next_scored = None

    def drop_output(self, num_output_tokens: int) -> None:
        """Keep only that many output tokens, and their log-probabilities."""
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        if self.logprobs is not None:
            self.logprobs = self.logprobs.take(slice(num_output_tokens))

    def branch(self, seq_id: int) -> Self:
        """Another beam with the same tokens, which has nothing stored."""
        child = type(self)(
            seq_id,
            self.request,
            self.max_output_tokens,
            banned_until_min_tokens=self.banned_until_min_tokens,
            bad_words=self.bad_words,
            adapter_digest=self.adapter_digest,
            num_candidates=self.num_candidates,
        )
        child.token_ids = self.token_ids.copy()
        child.num_cached_tokens = self.num_cached_tokens
        child.prompt_logprobs, child.next_scored = self.prompt_logprobs, None
        return child

    def describe(self) -> NewSequence:
        """The whole sequence as a runner needs it; the token list is a copy, both sides append to their own."""
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.request.params,
            noise_key=self.request.noise_key,
            sample=self.sample,
            banned_until_min_tokens=self.banned_until_min_tokens,
            bad_words=self.bad_words,
            score_from=self.next_scored,
            carried=self.carried,
            num_candidates=self.num_candidates,
            scored_next=self.scored_next,
        )
