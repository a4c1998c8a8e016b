"""Which tokens run next. Pure Python; owns the life of every sequence, knows nothing of tensors, text or files.

There are no phases. A sequence has to catch up `num_computed_tokens` with `num_tokens`, and every step hands out one
token budget to that end. Prefill, chunked prefill, prefix hits, decoding and resumption after a preemption are the same
subtraction.

Several batches may be in flight. They are executed in order, so the scheduler plans as though all of them were done:
counters advance when tokens are scheduled, a decode may have an input token that is still being sampled
(`num_pending`), and blocks are reused as soon as their sequence is out. A sequence that turns out to have ended drops
what was sampled for it too late.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from paged_infer.engine.batch import ScheduledBatch, ScheduledSequence, StepOutput
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.sequence import Sequence, Status
from paged_infer.engine.speculative import Speculator
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.types import RowError

_GROWTH_BLOCKS = 2
"""Blocks kept free for each running sequence when others are admitted."""

PREFIX_MARK_TOKENS = 128
"""Of a sequence's blocks, one in so many tokens is compared when shared prefixes are looked for."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters of a run.

    Attributes:
        num_steps: batches scheduled. num_scheduled_tokens: tokens in them.
        num_prompt_tokens: prompt tokens of admitted sequences; num_cached_tokens: of those, found in the prefix cache.
        num_preemptions: sequences put back. num_recomputed_tokens: computed again because of that.
        num_discarded_tokens: sampled for sequences that had ended meanwhile.
        max_running: most sequences running at once.
        stored_tokens, used_slots: sums over the steps of the tokens that running sequences have stored and of the token
            slots in blocks in use (a block in a shared prefix counts once).
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: int = 0
    max_running: int = 0
    stored_tokens: int = 0
    used_slots: int = 0

    @property
    def kv_utilisation(self) -> float:
        """Share of the slots in use that hold a token, over all steps; 1 minus this is waste in last blocks."""
        return self.stored_tokens / self.used_slots if self.used_slots else 1.0


@dataclass(slots=True)
class _Plan:
    """A batch on its way, with those of its sequences that get tokens and those whose prompts are scored."""

    batch: ScheduledBatch
    sampled: list[Sequence] = field(default_factory=list)
    scored: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one KV pool.

    Each step serves running sequences first: decodes, then what is left of prompts, the oldest first. What remains of
    the budget admits waiting sequences. No more sequences run than the budget has tokens, so a decode never misses a
    step for lack of budget, however long the prompts beside it.

    Why nothing hangs: a sequence is accepted only if it fits the empty pool; the oldest running one is never preempted
    and computes at least one token in every step it is not waiting for its own sample; age survives preemption; and
    nobody is admitted before a preempted sequence. So the oldest always finishes, and there is always an oldest.

    Samples of a request start as forks of the first, once all of its prompt but the last token is stored; from there on
    they are sequences like others. Beams of a request advance together, so they are preempted together, their places
    among `max_num_seqs` are kept from the start, and all of them must fit the empty pool; else two searches could wait
    for each other.

    Args:
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens in a batch.
        chunked_prefill: split prompts over steps. Where it is off, a prompt is computed in one step; only a preempted
            sequence that has outgrown the budget is still resumed in chunks.
        max_in_flight: batches scheduled and not yet updated; `schedule` returns None beyond that.
        num_micro_batches: more than 1 where the runner is a pipeline: running sequences are spread over so many
            batches, and none goes on before its last token is known, since the first stage could not run it.
        speculator: lets decodes run guesses at their next tokens, with what budget and blocks nobody else needs.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        waiting: WaitingQueue,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        max_in_flight: int = 1,
        num_micro_batches: int = 1,
        speculator: Speculator | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.waiting = waiting
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.max_in_flight = max_in_flight
        self.num_micro_batches = num_micro_batches
        self.speculator = speculator
        self.stats = SchedulerStats()
        self._running: list[Sequence] = []  # by age
        self._in_flight: deque[_Plan] = deque()
        self._forget: list[int] = []  # known to the runner, and out
        self._step = 0
        self._next_age = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Batches scheduled and not yet updated."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running or len(self.waiting))

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises `RowError`: `kv_cache_too_small` where the pool could not hold it even alone, `prompt_too_long` where
        chunked prefill is off and the prompt exceeds the token budget.
        """
        blocks = self.block_manager
        beams = seq.request.params.beam_width if seq.num_candidates else 1
        needed = blocks.num_blocks_for(seq.max_kv_tokens) * beams
        if beams > self.max_num_seqs:
            raise RowError(
                "invalid_parameter",
                f"beam_width={beams}: only {self.max_num_seqs} sequences run at once; raise max_num_seqs",
                "beam_width",
            )
        if needed > blocks.num_blocks:
            raise RowError(
                "kv_cache_too_small",
                f"{seq.num_prompt_tokens} prompt tokens and {seq.max_output_tokens} output tokens need {needed} KV "
                f"blocks of {blocks.block_size} tokens, {blocks.num_blocks} are available: raise num_kv_blocks",
            )
        if not self.chunked_prefill and seq.num_prompt_tokens > self.max_num_batched_tokens:
            raise RowError(
                "prompt_too_long",
                f"{seq.num_prompt_tokens} prompt tokens exceed the {self.max_num_batched_tokens} tokens of a step: "
                "turn chunked_prefill on or raise max_num_batched_tokens",
            )
        self.waiting.add(seq)

    def schedule(self) -> ScheduledBatch | None:
        """The next batch; None where nothing can run before an earlier batch is updated, or at all."""
        if len(self._in_flight) >= self.max_in_flight:
            return None
        plan = _Plan(ScheduledBatch(self._step))
        for leader in [seq for seq in self._running if seq.followers and not seq.num_ahead - seq.num_computed_tokens]:
            self._fork(leader)
        decodes, prefills = self._make_room()
        decodes.sort(key=self._prefix_marks)
        budget = self.max_num_batched_tokens - len(decodes)
        if self.speculator is None or not decodes:
            for seq in decodes:
                self._run(seq, 1, plan)
        else:
            budget -= self._run_with_drafts(decodes, prefills, budget, plan)
        for seq in prefills:
            num_tokens = min(budget, seq.num_ahead - seq.num_computed_tokens, self._num_free_slots(seq))
            if num_tokens > 0:
                self._run(seq, num_tokens, plan)
                budget -= num_tokens
        self._admit(budget, plan)
        batch = plan.batch
        if not batch.scheduled:
            return None
        batch.block_copies = self.block_manager.take_copies()
        batch.finished_ids, self._forget = self._forget, []
        self._step += 1
        self._in_flight.append(plan)
        self._count(batch)
        return batch

    def update(self, output: StepOutput) -> list[tuple[Sequence, list[int]]]:
        """Take the result of the oldest batch in flight; returns the sequences that were sampled and their new tokens.

        One in `output.errors` has none: the caller must `finish` it, as it must every sequence that has ended. Tokens
        of sequences that are finished already are dropped.
        """
        plan = self._in_flight.popleft()
        if plan.batch.step != output.step or [seq.seq_id for seq in plan.sampled] != output.seq_ids:
            raise RuntimeError(f"output of step {output.step} does not answer the batch of step {plan.batch.step}")
        for seq in plan.scored:
            if seq.seq_id in output.prompt_logprobs:
                seq.add_prompt_logprobs(*output.prompt_logprobs[seq.seq_id])
                self.block_manager.publish_scores(seq, output.prompt_hidden.get(seq.seq_id, {}))
        alive: list[tuple[Sequence, list[int]]] = []
        for seq, tokens in zip(plan.sampled, output.token_ids, strict=True):
            seq.num_pending -= not seq.num_candidates
            if seq.status is Status.FINISHED:
                self.stats.num_discarded_tokens += len(tokens)
                continue
            seq.token_ids += tokens
            if seq.num_drafts:
                self._settle(seq, len(tokens))
            if seq.logprobs is not None and tokens:
                seq.logprobs.extend(output.logprobs[seq.seq_id])
            if tokens and len(seq.token_ids) <= seq.num_computed_tokens:  # run before it was known
                self.block_manager.publish(seq)
            alive.append((seq, tokens))
        if self.speculator is not None and not self._in_flight:
            self.speculator.executed(plan.batch.num_tokens)
        return alive

    def _settle(self, seq: Sequence, num_tokens: int) -> None:
        """Of the drafts that `seq` ran, keep what turned out to be so: all but the last of its new tokens."""
        assert self.speculator is not None
        drafted, seq.num_drafts = seq.num_drafts, 0
        if num_tokens:
            self.speculator.accepted(seq, num_tokens - 1, drafted)
        if seq.status is Status.RUNNING:
            seq.num_computed_tokens -= drafted - max(0, num_tokens - 1)
            self.block_manager.trim(seq)
            self.block_manager.publish(seq)

    def branch(
        self, beams: SequenceOf[Sequence], chosen: SequenceOf[tuple[int, int]], new_ids: Iterator[int]
    ) -> list[Sequence]:
        """Let the beams of a request go on as (index of a beam, its next token); returns those there are now, in order.

        A beam chosen once just grows. One chosen more often is forked: its children share what it has stored, and copy
        the last block when they write to it. One not chosen is finished.
        """
        counts = Counter(index for index, _ in chosen)
        for index, seq in enumerate(beams):
            if index not in counts:
                self.finish(seq)
        children = {
            index: [beams[index], *(self._branch(beams[index], next(new_ids)) for _ in range(count - 1))]
            for index, count in counts.items()
        }
        following = [children[index].pop(0) for index, _ in chosen]
        for seq, (_, token) in zip(following, chosen, strict=True):
            seq.token_ids.append(token)
        return following

    def _branch(self, parent: Sequence, seq_id: int) -> Sequence:
        child = parent.branch(seq_id)
        child.age = self._next_age
        self._next_age += 1
        if parent.status is Status.RUNNING and len(self._running) < self.max_num_seqs:
            self.block_manager.fork(parent, child)
            child.status = Status.RUNNING
            self._running.append(child)
        else:
            self.waiting.add_preempted(child)
        return child

    def finish(self, seq: Sequence) -> None:
        """End a sequence, waiting or running; the runner hears of it in the next batch."""
        before, seq.status = seq.status, Status.FINISHED
        if before is Status.RUNNING:
            self._leave(seq)
        elif before is Status.WAITING:
            self.waiting.discard(seq)
        if self.speculator is not None and not seq.num_candidates:
            self.speculator.forget(seq)

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues, counters and blocks agree."""
        self.block_manager.check_invariants(self._running)
        assert all(seq.status is Status.RUNNING for seq in self._running)
        assert all(a.age < b.age for a, b in zip(self._running, self._running[1:], strict=False))
        assert len(self._running) <= self.max_num_seqs
        for seq in self._running:
            assert seq.num_computed_tokens <= seq.max_kv_tokens
            assert 0 <= seq.num_pending <= len(self._in_flight)

    def _make_room(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that can go on, as (decodes, prefills), after preempting until a block is there for each
        decode and for the oldest of all. Prefills take what is left of blocks and budget.

        All preemptions happen here, before anything is scheduled, so a batch never has to be taken back.
        """
        blocks = self.block_manager
        num_new_blocks = blocks.num_new_blocks
        is_pipeline = self.num_micro_batches > 1
        while True:
            most = -(-len(self._running) // self.num_micro_batches)
            decodes: list[Sequence] = []
            prefills: list[Sequence] = []
            needed = 0
            oldest: Sequence | None = None
            for seq in self._running:
                num_tokens = len(seq.token_ids) + seq.num_pending
                if num_tokens > seq.max_kv_tokens:
                    continue  # its last token is being sampled
                if is_pipeline and seq.num_pending:
                    oldest = oldest or seq
                    continue
                if num_tokens - seq.num_computed_tokens == 1:
                    if len(decodes) == most:
                        continue
                    decodes.append(seq)
                    needed += num_new_blocks(seq, 1)
                else:
                    prefills.append(seq)
                    if oldest is None:
                        needed += num_new_blocks(seq, 1)
                if oldest is None:
                    oldest = seq
            if needed <= blocks.num_free_blocks:
                return decodes, prefills
            assert oldest is not None
            self._preempt(self._victim(oldest))

    def _prefix_marks(self, seq: Sequence) -> list[int]:
        """Sorts sequences behind the same blocks next to each other, where attention reads those once: a block in
        every `PREFIX_MARK_TOKENS`, for one block stands for all before it."""
        return seq.block_table[:: max(1, PREFIX_MARK_TOKENS // self.block_manager.block_size)]

    def _run_with_drafts(self, decodes: list[Sequence], prefills: list[Sequence], budget: int, plan: _Plan) -> int:
        """Schedule decodes with guesses at what follows; returns how many tokens of the budget those took.

        A guess never takes a block that a decode or the oldest needs, nor makes anyone wait for budget: prompts that
        are under way or waiting go first.
        """
        assert self.speculator is not None
        blocks = self.block_manager
        ahead = sum(max(0, seq.num_ahead - seq.num_computed_tokens) for seq in prefills)
        idle = budget - ahead if not len(self.waiting) or len(self._running) >= self.max_num_seqs else 0
        guessing = [seq for seq in decodes if not seq.num_pending and not seq.num_candidates]
        drafts = dict(zip(guessing, self.speculator.drafts(guessing, ahead), strict=True)) if idle > 0 else {}
        spare = blocks.num_free_blocks - sum(blocks.num_new_blocks(seq, 1) for seq in decodes) - len(prefills)
        used = 0
        for seq in decodes:
            draft = drafts.get(seq, [])[: max(0, idle - used)]
            extra = blocks.num_new_blocks(seq, 1 + len(draft)) - blocks.num_new_blocks(seq, 1)
            if extra > spare:
                draft, extra = draft[: self._num_slots_left(seq) - 1], 0
            spare -= extra
            used += len(draft)
            self._run(seq, 1, plan, draft)
        return used

    def _num_slots_left(self, seq: Sequence) -> int:
        """Tokens that `seq` can store when it has the block for the next one."""
        size = self.block_manager.block_size
        return size - seq.num_computed_tokens % size

    def _victim(self, oldest: Sequence) -> Sequence:
        """The running sequence, other than `oldest`, that loses least: fewest tokens to compute again, the youngest
        among equals.

        Tokens in blocks that others use as well are not lost. Its other cached blocks count as lost: the pool is full,
        so they are the next to be handed out. A sequence with only shared blocks would give nothing back and is taken
        only when there is no other. One whose last token is being sampled loses nothing.
        """
        blocks = self.block_manager

        def loss(seq: Sequence) -> tuple[bool, int, int]:
            lost = seq.num_computed_tokens - blocks.num_shared_tokens(seq)
            if seq.num_tokens > seq.max_kv_tokens:
                lost = 0
            return not blocks.owns_blocks(seq), lost, -seq.age

        return min((seq for seq in self._running if not _together(seq, oldest)), key=loss)

    def _preempt(self, victim: Sequence) -> None:
        for seq in [seq for seq in self._running if _together(seq, victim)]:
            seq.num_lost_tokens = seq.num_computed_tokens
            self._leave(seq)
            seq.status = Status.WAITING
            self.waiting.add_preempted(seq)
            self.stats.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.block_manager.free(seq)
        if seq.num_told:
            self._forget.append(seq.seq_id)
            seq.num_told = 0

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """Start the leader's followers, which share all it has stored; each then runs the last prompt token itself.

        Returns those that now run. Those for which no place is left wait like preempted ones, and compute what they do
        not find cached.
        """
        followers, leader.followers = leader.followers, []
        running: list[Sequence] = []
        for seq in followers:
            seq.age = self._next_age
            self._next_age += 1
            seq.num_cached_tokens = leader.num_computed_tokens
            if len(self._running) < self.max_num_seqs:
                self.block_manager.fork(leader, seq)
                seq.status = Status.RUNNING
                self._running.append(seq)
                running.append(seq)
            else:
                self.waiting.add_preempted(seq)
        return running

    def _admit(self, budget: int, plan: _Plan) -> None:
        """Start waiting sequences, strictly in the queue's order, while budget, pool and `max_num_seqs` allow.

        A sequence is let in only if the free blocks hold all its known tokens beside a reserve for growth: room for the
        next `_GROWTH_BLOCKS` blocks of tokens of every running sequence, itself included, or for what it may still
        generate if that is less. With less, a newcomer would soon be preempted again and its prompt computed twice;
        with more, blocks lie idle. A sequence alone always passes, since `add` saw to it that it fits the pool.
        """
        if budget <= 0 or not len(self.waiting) or len(self._running) >= self.max_num_seqs:
            return
        places = self.max_num_seqs - self._num_places_taken()
        blocks = self.block_manager
        reserved = sum(map(self._num_reserved_blocks, self._running))
        while budget > 0 and len(self._running) < self.max_num_seqs:
            seq = self.waiting.peek()
            if seq is None or seq.num_pending:
                return  # a preempted sequence cannot go on before its last tokens are known
            if reserved >= blocks.num_free_blocks:
                return
            num_places = self._num_places_needed(seq)
            if num_places > places:
                return
            num_cached = blocks.match_prefix(seq)  # pinned: nothing below can take these blocks
            remaining = len(seq.token_ids) - num_cached
            fits = reserved + self._num_reserved_blocks(seq) <= blocks.num_free_blocks
            whole = self.chunked_prefill or remaining <= budget or remaining > self.max_num_batched_tokens
            if not fits or not whole:
                blocks.free(seq)
                return
            self.waiting.pop()
            self._enter(seq, num_cached)
            entered = [seq]
            if not seq.num_ahead - num_cached:
                entered += self._fork(seq)
            places -= num_places + len(entered) - 1
            num_tokens = min(budget, seq.num_ahead - num_cached)
            self._run(seq, num_tokens, plan)
            budget -= num_tokens
            reserved += sum(map(self._num_reserved_blocks, entered))

    def _num_places_taken(self) -> int:
        """Of `max_num_seqs`: one for each running sequence; for a beam search as many as it may come to have beams."""
        beams = {id(seq.request): seq.request.params.beam_width for seq in self._running if seq.num_candidates}
        return sum(beams.values()) + sum(not seq.num_candidates for seq in self._running)

    def _num_places_needed(self, seq: Sequence) -> int:
        if not seq.num_candidates:
            return 1
        kept = any(_together(seq, other) for other in self._running)
        return 0 if kept else seq.request.params.beam_width

    def _num_reserved_blocks(self, seq: Sequence) -> int:
        """Blocks that `seq` does not have and that are kept for it: for its known tokens, and some for its growth."""
        size = self.block_manager.block_size
        num_tokens = min(len(seq.token_ids) + seq.num_pending + _GROWTH_BLOCKS * size, seq.max_kv_tokens)
        return -(-num_tokens // size) - len(seq.block_table)

    def _enter(self, seq: Sequence, num_cached: int) -> None:
        if seq.age < 0:
            seq.age = self._next_age
            self._next_age += 1
            seq.num_cached_tokens = num_cached
            self.stats.num_prompt_tokens += seq.num_prompt_tokens
            self.stats.num_cached_tokens += num_cached
        else:
            self.stats.num_recomputed_tokens += max(0, seq.num_lost_tokens - num_cached)
            seq.num_lost_tokens = 0
        seq.status = Status.RUNNING
        insort(self._running, seq, key=lambda s: s.age)

    def _run(self, seq: Sequence, num_tokens: int, plan: _Plan, draft: SequenceOf[int] = ()) -> None:
        num_tokens += len(draft)
        self.block_manager.release_passed(seq)
        new_block_ids = self.block_manager.allocate_slots(seq, num_tokens)
        assert new_block_ids is not None, "scheduled more than the pool holds"
        new_token_ids: SequenceOf[int] = ()
        if not seq.num_told:  # the runner needs all of it, the blocks it shares included
            plan.batch.new.append(seq.describe())
            new_block_ids = seq.block_table.copy()
            seq.num_told = len(seq.token_ids)
        elif seq.num_candidates:
            new_token_ids = seq.token_ids[seq.num_told :]
            seq.num_told = len(seq.token_ids)
        start = seq.num_computed_tokens
        end = seq.num_computed_tokens = start + num_tokens
        samples = end == len(seq.token_ids) + seq.num_pending + len(draft)
        seq.num_drafts = len(draft)
        if samples:
            seq.num_pending += not seq.num_candidates
            plan.sampled.append(seq)
        if seq.next_scored is not None:
            plan.scored.append(seq)
        plan.batch.scheduled.append(
            ScheduledSequence(seq.seq_id, start, num_tokens, new_block_ids, samples, new_token_ids, draft)
        )
        if not draft and (num_tokens > 1 or end % self.block_manager.block_size == 0):
            self.block_manager.publish(seq)

    def _num_free_slots(self, seq: Sequence) -> int:
        blocks = self.block_manager
        return (len(seq.block_table) + blocks.num_free_blocks) * blocks.block_size - seq.num_computed_tokens

    def _count(self, batch: ScheduledBatch) -> None:
        stats, blocks = self.stats, self.block_manager
        stats.num_steps += 1
        stats.num_scheduled_tokens += batch.num_tokens
        stats.max_running = max(stats.max_running, len(self._running))
        used_slots = (blocks.num_blocks - blocks.num_free_blocks) * blocks.block_size
        stats.used_slots += used_slots
        stats.stored_tokens += used_slots - sum(
            len(seq.block_table) * blocks.block_size - seq.num_computed_tokens for seq in self._running
        )


def _together(a: Sequence, b: Sequence) -> bool:
    """Whether neither runs without the other: one and the same, or beams of one request."""
    return a is b or (a.num_candidates > 0 and a.request is b.request)
