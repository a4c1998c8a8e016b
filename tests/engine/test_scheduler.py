"""The scheduler over a runner that checks every batch; expectations are arithmetic or each request run alone."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from paged_infer.engine.batch import ScheduledBatch
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.prefix import sha256
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence, Status
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.types import Request, RowError, SamplingParams
from tests.fakes import FakeRunner, fake_outputs

VOCAB = 512


@dataclass
class Job:
    """A scheduler, a runner and the loop between them. Sequences end at `eos` or at their length."""

    scheduler: Scheduler
    runner: FakeRunner
    eos: int | None = None
    finished: dict[int, Sequence] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    in_flight: int = 0
    num_added: int = 0
    check: bool = True

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        salt: str = "",
        params: SamplingParams | None = None,
        banned: tuple[int, ...] = (),
    ) -> Sequence:
        request = Request(self.num_added, prompt, params or SamplingParams(), salt=salt)
        seq = Sequence(self.num_added, request, max_tokens, banned_until_min_tokens=banned)
        self.num_added += 1
        self.scheduler.add(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.finished[seq.seq_id] = seq
        self.checked()

    def checked(self) -> None:
        if self.check:
            self.scheduler.check_invariants()

    def step(self) -> list[ScheduledBatch]:
        """Fill the pipeline, take one output back; returns the batches submitted."""
        submitted = []
        while self.in_flight < self.runner.depth:
            oldest = self.oldest()
            batch = self.scheduler.schedule()
            self.checked()
            if oldest is not None:
                assert oldest.status is Status.RUNNING, "the oldest was preempted"
                assert batch is not None
                assert oldest.seq_id in {s.seq_id for s in batch.scheduled}, "the oldest did not progress"
            if batch is None:
                break
            self.runner.submit(batch)
            self.in_flight += 1
            submitted.append(batch)
        assert self.in_flight or not self.scheduler.has_work, "nothing can run, and nothing is running: a hang"
        if self.in_flight:
            output = self.runner.collect()
            self.in_flight -= 1
            for seq, new in self.scheduler.update(output):
                if seq.seq_id in output.errors:
                    self.failed[seq.seq_id] = str(output.errors[seq.seq_id])
                    self.finish(seq)
                elif new[-1] == self.eos or seq.num_output_tokens >= seq.max_output_tokens:
                    self.finish(seq)
            self.checked()
        return submitted

    def oldest(self) -> Sequence | None:
        """The oldest running sequence that is not just waiting for its last token."""
        going_on = (s for s in self.scheduler._running if s.num_tokens <= s.max_kv_tokens)
        return min(going_on, key=lambda s: s.age, default=None)

    def run(self, max_steps: int = 100_000) -> list[ScheduledBatch]:
        batches = []
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                break
            batches += self.step()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        blocks = self.scheduler.block_manager
        blocks.check_invariants([])
        assert blocks.num_free_blocks == blocks.num_blocks
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        return batches

    def output(self, seq: Sequence) -> list[int]:
        return self.finished[seq.seq_id].output_token_ids


def make_job(
    num_blocks: int = 64,
    block_size: int = 16,
    *,
    max_num_seqs: int = 8,
    budget: int = 64,
    chunked: bool = True,
    caching: bool = True,
    depth: int = 1,
    order: str = "input",
    window: int = 4096,
    digest: Callable[[bytes], bytes] = sha256,
    eos: int | None = None,
    eos_probability: float = 0.0,
    **options: object,
) -> Job:
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, caching, digest),
        WaitingQueue(order, window, block_size if caching else None),  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        chunked_prefill=chunked,
        max_in_flight=depth,
    )
    runner = FakeRunner(
        num_blocks,
        block_size,
        VOCAB,
        depth,
        eos_token_id=eos,
        eos_probability=eos_probability,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        **options,  # type: ignore[arg-type]
    )
    return Job(scheduler, runner, eos)


def tokens(count: int, seed: int = 0) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(1, VOCAB) for _ in range(count)]


# --- whole jobs -------------------------------------------------------------------------------------------------------


def random_schedule(seed: int) -> tuple[int, int]:
    """One random job, checked after every operation. Returns (preemptions, cached tokens)."""
    r = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", r.choice([0, 0, 2]))
        return random_job(r)


def random_job(r: random.Random) -> tuple[int, int]:
    block_size = r.choice([1, 2, 4, 16])
    eos, probability = r.choice([(None, 0.0), (0, 0.1)])
    stems = [[r.randrange(1, 4) for _ in range(r.randrange(1, 4 * block_size + 4))] for _ in range(2)]
    rows = []
    longest, stem = r.choice([(4, 30), (20, 6), (20, 6), (2 * block_size + 2, 20)])
    for _ in range(r.randrange(2, 9)):
        prompt = r.choice(stems)[: r.randrange(stem)] + [r.randrange(1, 4) for _ in range(r.randrange(1, 6))]
        rows.append((prompt, r.randrange(1, longest + 1), r.choice(["", "", "s"]), r.choice([0, 0, 2])))
    need = max(-(-(len(prompt) + out - 1) // block_size) for prompt, out, *_ in rows)
    num_blocks = max(1, need + r.choice([-1, 0, 1, need // 2, need, need, 2 * need]))
    budget = r.choice([1, 3, 8, 16, 33, 64])
    job = make_job(
        num_blocks,
        block_size,
        max_num_seqs=r.choice([1, 3, 8, 8, 8, 8]),
        budget=budget,
        chunked=r.random() < 0.8,
        caching=r.random() < 0.7,
        depth=r.choice([1, 1, 2, 3]),
        order=r.choice(["auto", "input"]),
        window=r.choice([1, 3, 4096]),
        digest=r.choice([sha256, sha256, lambda data: sha256(data)[:1], lambda data: b""]),
        eos=eos,
        eos_probability=probability,
    )
    cancel = r.choice([0.0, 0.0, 0.05])
    expected: dict[int, list[int]] = {}
    alive: dict[int, Sequence] = {}
    cancelled: set[int] = set()
    rows.reverse()
    limit = 10 * sum(len(prompt) + out for prompt, out, *_ in rows) + 10
    for _ in range(limit):
        while rows and (r.random() < 0.7 or not job.scheduler.has_work):
            prompt, out, salt, min_tokens = rows.pop()
            params = SamplingParams(min_tokens=min(min_tokens, out))
            ban = (0,) if min_tokens else ()
            never = -(-(len(prompt) + out - 1) // block_size) > num_blocks
            whole = not job.scheduler.chunked_prefill and len(prompt) > budget
            if never or whole:
                with pytest.raises(RowError) as caught:
                    job.add(prompt, out)
                assert caught.value.error_type == ("kv_cache_too_small" if never else "prompt_too_long")
                continue
            seq = job.add(prompt, out, salt=salt, params=params, banned=ban)
            expected[seq.seq_id] = fake_outputs(prompt, out, VOCAB, eos, probability, ban, params.min_tokens)
            alive[seq.seq_id] = seq
        unfinished = [seq for seq in alive.values() if seq.status is not Status.FINISHED]
        if unfinished and r.random() < cancel:
            seq = r.choice(unfinished)
            cancelled.add(seq.seq_id)
            job.finish(seq)
        if job.scheduler.has_work or job.in_flight:
            job.step()
        elif not rows:
            break
    else:
        raise AssertionError(f"not done after {limit} steps")
    blocks = job.scheduler.block_manager
    blocks.check_invariants([])
    assert blocks.num_free_blocks == num_blocks
    for seq_id, seq in alive.items():
        ids = seq.output_token_ids
        assert ids == (expected[seq_id][: len(ids)] if seq_id in cancelled else expected[seq_id])
    stats = job.scheduler.stats
    if not cancelled and job.runner.depth == 1:
        all_once = sum(len(s.token_ids) - 1 - s.num_cached_tokens for s in alive.values())
        assert all_once <= stats.num_scheduled_tokens <= all_once + stats.num_recomputed_tokens
        assert stats.num_discarded_tokens == 0
    return stats.num_preemptions, stats.num_cached_tokens


@pytest.mark.parametrize("part", range(10))
def test_random_schedules(part: int) -> None:
    """Every request answers as it does alone, and nothing leaks, breaks a limit or hangs: 1,000 jobs a part."""
    preemptions = cached = 0
    for seed in range(1000 * part, 1000 * part + 1000):
        try:
            more = random_schedule(seed)
        except Exception as error:
            raise AssertionError(f"random_schedule({seed})") from error
        preemptions += more[0]
        cached += more[1]
    assert preemptions > 200, "hardly anything was preempted: the jobs test too little"
    assert cached > 1000


@pytest.mark.full
@pytest.mark.parametrize("part", range(40))
def test_many_random_schedules(part: int) -> None:
    for seed in range(100_000 + 10_000 * part, 110_000 + 10_000 * part):
        random_schedule(seed)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_many_rows_with_one_prefix_under_preemption(caching: bool, depth: int) -> None:
    stem = tokens(40)
    job = make_job(60, 8, max_num_seqs=64, budget=128, caching=caching, depth=depth)
    job.check = False
    prompts = [stem + tokens(1 + i % 9, seed=i) for i in range(512)]
    rows = [job.add(prompt, 1 + i % 53) for i, prompt in enumerate(prompts)]
    job.run()
    for prompt, seq in zip(prompts, rows, strict=True):
        assert job.output(seq) == fake_outputs(prompt, seq.max_output_tokens, VOCAB)
    assert job.scheduler.stats.num_preemptions > 0
    assert (job.scheduler.stats.num_cached_tokens > 500 * 40) == caching


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (31, 16), (32, 16), (33, 32)])
@pytest.mark.parametrize("max_num_seqs", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_equal_prompt(length: int, cached: int, max_num_seqs: int, depth: int) -> None:
    """One after the other, or both in one batch: whole blocks are shared, the last token never."""
    prompt = tokens(length)
    job = make_job(max_num_seqs=max_num_seqs, budget=128, depth=depth)
    a, b = job.add(prompt, 5), job.add(prompt, 5)
    first = job.step()[0]
    assert len(first.scheduled) == max_num_seqs
    if max_num_seqs == 2:
        assert [s.num_scheduled_tokens for s in first.scheduled] == [length, length - cached]
    job.run()
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, cached)
    assert job.output(a) == job.output(b) == fake_outputs(prompt, 5, VOCAB)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_outputs_are_cached_too(depth: int) -> None:
    """Also where a block was full before its last token was known."""
    job = make_job(max_num_seqs=1, budget=128, depth=depth)
    prompt = tokens(10)
    a = job.add(prompt, 30)
    job.run()
    again = prompt + job.output(a)  # 40 tokens; the 40th was never run
    b = job.add([*again, 7], 1)
    job.run()
    assert b.num_cached_tokens == 32


def test_a_hit_is_pinned_while_the_next_row_takes_what_is_left() -> None:
    """The pool is nearly full; in one step A hits a block nobody uses and B needs every other block."""
    stem = tokens(16)
    job = make_job(4, 16, budget=128)
    job.add(stem, 1)
    job.run()
    a = job.add([*stem, 5], 1)
    b = job.add(tokens(32, seed=1), 1)
    batch = job.step()[0]
    assert [(s.seq_id, s.num_computed_tokens, s.num_scheduled_tokens) for s in batch.scheduled] == [
        (a.seq_id, 16, 1),
        (b.seq_id, 0, 32),
    ]
    job.run()
    assert a.num_cached_tokens == 16


def test_salts_and_wide_ids_keep_rows_apart() -> None:
    rest = tokens(8)
    job = make_job(64, 4, max_num_seqs=1)
    rows = [
        job.add([65, *rest], 1),
        job.add([321, *rest], 1),
        job.add([65, *rest], 1, salt="x"),
        job.add([65, *rest], 1, salt="x"),
        job.add([65, *rest], 1, salt="y"),
        job.add([65, *rest], 1),
    ]
    job.run()
    assert [seq.num_cached_tokens for seq in rows] == [0, 0, 0, 8, 0, 8]


def test_thirty_prompts_through_eight_blocks() -> None:
    job = make_job(8, 4, max_num_seqs=1)
    prompts = [tokens(9, seed=i) for i in range(30)]
    rows = [job.add(prompt, 4) for prompt in [*prompts, prompts[0]]]
    job.run()
    assert rows[-1].num_cached_tokens == 0
    assert job.output(rows[-1]) == job.output(rows[0]) == fake_outputs(prompts[0], 4, VOCAB)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lengths_across_block_borders(depth: int) -> None:
    job = make_job(16, 4, max_num_seqs=3, budget=7, depth=depth)
    rows = [(job.add(tokens(n, seed=n), out), n, out) for n in (1, 3, 4, 5, 7, 8, 9) for out in range(1, 10)]
    job.run()
    for seq, n, out in rows:
        assert job.output(seq) == fake_outputs(tokens(n, seed=n), out, VOCAB)


# --- budget -----------------------------------------------------------------------------------------------------------


def test_decodes_never_wait_for_a_long_prompt() -> None:
    """Seven decodes beside a 4,000-token prompt: it gets what they leave, 57 tokens a step."""
    job = make_job(600, 16, budget=64)
    short = [job.add(tokens(4, seed=i), 200) for i in range(7)]
    job.step()
    long = job.add(tokens(4000, seed=99), 1)
    steps = -(-4000 // 57)
    for i in range(steps):
        batch = job.step()[0]
        share = {s.seq_id: s.num_scheduled_tokens for s in batch.scheduled}
        assert [share[seq.seq_id] for seq in short] == [1] * 7
        assert share[long.seq_id] == min(57, 4000 - 57 * i)
    assert long.status is Status.FINISHED


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it() -> None:
    job = make_job(budget=64, chunked=False)
    a, b = job.add(tokens(40), 3), job.add(tokens(60, seed=1), 1)
    shares = [[(s.seq_id, s.num_scheduled_tokens) for s in batch.scheduled] for batch in job.run()]
    assert shares == [
        [(a.seq_id, 40)],
        [(a.seq_id, 1), (b.seq_id, 60)],
        [(a.seq_id, 1)],
    ]
    with pytest.raises(RowError, match=r"65 prompt tokens exceed the 64 tokens"):
        job.add(tokens(65), 1)


def test_without_chunks_a_resumed_sequence_may_outgrow_a_step() -> None:
    """Two sequences of 20 + 30 tokens in 12 blocks of 4: one is preempted at more than the budget of 21."""
    job = make_job(16, 4, budget=21, chunked=False, caching=False)
    rows = [job.add(tokens(20, seed=i), 30) for i in range(2)]
    job.run()
    assert job.scheduler.stats.num_preemptions > 0
    assert [job.output(seq) for seq in rows] == [fake_outputs(tokens(20, seed=i), 30, VOCAB) for i in range(2)]


def test_no_more_sequences_than_budget() -> None:
    job = make_job(budget=3)
    for i in range(6):
        job.add(tokens(2, seed=i), 8)
    job.run()
    assert job.scheduler.stats.max_running == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_nothing_runs_past_the_last_token(depth: int, max_tokens: int) -> None:
    """prompt + max_tokens fills the pool: the last position computed is the last but one."""
    prompt = tokens(33 - max_tokens)
    job = make_job(8, 4, depth=depth)
    seq = job.add(prompt, max_tokens)
    batches = job.run()
    ends = [s.num_computed_tokens + s.num_scheduled_tokens for batch in batches for s in batch.scheduled]
    assert max(ends) == len(prompt) + max_tokens - 1 == 32
    assert job.output(seq) == fake_outputs(prompt, max_tokens, VOCAB)
    assert job.scheduler.stats.num_discarded_tokens == 0
    assert sum(s.samples for batch in batches for s in batch.scheduled) == max_tokens


@pytest.mark.parametrize(("depth", "discarded"), [(1, 0), (2, 1), (3, 2)])
def test_a_stop_comes_late(depth: int, discarded: int) -> None:
    """What batches in flight sampled after the stop is dropped, and the blocks come back."""
    job = make_job(depth=depth, eos=0, scripted={0: [5, 6, 0, 7, 8, 9]})
    seq = job.add(tokens(20), 100)
    job.run()
    assert job.output(seq) == [5, 6, 0]
    assert job.scheduler.stats.num_discarded_tokens == discarded


def test_a_full_pipeline_schedules_nothing() -> None:
    job = make_job(depth=2)
    job.add(tokens(4), 9)
    scheduler, runner = job.scheduler, job.runner
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch is not None
        runner.submit(batch)
    assert scheduler.schedule() is None
    scheduler.update(runner.collect())
    assert scheduler.schedule() is not None


def test_a_batch_is_a_message() -> None:
    """It can be pickled, and nothing that happens later changes it."""
    job = make_job(12, 4, max_num_seqs=4)
    for i in range(8):
        job.add(tokens(6 + i, seed=i), 16)
    sent = []
    while job.scheduler.has_work:
        sent += [(batch, pickle.dumps(batch)) for batch in job.step()]
    assert job.scheduler.stats.num_preemptions > 0
    for batch, message in sent:
        assert pickle.loads(message) == batch


def test_outputs_must_come_in_order() -> None:
    job = make_job(depth=2)
    job.add(tokens(4), 9)
    for _ in range(2):
        batch = job.scheduler.schedule()
        assert batch is not None
        job.runner.submit(batch)
    job.runner.collect()
    with pytest.raises(RuntimeError, match="step 1 does not answer the batch of step 0"):
        job.scheduler.update(job.runner.collect())


# --- requests that do not fit, errors, ends ---------------------------------------------------------------------------


def test_requests_that_can_never_fit() -> None:
    """49 blocks of 16 hold 784 tokens. 1,002 prompt tokens need 63 blocks; the others finish."""
    job = make_job(49, 16, budget=512)
    for i in range(5):
        with pytest.raises(RowError, match=r"1002 prompt tokens .* need 63 KV blocks .* 49 are available") as caught:
            job.add(tokens(1002, seed=i), 1)
        assert caught.value.error_type == "kv_cache_too_small"
        job.add(tokens(10, seed=100 + i), 4)
        job.add(tokens(20, seed=200 + i), 4)
    job.run()
    assert sum(len(seq.output_token_ids) for seq in job.finished.values()) == 40


@pytest.mark.parametrize(("max_tokens", "fits"), [(84, True), (85, True), (86, False)])
def test_growing_until_the_pool_is_full(max_tokens: int, fits: bool) -> None:
    """784 slots: a prompt of 700 can have 85 tokens, since the last one is never stored."""
    job = make_job(49, 16, budget=512)
    others = [job.add(tokens(100, seed=i), 40) for i in range(1, 4)]
    if not fits:
        with pytest.raises(RowError, match="need 50 KV blocks"):
            job.add(tokens(700), max_tokens)
        return
    seq = job.add(tokens(700), max_tokens)
    job.run()
    assert job.output(seq) == fake_outputs(tokens(700), max_tokens, VOCAB)
    assert all(len(job.output(other)) == 40 for other in others)


def test_an_error_ends_one_row() -> None:
    job = make_job(error_seq_ids={1}, depth=2)
    rows = [job.add(tokens(9, seed=i), 6) for i in range(3)]
    job.run()
    assert job.failed == {1: "the logits are not finite"}
    assert [len(job.output(seq)) for seq in rows] == [6, 0, 6]


def test_finishing_from_any_state() -> None:
    job = make_job(6, 4, max_num_seqs=3)
    rows = [job.add(tokens(6, seed=i), 12) for i in range(5)]
    job.step()
    running = [seq for seq in rows if seq.status is Status.RUNNING]
    waiting = [seq for seq in rows if seq.status is Status.WAITING]
    assert running
    assert waiting
    assert (job.scheduler.num_running, job.scheduler.num_waiting) == (len(running), len(waiting))
    for seq in (running[0], waiting[0], waiting[-1], running[0]):
        job.finish(seq)
    assert job.scheduler.num_running == len(running) - 1
    assert job.scheduler.num_waiting == len(waiting) - 2
    job.run()
    cut = {running[0].seq_id, waiting[0].seq_id, waiting[-1].seq_id}
    assert all(len(job.output(seq)) == 12 for seq in rows if seq.seq_id not in cut)
    assert running[0].seq_id in job.runner.batches[1].finished_ids
    assert not any(waiting[0].seq_id in batch.finished_ids for batch in job.runner.batches)


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit without regard to growth, so that the pool runs out soon."""
    monkeypatch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", 0)


def pressed(job: Job, prompts: list[list[int]], max_tokens: int = 40) -> list[Sequence]:
    rows = [job.add(prompt, max_tokens) for prompt in prompts]
    job.step()
    assert job.scheduler.num_running == len(rows)
    return rows


def first_victim(job: Job, rows: list[Sequence]) -> Sequence:
    for _ in range(100):
        job.step()
        out = [seq for seq in rows if seq.status is Status.WAITING]
        if out:
            assert len(out) == 1
            return out[0]
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize(
    ("lengths", "victim"),
    [
        ([8, 25, 14, 23], 2),  # the shortest but for the oldest
        ([24, 13, 13, 22], 2),  # the younger of two
        ([8, 25, 22, 15], 3),
    ],
)
@pytest.mark.usefixtures("no_reserve")
def test_the_victim_loses_least(lengths: list[int], victim: int) -> None:
    job = make_job(sum(-(-n // 4) for n in lengths) + 3, 4, budget=128)
    rows = pressed(job, [tokens(n, seed=i) for i, n in enumerate(lengths)])
    assert first_victim(job, rows) is rows[victim]
    job.run()
    for i, seq in enumerate(rows):
        assert job.output(seq) == fake_outputs(tokens(lengths[i], seed=i), 40, VOCAB)


@pytest.mark.usefixtures("no_reserve")
def test_what_others_keep_is_not_lost() -> None:
    """Rows 1 and 2 are the longest, but share 28 tokens: row 1 has 5 of its own to lose, row 3 has 15."""
    stem = tokens(28, seed=9)
    prompts = [tokens(8), [*stem, *range(1, 6)], [*stem, *range(11, 17)], tokens(15, seed=3)]
    job = make_job(2 + 7 + 2 + 2 + 4 + 2, 4, budget=128)
    rows = pressed(job, prompts)
    assert first_victim(job, rows) is rows[1]
    job.run()
    for prompt, seq in zip(prompts, rows, strict=True):
        assert job.output(seq) == fake_outputs(prompt, 40, VOCAB)


@pytest.mark.usefixtures("no_reserve")
def test_a_row_that_waits_for_its_last_token_loses_nothing() -> None:
    """With two batches in flight its blocks can go at once: what still runs on them runs before they are reused."""
    job = make_job(8, 4, depth=2, budget=64)
    prompts, lengths = [tokens(4), tokens(16, seed=1), tokens(8, seed=2)], [20, 1, 20]
    rows = [job.add(prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    job.step()  # 7 of 8 blocks; then rows 0 and 2 need one each, and row 1 has all it needs computed
    assert job.scheduler.stats.num_preemptions == 1
    assert (rows[1].status, rows[2].status) == (Status.FINISHED, Status.RUNNING)
    assert rows[2].num_computed_tokens == 9
    job.run()
    for prompt, n, seq in zip(prompts, lengths, rows, strict=True):
        assert job.output(seq) == fake_outputs(prompt, n, VOCAB)


@pytest.mark.usefixtures("no_reserve")
def test_a_prompt_takes_what_decodes_leave_of_the_pool() -> None:
    """13 slots: the decode takes one a step, the prompt of 9 two, until one is left, and it is the decode's."""
    job = make_job(13, 1, budget=3)
    a, b = job.add(tokens(2), 10), job.add(tokens(9, seed=1), 1)
    shares = [[(s.seq_id, s.num_scheduled_tokens) for s in job.step()[0].scheduled] for _ in range(5)]
    assert shares == [[(0, 2), (1, 1)]] + [[(0, 1), (1, 2)]] * 3 + [[(0, 1)]]
    assert job.scheduler.stats.num_preemptions == 0
    job.run()
    assert job.scheduler.stats.num_preemptions == 1
    assert job.output(a) == fake_outputs(tokens(2), 10, VOCAB)
    assert job.output(b) == fake_outputs(tokens(9, seed=1), 1, VOCAB)


def test_preempted_rows_come_back_before_new_ones_and_in_order_of_age() -> None:
    job = make_job(20, 4, budget=64, caching=False)
    rows = [job.add(tokens(10, seed=i), 30) for i in range(12)]
    order = []
    while job.scheduler.has_work:
        for batch in job.step():
            order += [new.seq_id for new in batch.new]
            for new in batch.new:
                waiting = [s.age for s in job.scheduler.waiting._preempted]
                assert all(age > rows[new.seq_id].age for age in waiting)
    assert list(dict.fromkeys(order)) == list(range(12))
    assert len(order) == 12 + job.scheduler.stats.num_preemptions


def test_admission_leaves_room_to_grow() -> None:
    """Each row takes 2 blocks and may take 2 more soon, so 10 blocks admit two rows of three: the third would be
    preempted before it is done. A row that cannot grow needs no reserve."""
    job = make_job(11, 4)
    for i in range(3):
        job.add(tokens(8, seed=i), 30)
    job.step()
    assert job.scheduler.num_running == 2
    job = make_job(11, 4)
    for i in range(5):
        job.add(tokens(8, seed=i), 1)
    assert len(job.step()[0].scheduled) == 5


def test_preemptions_stay_few_where_the_pool_is_too_small_for_all() -> None:
    """128 rows that grow from 64 to 192 tokens in a pool for 24 full rows."""
    job = make_job(24 * 12, 16, max_num_seqs=128, budget=256, caching=False)
    job.check = False
    for i in range(128):
        job.add(tokens(64, seed=i), 128)
    job.run()
    stats = job.scheduler.stats
    useful = 128 * (64 + 127)
    assert stats.num_scheduled_tokens == useful + stats.num_recomputed_tokens
    assert stats.num_recomputed_tokens < 0.35 * useful
    assert stats.max_running > 24


# --- counters ---------------------------------------------------------------------------------------------------------


def test_kv_utilisation() -> None:
    """20 + 1 + 1 tokens in 32 slots: steps store 20, 21 and 22."""
    job = make_job()
    job.add(tokens(20), 3)
    job.run()
    stats = job.scheduler.stats
    assert (stats.stored_tokens, stats.used_slots) == (63, 96)
    assert stats.kv_utilisation == 63 / 96
    assert stats.num_steps == 3
    assert stats.num_prompt_tokens == 20


def test_utilisation_counts_a_shared_block_once() -> None:
    """Two rows of 33 tokens, 32 of them shared: 34 tokens stored in 4 blocks."""
    job = make_job(budget=128)
    job.add(tokens(33), 1)
    job.add(tokens(33), 1)
    job.run()
    assert (job.scheduler.stats.stored_tokens, job.scheduler.stats.used_slots) == (34, 64)


def test_decodes_behind_the_same_blocks_are_neighbours():
    """Rows of three prefixes that arrive in turns: attention reads what neighbours share once."""
    job = make_job(400, max_num_seqs=12, budget=4000)
    prefixes = [[100 * p + i % 100 for i in range(300)] for p in range(3)]
    for i in range(12):
        job.add([*prefixes[i % 3], 400 + i, 401 + i], 9)
    job.step()
    job.step()
    (batch,) = job.step()
    order = [item.seq_id % 3 for item in batch.scheduled]
    assert len(order) == 12
    assert sum(a != b for a, b in pairwise(order)) == 2
