"""A small model that guesses for a large one: the same rows, a cache of its own, the same noise.

Every round, it is brought up to date with what the large model has accepted and draws a few tokens more, for all
sequences together. It draws as the large model would, with each row's own options and the noise of each position, so
that the two agree wherever both distributions and the noise put the same token first.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from paged_infer.engine.batch import ScheduledBatch, ScheduledSequence
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.runner import Runner
from paged_infer.engine.sequence import Sequence


class DraftModelProposer:
    """Guesses by running a model.

    A sequence has a shadow here, which owns blocks of the draft model's cache; what the large model rejected of it is
    forgotten. Where the cache has no room, the sequences that were not asked about for the longest time lose theirs.

    Args:
        runner: the draft model.
        blocks: of its cache.
        max_num_batched_tokens: most tokens it runs at once.
        max_model_len: most tokens of a sequence; there are no guesses beyond.
        vocab_size: there are no guesses for sequences with ids from here on.
    """

    def __init__(
        self,
        runner: Runner,
        blocks: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._runner = runner
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._shadows: dict[int, Sequence] = {}  # the least recently used first
        self._gone: list[int] = []  # known to the runner, and of no use
        self._step = 0

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        shadows = [self._shadow(seq) for seq, _ in wanted]
        lengths = [len(shadow.token_ids) for shadow in shadows]
        goals = {
            shadow: length + most
            for shadow, length, (_, most) in zip(shadows, lengths, wanted, strict=True)
            if most > 0 and max(shadow.token_ids) < self._vocab_size
        }
        running = [shadow for shadow, goal in goals.items() if self._make_room(shadow, goal - 1, goals)]
        while running:
            failed = self._run(running)
            running = [s for s in running if len(s.token_ids) < goals[s] and s.seq_id not in failed]
        for shadow in shadows:
            self._tell(shadow)
        return [shadow.token_ids[length:] for shadow, length in zip(shadows, lengths, strict=True)]

    def forget(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.seq_id, None)
        if shadow is not None:
            self._drop(shadow)

    def _drop(self, shadow: Sequence) -> None:
        self._blocks.free(shadow)
        self._tell(shadow)

    def _tell(self, shadow: Sequence) -> None:
        """The runner must not go on from what it knows of a sequence."""
        if shadow.num_told:
            self._gone.append(shadow.seq_id)
            shadow.num_told = 0

    def _shadow(self, seq: Sequence) -> Sequence:
        """The shadow of `seq` with its tokens, computed as far as they are those it had before."""
        shadow = self._shadows.pop(seq.seq_id, None)
        if shadow is None:
            params = replace(seq.request.params, logprobs=None, prompt_logprobs=None)
            shadow = Sequence(
                seq.seq_id,
                replace(seq.request, params=params),
                seq.max_output_tokens,
                seq.sample,
                banned_until_min_tokens=seq.banned_until_min_tokens,
                bad_words=seq.bad_words,
            )
        most = min(shadow.num_computed_tokens, len(seq.token_ids) - 1)
        same = min(most, seq.num_prompt_tokens)
        while same < most and shadow.token_ids[same] == seq.token_ids[same]:
            same += 1
        shadow.num_computed_tokens = same
        shadow.token_ids = seq.token_ids.copy()
        self._blocks.trim(shadow)
        self._shadows[seq.seq_id] = shadow
        return shadow

    def _make_room(self, shadow: Sequence, num_tokens: int, kept: dict[Sequence, int]) -> bool:
        """Give `shadow` the blocks for so many tokens, if need be those of sequences that are not in `kept`."""
        if num_tokens >= self._max_model_len:
            return False
        missing = num_tokens - shadow.num_computed_tokens
        for other in [other for other in self._shadows.values() if other not in kept]:
            if self._blocks.num_new_blocks(shadow, missing) <= self._blocks.num_free_blocks:
                break
            del self._shadows[other.seq_id]
            self._drop(other)
        return self._blocks.allocate_slots(shadow, missing) is not None

    def _run(self, shadows: list[Sequence]) -> set[int]:
        """One step of those that fit the budget; the ids of those that nothing could be drawn for."""
        batch = ScheduledBatch(self._step, finished_ids=self._gone)
        self._gone = []
        self._step += 1
        budget = self._max_num_batched_tokens
        for shadow in shadows:
            num_tokens = min(budget, len(shadow.token_ids) - shadow.num_computed_tokens)
            if num_tokens == 0:
                break
            new_block_ids: list[int] = []
            if not shadow.num_told:
                batch.new.append(shadow.describe())
                shadow.num_told = len(shadow.token_ids)
                new_block_ids = shadow.block_table.copy()
            start = shadow.num_computed_tokens
            shadow.num_computed_tokens += num_tokens
            samples = shadow.num_computed_tokens == len(shadow.token_ids)
            batch.scheduled.append(ScheduledSequence(shadow.seq_id, start, num_tokens, new_block_ids, samples))
            budget -= num_tokens
        self._runner.submit(batch)
        output = self._runner.collect()
        for seq_id, tokens in zip(output.seq_ids, output.token_ids, strict=True):
            self._shadows[seq_id].token_ids += tokens
        return set(output.errors)
