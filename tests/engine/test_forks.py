"""Samples and beams over a runner that checks every key it reads: whatever is shared, forked, copied, put back."""

from __future__ import annotations

import itertools
import random

import pytest

from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.types import Request, RowError, SamplingParams
from tests.engine.test_scheduler import VOCAB, Job, tokens
from tests.fakes import FakeRunner, fake_outputs


def make_job(r: random.Random, num_blocks: int, block_size: int, slots: int, budget: int) -> Job:
    depth = r.choice([1, 1, 2])
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, r.random() < 0.7),
        WaitingQueue("input"),
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_in_flight=depth,
    )
    runner = FakeRunner(
        num_blocks, block_size, VOCAB, depth, max_num_batched_tokens=budget, max_num_seqs=min(slots, budget)
    )
    return Job(scheduler, runner)


def random_pool(r: random.Random, need: int) -> int:
    return need + r.choice([0, 1, 2, need, 4 * need])


@pytest.mark.parametrize("seed", range(80))
def test_samples_share_the_prompt_and_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(seed)
    monkeypatch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", r.choice([0, 2]))
    block_size = r.choice([1, 2, 4, 16])
    rows = [(tokens(r.randrange(1, 4 * block_size + 3), i), r.randrange(1, 6)) for i in range(6)]
    lengths = [[r.randrange(1, 20) for _ in range(n)] for _, n in rows]
    need = max(
        -(-(len(prompt) + max(longest)) // block_size) for (prompt, _), longest in zip(rows, lengths, strict=True)
    )
    job = make_job(r, random_pool(r, need), block_size, r.choice([1, 3, 16]), r.choice([2, 9, 40]))
    expected = {}
    ids = itertools.count(100)
    for row, ((prompt, n), longest) in enumerate(zip(rows, lengths, strict=True)):
        request = Request(row, prompt, SamplingParams(n=n, temperature=1.0))
        samples = [Sequence(next(ids), request, longest[sample], sample) for sample in range(n)]
        samples[0].followers = samples[1:]
        job.scheduler.add(samples[0])
        for seq in samples:
            expected[seq.seq_id] = fake_outputs(prompt, seq.max_output_tokens, VOCAB, sample=seq.sample)
    job.run()
    assert {seq_id: seq.output_token_ids for seq_id, seq in job.finished.items()} == expected


class Search:
    """The beams of one request, which go on at random."""

    def __init__(self, root: Sequence, width: int, max_tokens: int) -> None:
        self.beams = [root]
        self.brought: dict[int, list[int]] = {}
        self.width, self.left = width, max_tokens


@pytest.mark.parametrize("seed", range(120))
def test_beams_read_their_own_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches that branch at random beside rows of other kinds, in pools that are hardly large enough."""
    r = random.Random(seed)
    monkeypatch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", r.choice([0, 2]))
    block_size, max_tokens = r.choice([1, 2, 4, 16]), r.randrange(1, 14)
    width = r.randrange(2, 5)
    prompts = [tokens(r.randrange(1, 3 * block_size + 3), i) for i in range(6)]
    need = max(-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts)
    slots, budget = r.choice([width, width + 1, 4 * width]), r.choice([4, 9, 40])
    job = make_job(r, random_pool(r, need * width), block_size, slots, budget)
    scheduler, runner = job.scheduler, job.runner
    ids = itertools.count(100)
    searches: dict[int, Search] = {}
    others: list[Sequence] = []
    for row, prompt in enumerate(prompts):
        if row % 3 == 2:
            others.append(Sequence(next(ids), Request(row, prompt, SamplingParams()), max_tokens))
            scheduler.add(others[-1])
            continue
        root = Sequence(
            next(ids), Request(row, prompt, SamplingParams(beam_width=width)), max_tokens, num_candidates=2 * width
        )
        scheduler.add(root)
        searches[row] = Search(root, width, max_tokens)
    in_flight = 0
    for _ in range(5000):
        while in_flight < runner.depth and (batch := scheduler.schedule()) is not None:
            runner.submit(batch)
            in_flight += 1
            scheduler.check_invariants()
        if not in_flight:
            break
        output = runner.collect()
        in_flight -= 1
        for seq, new in scheduler.update(output):
            search = searches.get(seq.request.request_id)
            if search is None:
                if seq.num_output_tokens >= seq.max_output_tokens:
                    scheduler.finish(seq)
                    assert seq.output_token_ids == fake_outputs(prompts[seq.request.request_id], max_tokens, VOCAB)
                continue
            assert new == []
            search.brought[seq.seq_id] = output.candidates[seq.seq_id][0]
            if len(search.brought) == len(search.beams):
                advance(r, scheduler, search, ids)
        scheduler.check_invariants()
    assert not scheduler.has_work
    assert all(search.left == 0 for search in searches.values())
    scheduler.block_manager.check_invariants([])


def advance(r: random.Random, scheduler: Scheduler, search: Search, ids: itertools.count[int]) -> None:
    """Beams go on with what they brought: the best ones anywhere, the search at its end nowhere."""
    search.left -= 1
    pool = [(i, token) for i, seq in enumerate(search.beams) for token in search.brought[seq.seq_id]]
    search.brought.clear()
    if search.left == 0:
        for seq in search.beams:
            scheduler.finish(seq)
        return
    chosen = r.sample(pool, r.choice([1, search.width, search.width]))
    before = [list(seq.token_ids) for seq in search.beams]
    search.beams = scheduler.branch(search.beams, chosen, ids)
    assert [seq.token_ids for seq in search.beams] == [[*before[i], token] for i, token in chosen]


def test_a_search_needs_room_for_all_its_beams() -> None:
    scheduler = Scheduler(
        BlockManager(8, 4), WaitingQueue("input"), max_num_seqs=4, max_num_batched_tokens=16, max_in_flight=1
    )

    def beams(width: int, max_tokens: int) -> Sequence:
        request = Request(0, [1, 2, 3], SamplingParams(beam_width=width))
        return Sequence(0, request, max_tokens, num_candidates=2 * width)

    scheduler.add(beams(4, 6))
    with pytest.raises(RowError, match="12"):
        scheduler.add(beams(4, 7))
    with pytest.raises(RowError, match="max_num_seqs"):
        scheduler.add(beams(5, 1))
