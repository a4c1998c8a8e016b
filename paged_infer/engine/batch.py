"""What travels between scheduler and runner: one object down, one up. Plain data, no torch.

A batch can be pickled, printed and built by hand in a test. Runners keep per-sequence state (tokens, block table), so a
sequence is described whole once (`NewSequence`) and by differences afterwards (`ScheduledSequence.new_block_ids`).
Batches are executed strictly in order; that is what lets a block be reused as soon as its sequence is finished, and
lets a sequence hit a block that an earlier sequence of the *same* batch fills (every layer stores keys and values of
the whole batch before it attends).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_infer.types import SamplingParams


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
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: int
    sample: int = 0
    banned_until_min_tokens: tuple[int, ...] = ()


@dataclass(slots=True)  # hundreds are made in each step, and a frozen one takes five times as long
class ScheduledSequence:
    """Work for one sequence in this step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    Attributes:
        new_block_ids: appended to the runner's block table of the sequence (all of them for a `NewSequence`). Where the
            table is not empty and the first of them is a destination in `block_copies`, it replaces the table's last
            block, which was shared (copy-on-write).
        samples: True when the last scheduled token is the last one known, so that its logits yield the next token.
            The runner appends that token to its own state: a later batch may run it before the scheduler knows it.
    """

    seq_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[int]
    samples: bool


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
    """What a step produced: one token for each scheduled sequence with `samples`, in the batch's order.

    Attributes:
        seq_ids, token_ids: parallel lists.
        errors: seq_id → message, for rows whose logits were not finite; their token id is -1.
    """

    step: int
    seq_ids: list[int]
    token_ids: list[int]
    errors: dict[int, str] = field(default_factory=dict)
