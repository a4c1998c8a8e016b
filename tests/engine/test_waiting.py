"""Admission order: who comes next, and what the order is worth in cached tokens and in steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence, Status
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.types import Request, SamplingParams
from tests.fakes import FakeRunner

VOCAB = 512


def row(seq_id: int, prompt: list[int], max_tokens: int = 16, salt: str = "") -> Sequence:
    return Sequence(seq_id, Request(seq_id, prompt, SamplingParams(), salt=salt), max_tokens)


def fill(queue: WaitingQueue, rows: list[Sequence]) -> None:
    for seq in rows:
        queue.add(seq)


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while queue.peek() is not None:
        ahead = queue.peek()
        assert queue.pop() is ahead
        order.append(ahead.seq_id)
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()
    return order


def test_input_order() -> None:
    queue = WaitingQueue("input")
    fill(queue, [row(i, [i % 3] * 40, max_tokens=1 + i * 7 % 50) for i in range(20)])
    assert drain(queue) == list(range(20))


@pytest.mark.parametrize("order", ["auto", "input"])
def test_preempted_rows_come_first_and_by_age(order: str) -> None:
    queue = WaitingQueue(order)  # type: ignore[arg-type]
    fill(queue, [row(i, [1, 2, 3]) for i in range(3)])
    for seq_id, age in ((10, 5), (11, 2), (12, 9)):
        seq = row(seq_id, [1])
        seq.age = age
        queue.add_preempted(seq)
    assert len(queue) == 6
    assert drain(queue) == [11, 10, 12, 0, 1, 2]


@pytest.mark.parametrize("order", ["auto", "input"])
def test_finished_rows_are_skipped(order: str) -> None:
    queue = WaitingQueue(order, window=4)  # type: ignore[arg-type]
    rows = [row(i, [1, 2, 3]) for i in range(12)]
    fill(queue, rows)
    preempted = row(99, [1])
    queue.add_preempted(preempted)
    queue.peek()
    for seq in (preempted, rows[0], rows[5], rows[6], rows[11]):
        seq.status = Status.FINISHED
        queue.discard(seq)
    assert len(queue) == 8
    assert drain(queue) == [1, 2, 3, 4, 7, 8, 9, 10]


def test_rows_with_a_shared_prefix_run_together() -> None:
    """Three prefixes interleaved; within each, rows that share more stand side by side."""
    stems = [[s] * 16 for s in (7, 8, 9)]
    branches = [[b] * 16 for b in (1, 2)]
    queue = WaitingQueue(block_size=16)
    prompts = [stems[i % 3] + branches[i // 3 % 2] + [i] for i in range(24)]
    fill(queue, [row(i, prompt) for i, prompt in enumerate(prompts)])
    order = drain(queue)
    assert sorted(order) == list(range(24))
    assert sum(prompts[a][:16] != prompts[b][:16] for a, b in pairwise(order)) == 2
    assert sum(prompts[a][:32] != prompts[b][:32] for a, b in pairwise(order)) == 5


def test_what_cannot_be_shared_is_no_group() -> None:
    """15 equal tokens are no block, and 16 of 16 leave none to share; a salt keeps equal prompts apart."""
    for prompt in ([3] * 15, [3] * 16):
        queue = WaitingQueue(block_size=16)
        fill(queue, [row(i, prompt, max_tokens=32 + i) for i in range(4)] + [row(4, [5] * 20, max_tokens=34)])
        assert drain(queue) == [3, 2, 4, 1, 0]
    queue = WaitingQueue(block_size=16)
    fill(queue, [row(i, [3] * 17, max_tokens=32 + i, salt="ab"[i % 2]) for i in range(4)])
    assert drain(queue) == [1, 3, 0, 2]


def test_long_outputs_start_early() -> None:
    lengths = [5, 300, 40, 7, 40, 256, 255, 8, 500]
    queue = WaitingQueue()
    fill(queue, [row(i, [i, 1, 2], max_tokens=n) for i, n in enumerate(lengths)])
    assert drain(queue) == [8, 1, 5, 6, 2, 4, 7, 3, 0]


def test_a_group_is_split_by_length_once_a_class() -> None:
    """A shared prefix does not make a short row start before a row twice as long."""
    stem = [1] * 16
    rows = [row(i, [*stem, i], max_tokens=n) for i, n in enumerate([10, 100, 12, 120])]
    rows.append(row(4, [2] * 20, max_tokens=64))
    queue = WaitingQueue()
    fill(queue, rows)
    assert drain(queue) == [1, 3, 4, 0, 2]


@pytest.mark.parametrize("window", [1, 2, 5, 16, 4096])
def test_a_row_is_passed_over_by_its_own_window_only(window: int) -> None:
    r = random.Random(window)
    queue = WaitingQueue(window=window, block_size=2)
    rows = [row(i, [r.randrange(3) for _ in range(r.randrange(1, 6))], r.randrange(1, 100)) for i in range(64)]
    fill(queue, rows)
    order = drain(queue)
    assert sorted(order) == list(range(64))
    for start in range(0, 64, window):
        assert set(order[start : start + window]) == set(range(start, min(start + window, 64)))
    if window > 1:
        assert order != list(range(64))


def test_rows_that_arrive_later_form_the_next_window() -> None:
    queue = WaitingQueue(window=100)
    fill(queue, [row(0, [1], 4), row(1, [2], 8)])
    assert queue.pop().seq_id == 1
    fill(queue, [row(2, [3], 50), row(3, [4], 100)])
    assert drain(queue) == [0, 3, 2]


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_a_window_by_its_definition(seed: int) -> None:
    """Against a brute-force reading of the docstring: repeatedly pick the best group that is left, row by row."""
    r = random.Random(seed)
    stems = [[r.randrange(2) for _ in range(4)] for _ in range(3)]
    rows = [
        row(
            i,
            r.choice(stems)[: r.randrange(5)] + [r.randrange(2) for _ in range(r.randrange(1, 4))],
            r.randrange(1, 40),
        )
        for i in range(40)
    ]
    queue = WaitingQueue(block_size=4)
    fill(queue, rows)

    def mates(seq: Sequence) -> list[Sequence]:
        if seq.num_prompt_tokens <= 4:
            return [seq]
        return [
            other
            for other in rows
            if other.num_prompt_tokens > 4
            and other.token_ids[:4] == seq.token_ids[:4]
            and other.max_output_tokens.bit_length() == seq.max_output_tokens.bit_length()
        ]

    left, expected = list(rows), []
    while left:
        best = max(left, key=lambda seq: max(mate.max_output_tokens for mate in mates(seq)))  # the first of equals
        group = sorted(mates(best), key=lambda seq: seq.token_ids)
        expected += [seq.seq_id for seq in group]
        left = [seq for seq in left if seq not in group]
    assert drain(queue) == expected


# --- What the order is worth ------------------------------------------------------------------------------------------


def run(order: str, rows: list[Sequence], *, num_blocks: int, max_num_seqs: int, block_size: int = 16) -> Scheduler:
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size),
        WaitingQueue(order, block_size=block_size),  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
    )
    runner = FakeRunner(num_blocks, block_size, VOCAB)
    for seq in rows:
        scheduler.add(seq)
    while (batch := scheduler.schedule()) is not None:
        runner.submit(batch)
        for seq, _ in scheduler.update(runner.collect()):
            if seq.num_output_tokens == seq.max_output_tokens:
                scheduler.finish(seq)
    assert not scheduler.has_work
    return scheduler


def test_shared_prefixes_in_a_pool_that_holds_few_of_them() -> None:
    """8 prefixes of 4 blocks, 5 rows each, interleaved; 16 blocks hold at most 3 prefixes beside the running row.

    In input order a prefix comes back after 7 others, when it is long evicted: no hit at all. In `auto` order each is
    computed once, and the other 4 rows of it find all its 64 tokens.
    """
    r = random.Random(0)
    stems = [[r.randrange(VOCAB) for _ in range(64)] for _ in range(8)]
    cached = {}
    for order in ("input", "auto"):
        rows = [row(i, stems[i % 8] + [i, 1, 2], max_tokens=3) for i in range(40)]
        stats = run(order, rows, num_blocks=16, max_num_seqs=1).stats
        cached[order] = stats.num_cached_tokens
        assert stats.num_scheduled_tokens == 40 * (67 + 2) - cached[order]
    assert cached == {"input": 0, "auto": 8 * 4 * 64}


def test_a_long_row_at_the_end_of_the_file() -> None:
    """24 rows of 4 tokens and, last, one of 32, four at a time, a token a step.

    In input order the short ones take 24 / 4 * 4 = 24 steps and the long one 32 more, alone. In `auto` order the long
    one has a slot for itself from the start and the three others do 24 * 4 / 3 = 32 steps beside it.
    """
    steps = {}
    for order in ("input", "auto"):
        rows = [row(i, [i, 1], max_tokens=4) for i in range(24)] + [row(24, [24, 1], max_tokens=32)]
        steps[order] = run(order, rows, num_blocks=64, max_num_seqs=4).stats.num_steps
    assert steps == {"input": 24 + 32, "auto": 32}
