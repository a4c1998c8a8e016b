"""What travels between scheduler and runner: one object down, one up. Plain data, no torch.

A batch can be pickled, printed and built by hand in a test. Runners keep per-sequence state (tokens, block table), so a
sequence is described whole once (`NewSequence`) and by differences afterwards (`ScheduledSequence.new_block_ids`).
Batches are executed strictly in order; that is what lets a block be reused as soon as its sequence is finished, and
lets a sequence hit a block that an earlier sequence of the *same* batch fills (every layer stores keys and values of
the whole batch before it attends).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paged_infer.types import Logprobs, RowError, SamplingParams


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities of consecutive positions while they are collected; the columns are those of `Logprobs`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, other: LogprobColumns) -> None:
        """Append the positions of `other`."""
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.top_token_ids += other.top_token_ids
        self.top_logprobs += other.top_logprobs

    def take(self, positions: slice, k: int | None = None) -> LogprobColumns:
        """Some of the positions, with the `k` likeliest tokens of each, or all that are there."""
        return LogprobColumns(
            self.token_ids[positions],
            self.logprobs[positions],
            self.ranks[positions],
            [ids[:k] for ids in self.top_token_ids[positions]],
            [values[:k] for values in self.top_logprobs[positions]],
        )

    def frozen(self) -> Logprobs:
        """As the result holds them."""
        return Logprobs(self.token_ids, self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the runner has not seen, or has forgotten (it was preempted and comes back).

    Attributes:
        seq_id: unique in the run.
        token_ids: all tokens so far, prompt first; a resumed sequence brings its outputs along.
        num_prompt_tokens: how many of them are prompt; output position = len(token_ids) - num_prompt_tokens.
        params: sampling options.
        noise_key: 64-bit key of the sequence's noise; `sample` is the second counter word.
        banned_until_min_tokens: ids masked while fewer than `params.min_tokens` tokens are out.
        bad_words: token sequences that must not be completed; of each, the last token is masked where the others stand.
        score_from: first prompt token whose log-probability is still wanted, at least 1; None = of none.
        carried: the hidden state (float32, as bytes) after the last token that comes from the cache, where the token
            that follows it is to be scored.
        num_candidates: for a beam, how many of the likeliest next tokens are wanted; nothing is drawn or appended then.
        scored_next: a token that is scored as though it followed the prompt, and is not run; None = none.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: int
    sample: int = 0
    banned_until_min_tokens: tuple[int, ...] = ()
    bad_words: Sequence[Sequence[int]] = ()
    score_from: int | None = None
    carried: bytes | None = None
    num_candidates: int = 0
    scored_next: int | None = None


@dataclass(slots=True)  # hundreds are made in each step, and a frozen one takes five times as long
class ScheduledSequence:
    """Work for one sequence in this step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    Attributes:
        new_block_ids: appended to the runner's block table of the sequence (all of them for a `NewSequence`), of which
            only the blocks with computed tokens count: others had nothing but drafts that failed. Where the table is
            not empty and the first of them is a destination in `block_copies`, it replaces the table's last
            block, which was shared (copy-on-write).
        samples: True when the last scheduled token is the last one known, so that its logits yield the next token.
            The runner appends that token to its own state: a later batch may run it before the scheduler knows it.
        new_token_ids: tokens of a beam that the runner does not know yet.
        draft_token_ids: guesses that follow the last known token, the last of the `num_scheduled_tokens`. Each of their
            positions is sampled, too; tokens count up to and including the first that differs from the draft.
    """

    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[int]
    samples: bool
    new_token_ids: Sequence[int] = ()
    draft_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class ScheduledBatch:
    """One step. Order of effects: forget `finished_ids`, add `new`, copy blocks, run `scheduled`.

    `finished_ids` names the sequences that the runner can forget: finished ones, and preempted ones, which come back as
    `new`.
    """

    step: int
    new: list[NewSequence] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    finished_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens run through the model in this step."""
        return sum(s.num_scheduled_tokens for s in self.scheduled)


@dataclass(slots=True)
class StepOutput:
    """What a step produced for each scheduled sequence with `samples`, in the batch's order.

    Attributes:
        seq_ids: the sequences; token_ids: the next tokens of each, at least one unless it is a beam.
        candidates: seq_id → of a beam, the likeliest next tokens and their log-probabilities after masks and
            penalties, falling, ties by id.
        errors: seq_id → why nothing could be sampled for it; it has no tokens.
        logprobs: seq_id → those of its tokens, where asked for.
        prompt_logprobs: seq_id → (position of the first, those of the prompt tokens scored in this step), whether it
            `samples` or not.
        prompt_hidden: seq_id → position → the hidden state (float32, as bytes) that the next token was scored from;
            of the last positions of blocks.
    """

    step: int
    seq_ids: list[int]
    token_ids: list[list[int]]
    candidates: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
    logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, LogprobColumns]] = field(default_factory=dict)
    prompt_hidden: dict[int, dict[int, bytes]] = field(default_factory=dict)
