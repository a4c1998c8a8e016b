"""Speculation changes nothing but the number of steps: every result equals that of the same run without it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_infer.config import ConfigError
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence
from paged_infer.engine.speculative import (
    NGramProposer,
    Proposer,
    Speculator,
    StepCost,
    SuffixAutomaton,
    SuffixProposer,
)
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.llm import LLM
from paged_infer.types import Completion, Request, SamplingParams
from tests.engine.test_scheduler import VOCAB, Job, tokens
from tests.fakes import FakeRunner, fake_outputs
from tests.fixtures.checkpoints import chain_table, markov_checkpoint, markov_table


def sequence(token_ids: list[int], seq_id: int = 0, max_tokens: int = 100) -> Sequence:
    return Sequence(seq_id, Request(seq_id, token_ids, SamplingParams()), max_tokens)


# --- guessing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ngram", "suffix"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1], [3, 4, 9, 1]),
        ([1, 2, 3, 8, 2, 4, 9, 1, 2], [3, 8, 2, 4], [3, 8, 2, 4]),  # the longer match, not the later one
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4], [3, 1, 2, 4]),  # the latest; the first
        ([5, 5, 5, 5], [5, 5, 5, 5], [5, 5, 5, 5]),
        ([7, 1, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], [], []),
        ([1, 2, 3, 1], [2, 3, 1, 2], []),  # one token is too little for a suffix
        ([1], [], []),
    ],
)
def test_guesses_repeat_the_row(text: list[int], ngram: list[int], suffix: list[int]) -> None:
    kinds: list[tuple[type[NGramProposer | SuffixProposer], list[int]]] = [
        (NGramProposer, ngram),
        (SuffixProposer, suffix),
    ]
    for kind, expected in kinds:
        for first in range(1, len(text) + 1):  # read at once, or as it grows
            proposer, seq = kind(), sequence(text[:first])
            for token in text[first:]:
                proposer.propose([(seq, 4)])
                seq.token_ids.append(token)
            assert proposer.propose([(seq, 4)]) == [expected]


def test_guesses_repeat_finished_rows() -> None:
    proposer = SuffixProposer()
    done = sequence([9, 9])
    done.token_ids += [1, 2, 3, 4, 5]
    proposer.forget(done)
    assert proposer.propose([(sequence([8, 2, 3], 1), 4)]) == [[4, 5]]
    assert proposer.propose([(sequence([9, 1, 7], 2), 4)]) == [[]]
    other = sequence([2, 3, 6, 7, 2, 3], 3)
    assert proposer.propose([(other, 4)]) == [[6, 7, 2, 3]]  # as long a match in the row itself
    other.token_ids.append(4)
    assert proposer.propose([(other, 4)]) == [[5]]


def test_the_library_starts_anew_when_it_is_full() -> None:
    proposer = SuffixProposer(library_tokens=10)
    for start in (10, 20, 30, 40):
        done = sequence([1], start)
        done.token_ids += range(start, start + 6)
        proposer.forget(done)
    running = sequence([40, 41], 7)
    assert proposer.propose([(running, 3)]) == [[42, 43, 44]]
    assert proposer.propose([(sequence([10, 11], 8), 3)]) == [[]]


def test_the_automaton_knows_every_substring() -> None:
    """Against brute force over random texts on a small alphabet."""
    choose = random.Random(0)
    for _ in range(60):
        automaton = SuffixAutomaton()
        texts: list[list[int]] = []
        for _ in range(choose.randrange(1, 4)):
            texts.append([])
            for _ in range(choose.randrange(1, 25)):
                texts[-1].append(choose.randrange(3))
                automaton.append(texts[-1][-1])
                if len(texts) == 1:  # it speaks of one text
                    text = texts[0]
                    length, end = automaton.repeated()
                    assert length == next(
                        n for n in reversed(range(len(text))) if occurs(text[len(text) - n :], text[:-1])
                    )
                    assert text[end - length : end] == text[len(text) - length :]
                    assert end < len(text)
            automaton.end_text()
        state, length, stream, grown = 0, 0, [], False
        for _ in range(40):
            stream.append(choose.randrange(4))
            state, length = automaton.advance(state, length, stream[-1])
            assert length == longest_end(stream, texts) or (grown and length <= longest_end(stream, texts))
            end = automaton.ends[state]
            assert automaton.tokens[end - length : end] == stream[len(stream) - length :]
            if choose.random() < 0.2:  # it may grow while streams stand somewhere in it
                grown = True
                texts.append([choose.randrange(3) for _ in range(5)])
                for token in texts[-1]:
                    automaton.append(token)
                automaton.end_text()


def longest_end(stream: list[int], texts: list[list[int]]) -> int:
    """Length of the stream's longest suffix that occurs in any of the texts."""
    ends = (stream[start:] for start in range(len(stream) + 1))
    return next(len(end) for end in ends if any(occurs(end, text) for text in texts))


def occurs(part: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


# --- how many guesses -------------------------------------------------------------------------------------------------


class Always:
    """Proposes as much as it is asked for."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[1] * most for _, most in wanted]

    def forget(self, seq: Sequence) -> None:
        pass


def settled(speculator: Speculator, sequences: list[Sequence], chance: float) -> list[int]:
    """Lengths of drafts once the acceptance rate is known; a draft's tokens are right one by one with that chance."""
    choose = random.Random(1)
    lengths: list[int] = []
    for _ in range(300):
        drafts = speculator.drafts(sequences, 0)
        for seq, draft in zip(sequences, drafts, strict=True):
            right = 0
            while right < len(draft) and choose.random() < chance:
                right += 1
            if draft:
                speculator.accepted(seq, right, len(draft))
        lengths = [len(draft) for draft in drafts]
    return lengths


def test_drafts_grow_with_their_success_and_shrink_with_the_batch() -> None:
    def average(batch: int, chance: float) -> float:
        sequences = [sequence([1, 2], i) for i in range(batch)]
        speculator = Speculator(Always(), 8, clock=lambda: 0.0)
        return sum(settled(speculator, sequences, chance)) / batch

    assert average(1, 0.95) == 8
    assert average(1, 0.95) > average(1, 0.3) > 0
    assert average(4, 0.8) > average(16, 0.8)
    assert average(128, 0.9) == 0


def test_nothing_is_guessed_while_prompts_keep_the_processor_busy() -> None:
    """Beside 448 tokens of prompts that must run anyway, a guess costs about what it may bring."""
    speculator = Speculator(Always(), 8, clock=lambda: 0.0)
    rows = [sequence([1], i) for i in range(4)]
    assert [len(draft) for draft in speculator.drafts(rows, 448)] == [0] * 4
    assert all(len(draft) > 0 for draft in speculator.drafts(rows, 0))


def test_drafts_end_with_the_output() -> None:
    speculator = Speculator(Always(), 8, adaptive=False)
    for left, expected in ((1, 0), (2, 1), (5, 4), (50, 8)):
        assert len(speculator.drafts([sequence([1], max_tokens=left)], 0)[0]) == expected


def test_the_cost_of_a_step_is_learned() -> None:
    cost = StepCost()
    assert cost.ratio == 16
    for i in range(100):
        cost.add(1 + i % 30, 0.05 + 0.001 * (1 + i % 30))
    assert cost.ratio == pytest.approx(50)
    for i in range(2000):
        cost.add(1 + i % 30, 0.001 * (1 + i % 30))
    assert cost.ratio == pytest.approx(0, abs=0.1)
    alike = StepCost()
    for _ in range(100):
        alike.add(8, 0.1)
    assert alike.ratio == 16


# --- the scheduler with guesses ---------------------------------------------------------------------------------------


class Oracle:
    """Knows the outputs and is right with some chance, token by token."""

    def __init__(self, outputs: dict[int, list[int]], chance: float, choose: random.Random) -> None:
        self.outputs, self.chance, self.choose = outputs, chance, choose

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.guess(seq, most) for seq, most in wanted]

    def guess(self, seq: Sequence, most: int) -> list[int]:
        truth = self.outputs[seq.seq_id][seq.num_output_tokens :][: self.choose.randrange(most + 1)]
        return [token if self.choose.random() < self.chance else (token + 1) % VOCAB for token in truth]

    def forget(self, seq: Sequence) -> None:
        pass


@pytest.mark.parametrize("seed", range(60))
def test_schedules_with_guesses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random jobs over a runner that checks every key it reads: outputs are those of each row alone."""
    r = random.Random(seed)
    monkeypatch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", r.choice([0, 2]))
    block_size, depth = r.choice([1, 2, 4, 16]), r.choice([1, 1, 1, 2])
    stem = tokens(3 * block_size)
    rows = [(stem[: r.randrange(len(stem))] + tokens(r.randrange(1, 9), i), r.randrange(1, 25)) for i in range(7)]
    outputs = {i: fake_outputs(prompt, count, VOCAB) for i, (prompt, count) in enumerate(rows)}
    need = max(-(-(len(prompt) + count) // block_size) for prompt, count in rows)
    num_blocks, budget, slots = need + r.choice([0, 1, need, 3 * need]), r.choice([4, 9, 40]), r.choice([2, 8])
    speculator = Speculator(Oracle(outputs, r.choice([0.0, 0.5, 0.9, 1.0]), r), 5, adaptive=False)
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, r.random() < 0.7),
        WaitingQueue("input"),
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_in_flight=depth,
        speculator=speculator,
    )
    runner = FakeRunner(
        num_blocks, block_size, VOCAB, depth, max_num_batched_tokens=budget, max_num_seqs=min(slots, budget)
    )
    job = Job(scheduler, runner)
    sequences = [job.add(prompt, count) for prompt, count in rows]
    job.run()
    assert [job.output(seq) for seq in sequences] == list(outputs.values())


def test_right_guesses_save_steps() -> None:
    prompt = tokens(20)
    outputs = {0: fake_outputs(prompt, 41, VOCAB)}

    class Exact(Oracle):
        def guess(self, seq: Sequence, most: int) -> list[int]:
            return self.outputs[seq.seq_id][seq.num_output_tokens :][:most]

    speculator = Speculator(Exact(outputs, 1.0, random.Random(0)), 4, adaptive=False)
    scheduler = Scheduler(
        BlockManager(16, 8), WaitingQueue("input"), max_num_seqs=4, max_num_batched_tokens=64, speculator=speculator
    )
    job = Job(scheduler, FakeRunner(16, 8, VOCAB))
    seq = job.add(prompt, 41)
    assert len(job.run()) == 1 + 8  # the prompt's own token, then five a step
    assert job.output(seq) == outputs[0]
    assert speculator.stats.tokens_per_round == 5
    assert speculator.stats.acceptance_rate == 1


# --- the engine: on equals off ----------------------------------------------------------------------------------------


def generate(
    folder: Path, prompts: list[list[int]], params: list[SamplingParams], drafts: int, kind: str, **settings: Any
) -> tuple[list[Completion], int]:
    """The answers, and how many draft tokens were accepted; `drafts` 0 = off."""
    with LLM(str(folder), dtype="float32", speculative=kind if drafts else "off", seed=5, **settings) as llm:
        scheduler = llm.engine.scheduler
        if drafts:
            proposer: Proposer = NGramProposer() if kind == "ngram" else SuffixProposer(shortest=1)
            scheduler.speculator = Speculator(proposer, drafts, adaptive=False)
        answers = llm.generate(prompts, params)
        scheduler.check_invariants()
        assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
        return answers, scheduler.speculator.stats.num_accepted_tokens if scheduler.speculator else 0


def plain(answers: list[Completion]) -> list[tuple[object, ...]]:
    return [(a.request_id, a.sample, a.token_ids, a.text, a.finish_reason, a.stop_reason, a.error) for a in answers]


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
@pytest.mark.parametrize("drafts", range(1, 7))
def test_a_stop_in_the_middle_of_an_accepted_run(tmp_path: Path, kind: str, drafts: int) -> None:
    """A cycle of four, stopped by the text of three tokens: the stop falls at every place inside the run."""
    folder = markov_checkpoint(
        tmp_path,
        chain_table(8, [1, 2, 3, 4, 1]),
        pieces=["<0>", "ha ", "ha", " ho", "-", "e", "f", "g"],
    )
    rows = [[1, 2, 3, 4] * 2 + [1, 2, 3, 4][:rest] for rest in range(1, 5)]
    params = [
        SamplingParams(stop=("ha ha ho-ha ha",), logprobs=2, max_tokens=30),
        SamplingParams(stop=("-ha ha",), logprobs=2, max_tokens=30),
        SamplingParams(stop_token_ids=(3,), logprobs=2, min_tokens=4, max_tokens=30),
        SamplingParams(logprobs=2, max_tokens=7),
    ]
    off, _ = generate(folder, rows, params, 0, kind)
    on, accepted = generate(folder, rows, params, drafts, kind)
    assert accepted > 0
    assert plain(on) == plain(off)
    for a, b in zip(on, off, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert len(a.logprobs.logprobs) == len(a.token_ids)
        assert a.logprobs.top_token_ids == b.logprobs.top_token_ids
        assert a.logprobs.ranks == b.logprobs.ranks


def test_tokens_end_at_every_limit(tmp_path: Path) -> None:
    folder = markov_checkpoint(tmp_path, chain_table(8, [1, 2, 3, 1]), max_position_embeddings=24)
    for max_tokens in range(1, 13):
        prompt = ([1, 2, 3] * 8)[: 24 - max_tokens]
        params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True)]
        (answer,), _ = generate(folder, [prompt], params, 5, "ngram", attention_backend="reference", block_size=4)
        following = {1: 2, 2: 3, 3: 1}
        expected = [prompt[-1]]
        for _ in range(max_tokens):
            expected.append(following[expected[-1]])
        assert answer.token_ids == expected[1:]


@pytest.mark.parametrize("drafts", [1, 3, 6])
@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_wrong_guesses_and_ties(tmp_path: Path, drafts: int, shortest: int) -> None:
    """The row makes the proposer say 1, the model says 2; and of two equally likely tokens the lowest id is right."""
    table = markov_table(8, {1: {2: 1.0}, 2: {2: 0.5, 5: 0.5}, 5: {1: 0.5, 6: 0.5}, 6: {5: 1.0}})
    folder = markov_checkpoint(tmp_path, table)
    rows = [[1, 1, 1, 1, 1], [2, 5, 2, 5, 2], [5, 6, 5, 6, 5], [6, 5, 1, 6, 5, 1, 6]]
    params = [SamplingParams(max_tokens=9, ignore_eos=True)] * 4
    off, _ = generate(folder, rows, params, 0, "ngram")
    with LLM(str(folder), speculative="ngram") as llm:
        llm.engine.scheduler.speculator = Speculator(NGramProposer(4, shortest), drafts, adaptive=False)
        on = llm.generate(rows, params)
    assert plain(on) == plain(off)
    assert off[0].token_ids == [2] * 9


@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_a_wrong_first_guess_is_not_taken(tmp_path: Path, shortest: int) -> None:
    """Four tokens of the prompt come again, and what followed them then does not."""
    folder = markov_checkpoint(tmp_path, markov_table(8, {1: {3: 1.0}, 3: {6: 1.0}, 6: {6: 1.0}}))
    with LLM(str(folder), speculative="ngram") as llm:
        llm.engine.scheduler.speculator = Speculator(NGramProposer(4, shortest), 2, adaptive=False)
        (answer,) = llm.generate([[7, 0, 1, 3, 4, 5, 7, 0, 1]], SamplingParams(max_tokens=4))
        stats = llm.engine.scheduler.speculator.stats
    assert answer.token_ids == [3, 6, 6, 6]
    assert stats.num_draft_tokens > stats.num_accepted_tokens


def test_wrong_guesses_never_enter_the_prefix_cache(random_model: Callable[..., Path]) -> None:
    folder = random_model("llama")
    choose = random.Random(8)
    words = [[choose.randrange(4, 320) for _ in range(5)] for _ in range(3)]
    prompts = [[token for _ in range(4) for token in choose.choice(words)] for _ in range(5)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(str(folder), block_size=4, speculative="ngram") as llm:
        llm.engine.scheduler.speculator = Speculator(NGramProposer(4, 1), 5, adaptive=False)
        first = llm.generate(prompts, params)
        guesses = llm.engine.scheduler.speculator.stats
        assert guesses.num_draft_tokens > guesses.num_accepted_tokens + 20
        again = [prompt + answer.token_ids for prompt, answer in zip(prompts, first, strict=True)]
        before = llm.engine.scheduler.stats.num_cached_tokens
        found = llm.generate(again, params)
        assert llm.engine.scheduler.stats.num_cached_tokens - before >= 5 * 40
    with LLM(str(folder), block_size=4, prefix_caching=False) as llm:
        assert plain(found) == plain(llm.generate(again, params))


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_caching": False, "max_num_batched_tokens": 16},
        {"num_kv_blocks": 12},
        {"block_size": 4, "num_kv_blocks": 60},
    ],
    ids=str,
)
def test_every_option_with_guesses_equals_without(
    random_model: Callable[..., Path], kind: str, settings: dict[str, Any]
) -> None:
    folder = random_model("llama")
    choose = random.Random(4)
    words = [[choose.randrange(4, 320) for _ in range(5)] for _ in range(4)]
    prompts = [[token for _ in range(6) for token in choose.choice(words)] for _ in range(9)]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.3, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 3, "n": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logprobs": 3, "prompt_logprobs": 1},
        {"allowed_token_ids": words[0] + words[1], "temperature": 0.7, "seed": 3},
        {"bad_words": ["a", "e", "the"], "min_tokens": 9, "ignore_eos": False},
        {"logit_bias": {str(words[0][0]): 3.0, str(words[1][1]): 3.0}},
        {"stop_token_ids": [words[2][2]], "presence_penalty": -1.0},
    ]
    params = [SamplingParams.resolve({"max_tokens": 40, "ignore_eos": True, **given}) for given in options]
    off, _ = generate(folder, prompts, params, 0, kind, **settings)
    on, accepted = generate(folder, prompts, params, 5, kind, **settings)
    assert accepted > 0
    assert plain(on) == plain(off)
    for a, b in zip(on, off, strict=True):
        if a.logprobs is not None and b.logprobs is not None:
            assert a.logprobs.logprobs == pytest.approx(b.logprobs.logprobs, abs=1e-4)
        assert (a.cumulative_logprob is None) == (b.cumulative_logprob is None)


def surprise(counts: Counter[int], expected: list[float]) -> float:
    """Pearson's chi-square of counts of ids 0, 1, ... against their probabilities."""
    total = sum(counts.values())
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(expected) if p)


MOST_SURPRISE = 18.5
"""99.99 % quantile for two degrees of freedom."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.3, 0.2]),
        ({"temperature": 1.0, "top_k": 2}, [0.625, 0.375, 0.0]),
        ({"temperature": 2.0}, [0.4154, 0.3218, 0.2628]),
    ],
)
def test_draws_keep_the_model_s_distribution(tmp_path: Path, options: dict[str, Any], expected: list[float]) -> None:
    """The guess is always 1, which the model draws three times in ten."""
    row = {0: 0.5, 1: 0.3, 2: 0.2}
    folder = markov_checkpoint(tmp_path, markov_table(4, dict.fromkeys(range(4), row)))

    class One(Always):
        pass

    params = SamplingParams.resolve({"max_tokens": 10, "ignore_eos": True, **options})
    with LLM(str(folder), seed=9, speculative="ngram", max_num_seqs=600, max_num_batched_tokens=2400) as llm:
        speculator = llm.engine.scheduler.speculator = Speculator(One(), 3, adaptive=False)
        on = [answer.token_ids for answer in llm.generate([[1]] * 600, params)]
        assert speculator.stats.num_draft_tokens > 5000
    with LLM(str(folder), seed=9) as llm:
        assert on == [answer.token_ids for answer in llm.generate([[1]] * 600, params)]
    counts = Counter(token for ids in on for token in ids)
    assert sum(counts.values()) == 6000
    assert all(counts[i] == 0 for i, p in enumerate(expected) if p == 0)
    assert surprise(counts, expected) < MOST_SURPRISE


# --- a draft model ----------------------------------------------------------------------------------------------------


def test_a_draft_model_that_is_right_four_times_in_five(tmp_path: Path) -> None:
    """The target draws any of 100 tokens; after every fifth of them the draft is sure of one that never comes. So a
    round of five guesses brings 1 + 0.8 + ... + 0.8**5 = 3.69 tokens.
    """
    flat = dict.fromkeys(range(100), 0.01)
    target = markov_checkpoint(tmp_path / "target", markov_table(104, dict.fromkeys(range(104), flat)))
    table = markov_table(104, {t: {101: 1.0} if t % 5 == 0 else flat for t in range(104)})
    draft = markov_checkpoint(tmp_path / "draft", table)
    params = SamplingParams(temperature=1.0, max_tokens=120, ignore_eos=True)
    prompts = [[t, t + 1] for t in range(40)]
    with LLM(str(target), seed=3) as llm:
        off = llm.generate(prompts, params)
    with LLM(str(target), seed=3, speculative=f"draft:{draft}", num_speculative_tokens=5) as llm:
        speculator = llm.engine.scheduler.speculator
        assert speculator is not None
        speculator._adaptive = False
        on = llm.generate(prompts, params)
    assert plain(on) == plain(off)
    # the standard deviation of a round is about 1.9, and there are some 1300 of them; the last ones are cut short
    assert speculator.stats.tokens_per_round == pytest.approx(3.69, abs=0.2)


def test_a_draft_model_of_another_distribution(tmp_path: Path) -> None:
    """The same draws as without it. Accepting guesses by the ratio of probabilities, and drawing from a softmax of what
    is left over where that fails, would draw 0.356, 0.416 and 0.228 there: the test would see it.
    """
    p, q = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]
    target, draft = (
        str(markov_checkpoint(tmp_path / name, markov_table(4, {key: dict(enumerate(row)) for key in range(4)})))
        for name, row in (("target", p), ("draft", q))
    )
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    with LLM(target, seed=9, speculative=f"draft:{draft}", max_num_seqs=600, max_num_batched_tokens=2400) as llm:
        speculator = llm.engine.scheduler.speculator
        assert speculator is not None
        speculator._adaptive = False
        on = [answer.token_ids for answer in llm.generate([[1]] * 600, params)]
    assert speculator.stats.num_draft_tokens > 5000
    with LLM(target, seed=9) as llm:
        assert on == [answer.token_ids for answer in llm.generate([[1]] * 600, params)]
    assert surprise(Counter(token for ids in on for token in ids), p) < MOST_SURPRISE
    assert surprise(Counter({0: 2136, 1: 2496, 2: 1368}), p) > MOST_SURPRISE


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 14}, {"max_num_seqs": 2, "max_num_batched_tokens": 11}])
def test_a_draft_model_changes_nothing(random_model: Callable[..., Path], settings: dict[str, Any]) -> None:
    """The target guesses for itself and is always right; another model hardly ever is."""
    folder, other = random_model("llama"), random_model("llama", seed=7)
    choose = random.Random(4)
    prompts = [[choose.randrange(4, 320) for _ in range(length)] for length in (3, 16, 17, 33, 40, 8)]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "n": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.7, "seed": 3, "top_p": 0.8, "bad_words": ["a", "e"]},
        {"regex": "[a-z ]{30}", "ignore_eos": False},
    ]
    params = [SamplingParams.resolve({"max_tokens": 30, "ignore_eos": True, **given}) for given in options]
    with LLM(str(folder), dtype="float32", seed=5, **settings) as llm:
        off = llm.generate(prompts, params)
    for model, right in ((folder, True), (other, False)):
        with LLM(str(folder), dtype="float32", seed=5, speculative=f"draft:{model}", **settings) as llm:
            speculator = llm.engine.scheduler.speculator
            assert speculator is not None
            speculator._adaptive = False
            on = llm.generate(prompts, params)
            blocks = speculator._proposer._blocks  # type: ignore[attr-defined]
            assert blocks.num_free_blocks == blocks.num_blocks
        assert plain(on) == plain(off)
        assert speculator.stats.num_draft_tokens > 40
        assert (speculator.stats.acceptance_rate > 0.9) == right


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    table = chain_table(8, [1, 2, 3, 1])
    target = markov_checkpoint(tmp_path / "target", table)
    padded = markov_checkpoint(tmp_path / "padded", chain_table(12, [1, 2, 3, 1]), pieces=[f" {i}" for i in range(8)])
    other = markov_checkpoint(tmp_path / "other", table, pieces=[f" {i}" if i < 5 else f"x{i}" for i in range(8)])
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(str(target), speculative=f"draft:{padded}") as llm:
        assert llm.generate([[1]], params)[0].token_ids == [2, 3, 1] * 3
        assert llm.engine.speculation is not None
        assert llm.engine.speculation.num_accepted_tokens > 0
    with pytest.raises(ConfigError, match="id 5"):
        LLM(str(target), speculative=f"draft:{other}")
    with pytest.raises(ConfigError, match="draft:MODEL"):
        LLM(str(target), speculative="draft:")
