"""Which row goes next: the admission order of an engine that sees its prompts ahead. Pure Python."""

from __future__ import annotations

import struct
from bisect import insort
from collections import deque
from typing import Literal

from paged_infer.engine.sequence import Sequence, Status

_SORTED_TOKENS = 2048
"""Tokens of a prompt that take part in the sorting of a group; rows equal so far keep their input order."""


class WaitingQueue:
    """Rows waiting to run. Preempted ones come first, the oldest of them first; then the others by `order`.

    `input`: as they came. `auto`: the next `window` rows are ordered as a whole and handed out until none is left; then
    the next window is taken from what has arrived meanwhile. So a row is passed over by rows of its own window only,
    and the cost is one sort per window. The order within a window:

    1. Rows fall into classes by `max_output_tokens`, one for each power of two, the long ones first: the last rows to
       start are short ones, so that the job does not end with one long row in an otherwise empty batch.
    2. Within a class, rows with the same first block form a group (same salt and adapter, too), and groups stay
       together, so that a shared prefix is still in the cache when the next row asks for it. Groups go by their longest
       output.
    3. Within a group, rows go by their token ids: whatever shares a longer prefix is adjacent.

    A group that spans classes pays for its prefix at most once per class.

    Args:
        window: rows ordered at a time.
        block_size: the shortest prefix that can be shared; None where there is no prefix cache, so that only outputs
            count.
    """

    def __init__(
        self, order: Literal["auto", "input"] = "auto", window: int = 4096, block_size: int | None = 16
    ) -> None:
        self._window = window if order == "auto" else 0
        self._block_size = block_size
        self._preempted: list[Sequence] = []
        self._ordered: deque[Sequence] = deque()
        self._arrived: deque[Sequence] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, seq: Sequence) -> None:
        """Append a row."""
        self._arrived.append(seq)
        self._length += 1

    def add_preempted(self, seq: Sequence) -> None:
        """Put back a sequence that was running."""
        insort(self._preempted, seq, key=lambda s: s.age)
        self._length += 1

    def discard(self, seq: Sequence) -> None:
        """Forget a waiting sequence. Its status must be FINISHED: that is what later makes `peek` drop it."""
        assert seq.status is Status.FINISHED
        self._length -= 1

    def peek(self) -> Sequence | None:
        """The next sequence, which stays in the queue; None when it is empty."""
        queue = self._queue()
        return queue[0] if queue else None

    def pop(self) -> Sequence:
        """Remove and return the next sequence; raises IndexError when the queue is empty."""
        queue = self._queue()
        seq = queue[0]
        del queue[0]
        self._length -= 1
        return seq

    def _queue(self) -> list[Sequence] | deque[Sequence]:
        """The part of the queue that holds the next sequence, cleared of finished ones; empty when all parts are."""
        if _first_waiting(self._preempted):
            return self._preempted
        if not self._window:
            _first_waiting(self._arrived)
            return self._arrived
        while not _first_waiting(self._ordered) and self._arrived:
            take = min(self._window, len(self._arrived))
            self._ordered.extend(self._sorted([self._arrived.popleft() for _ in range(take)]))
        return self._ordered

    def _sorted(self, rows: list[Sequence]) -> list[Sequence]:
        groups: dict[object, list[Sequence]] = {}
        for seq in rows:
            groups.setdefault(self._group(seq), []).append(seq)
        longest = {key: max(seq.max_output_tokens for seq in group) for key, group in groups.items()}
        ordered: list[Sequence] = []
        for key in sorted(groups, key=lambda key: -longest[key]):  # which sorts the classes, too
            group = groups[key]
            if len(group) > 1:
                group.sort(key=_packed)
            ordered += group
        return ordered

    def _group(self, seq: Sequence) -> object:
        """Equal for rows that stay together. A row that cannot share a block, which a token must follow, is alone."""
        if self._block_size is None or seq.num_prompt_tokens <= self._block_size:
            return seq.seq_id
        return (
            seq.max_output_tokens.bit_length(),
            seq.request.salt,
            seq.adapter_digest,
            tuple(seq.token_ids[: self._block_size]),
        )


def _first_waiting(queue: list[Sequence] | deque[Sequence]) -> bool:
    """Drop finished sequences from the front; whether any other is left."""
    while queue and queue[0].status is Status.FINISHED:
        del queue[0]
    return bool(queue)


def _packed(seq: Sequence) -> bytes:
    """Token ids as bytes that compare like the ids."""
    ids = seq.token_ids[:_SORTED_TOKENS]
    return struct.pack(f">{len(ids)}i", *ids)
