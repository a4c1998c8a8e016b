"""Stand-ins that let everything above the model be tested in milliseconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from paged_infer.engine.batch import NewSequence, ScheduledBatch, StepOutput
from paged_infer.types import RowError

_START = 0x5EED


def digest(parent: int, token: int) -> int:
    """Digest of all tokens up to `token`, given that of the tokens before it."""
    return hash((parent, token))


def fake_outputs(
    prompt: Sequence[int],
    max_tokens: int,
    vocab_size: int,
    eos_token_id: int | None = None,
    eos_probability: float = 0.0,
    banned: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What `FakeRunner` generates for a prompt, alone and without any machinery: up to `max_tokens`, EOS included."""
    history = _START
    for token in prompt:
        history = digest(history, token)
    out: list[int] = []
    while len(out) < max_tokens and (not out or out[-1] != eos_token_id):
        ban = banned if len(out) < min_tokens else ()
        out.append(_next_token(history, vocab_size, eos_token_id, eos_probability, ban))
        history = digest(history, out[-1])
    return out


def _next_token(history: int, vocab_size: int, eos: int | None, eos_probability: float, banned: Collection[int]) -> int:
    draw = digest(history, -1) & 0xFFFFFFFF
    token = draw % vocab_size
    if eos is not None:
        token = eos if digest(history, -2) & 0xFFFF < eos_probability * 0x10000 else (eos + 1 + draw % (vocab_size - 1))
    while token % vocab_size in banned:
        token += 1
    return token % vocab_size


@dataclass
class _State:
    new: NewSequence
    token_ids: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.digests.append(digest(self.digests[-1] if self.digests else _START, token))

    def with_draft(self, draft: Sequence[int]) -> list[int]:
        """The digests of all tokens and of the guesses after them."""
        digests = self.digests.copy()
        for token in draft:
            digests.append(digest(digests[-1], token))
        return digests


class FakeRunner:
    """A runner without a model, which checks every batch it gets.

    It keeps per-sequence state as `engine/batch.py` describes. Its KV cache maps a slot to the digest of all tokens up
    to the one stored there, and whenever a token is run, the whole context is read back through the block table and
    must be the digests of that sequence's own tokens. A wrong prefix hit, a block with two owners, a stale block or a
    missing copy raises AssertionError, as does a batch over the limits.

    The next token is a function of all tokens so far (`fake_outputs` is the same without the machinery).

    Args:
        depth: batches that may be in flight. They are executed when submitted.
        scripted: seq_id → output tokens to produce instead.
        eos_token_id, eos_probability: produce EOS with that chance; without it, never.
        delay: seconds that each step takes.
        error_seq_ids: sequences whose logits are "not finite" whenever they are sampled.
        max_num_batched_tokens, max_num_seqs: limits that no batch may exceed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        depth: int = 1,
        *,
        scripted: Mapping[int, Sequence[int]] | None = None,
        eos_token_id: int | None = None,
        eos_probability: float = 0.0,
        delay: float = 0.0,
        error_seq_ids: Collection[int] = (),
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.depth = depth
        self.scripted = scripted or {}
        self.eos_token_id = eos_token_id
        self.eos_probability = eos_probability
        self.delay = delay
        self.error_seq_ids = error_seq_ids
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.batches: list[ScheduledBatch] = []
        self.closed = False
        self._kv: list[int | None] = [None] * (num_blocks * block_size)
        self._states: dict[int, _State] = {}
        self._outputs: deque[StepOutput] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        assert not self.closed
        assert len(self._outputs) < self.depth, "more batches in flight than the runner's depth"
        assert not self.batches or batch.step == self.batches[-1].step + 1
        assert batch.scheduled, "an empty batch"
        self.batches.append(batch)
        self._check_limits(batch)
        for seq_id in batch.finished_ids:
            del self._states[seq_id]
        for new in batch.new:
            assert new.seq_id not in self._states, "a sequence introduced twice"
            assert all(0 <= token < self.vocab_size for token in new.token_ids)
            self._states[new.seq_id] = state = _State(new)
            for token in new.token_ids:
                state.append(token)
        for source, destination in batch.block_copies:
            a, b, n = source * self.block_size, destination * self.block_size, self.block_size
            self._kv[b : b + n] = self._kv[a : a + n]
        self._extend_tables(batch)
        self._store(batch)
        self._attend(batch)
        self._outputs.append(self._sample(batch))

    def collect(self) -> StepOutput:
        if self.delay:
            time.sleep(self.delay)
        return self._outputs.popleft()

    def close(self) -> None:
        self.closed = True

    def _check_limits(self, batch: ScheduledBatch) -> None:
        ids = [s.seq_id for s in batch.scheduled]
        assert len(set(ids)) == len(ids), "a sequence twice in one batch"
        assert all(s.num_scheduled_tokens > 0 for s in batch.scheduled)
        if self.max_num_batched_tokens is not None:
            assert batch.num_tokens <= self.max_num_batched_tokens, "over the token budget"
        if self.max_num_seqs is not None:
            assert len(ids) <= self.max_num_seqs

    def _extend_tables(self, batch: ScheduledBatch) -> None:
        copies = {destination for _, destination in batch.block_copies}
        for s in batch.scheduled:
            state = self._states[s.seq_id]
            del state.block_table[-(-s.num_computed_tokens // self.block_size) :]  # held drafts that failed
            if state.block_table and s.new_block_ids and s.new_block_ids[0] in copies:
                state.block_table.pop()
            state.block_table += s.new_block_ids
            end = s.num_computed_tokens + s.num_scheduled_tokens
            assert len(state.block_table) == -(-end // self.block_size), "block table does not fit the tokens"
            assert all(0 <= block < self.num_blocks for block in state.block_table)
            known = len(state.token_ids) + len(s.draft_token_ids)
            assert end <= known, "a token scheduled that does not exist"
            assert s.samples == (end == known), "samples: the last known token and no other"
            assert s.samples or not s.draft_token_ids

    def _slot(self, state: _State, position: int) -> int:
        return state.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _store(self, batch: ScheduledBatch) -> None:
        written: set[int] = set()
        for s in batch.scheduled:
            state = self._states[s.seq_id]
            digests = state.with_draft(s.draft_token_ids)
            for position in range(s.num_computed_tokens, s.num_computed_tokens + s.num_scheduled_tokens):
                slot = self._slot(state, position)
                assert slot not in written, "two sequences write to one slot in one batch"
                written.add(slot)
                self._kv[slot] = digests[position]

    def _attend(self, batch: ScheduledBatch) -> None:
        size = self.block_size
        for s in batch.scheduled:
            state = self._states[s.seq_id]
            end = s.num_computed_tokens + s.num_scheduled_tokens
            seen: list[int | None] = []
            for block in state.block_table:
                seen += self._kv[block * size : (block + 1) * size]
            assert seen[:end] == state.with_draft(s.draft_token_ids)[:end], (
                f"sequence {s.seq_id} reads keys that are not its own"
            )

    def _sample(self, batch: ScheduledBatch) -> StepOutput:
        output = StepOutput(batch.step, [], [])
        for s in batch.scheduled:
            if not s.samples:
                continue
            state = self._states[s.seq_id]
            output.seq_ids.append(s.seq_id)
            output.token_ids.append([])
            if s.seq_id in self.error_seq_ids:
                output.errors[s.seq_id] = RowError("non_finite_logits", "the logits are not finite")
                state.append(0)
                continue
            for guess in (*s.draft_token_ids, None):
                output.token_ids[-1].append(self._choose(state))
                state.append(output.token_ids[-1][-1])
                if state.token_ids[-1] != guess:
                    break
        return output

    def _choose(self, state: _State) -> int:
        position = len(state.token_ids) - state.new.num_prompt_tokens
        if state.new.seq_id in self.scripted:
            return self.scripted[state.new.seq_id][position]
        banned = state.new.banned_until_min_tokens if position < state.new.params.min_tokens else ()
        return _next_token(state.digests[-1], self.vocab_size, self.eos_token_id, self.eos_probability, banned)
