"""Several samples of one prompt: independent draws over one prefill."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from paged_infer.llm import LLM
from paged_infer.types import SamplingParams
from tests.engine.test_logprobs import assert_logprobs, expected_of, prompts_of
from tests.fixtures.checkpoints import markov_checkpoint, markov_table

SETTINGS: list[dict[str, object]] = [
    {},
    {"prefix_caching": False},
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 5, "prefix_caching": False},
    {"num_kv_blocks": 8},
    {"num_kv_blocks": 8, "prefix_caching": False},
    {"block_size": 4, "num_kv_blocks": 40},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samples_are_what_the_model_gives_after_their_own_tokens(
    random_model: Callable[..., Path], settings: dict[str, object]
) -> None:
    """Log-probabilities tell whether each sample reads its own keys; seeds make the draws the same everywhere."""
    folder = random_model("llama")
    prompts = [*prompts_of([1, 5, 16, 17, 33, 40]), prompts_of([40])[0]]
    params = [
        SamplingParams(n=n, temperature=1.0, seed=n, max_tokens=30, ignore_eos=True, logprobs=0, prompt_logprobs=1)
        for n in (3, 1, 4, 2, 5, 1, 6)
    ]
    with LLM(str(folder), dtype="float32", **settings) as llm:
        answers = llm.generate(prompts, params)
        llm.engine.scheduler.check_invariants()
        blocks = llm.engine.scheduler.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks
    rows = [(row, sample) for row, given in enumerate(params) for sample in range(given.n)]
    assert [(answer.request_id, answer.sample) for answer in answers] == rows
    for answer in answers:
        prompt = prompts[answer.request_id]
        everything = expected_of(folder, [*prompt, *answer.token_ids])
        assert_logprobs(answer.logprobs, answer.token_ids, everything[len(prompt) :], 0)
        assert (answer.prompt_logprobs is not None) == (answer.sample == 0)
        assert answer.prompt_tokens == len(prompt)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)


@pytest.fixture(scope="module")
def coin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.25, 4: 0.15}
    return markov_checkpoint(tmp_path_factory.mktemp("coin"), markov_table(8, dict.fromkeys(range(8), row)))


def test_samples_are_reproducible_and_the_first_is_the_only_one(coin: Path) -> None:
    given = SamplingParams(n=8, temperature=1.0, seed=7, max_tokens=12)
    outputs = []
    for settings in ({}, {"max_num_seqs": 3}, {"num_kv_blocks": 3}, {"max_num_batched_tokens": 2}):
        with LLM(str(coin), **settings) as llm:
            answers = llm.generate([[1, 2, 3], [4]], [given, SamplingParams(temperature=1.0, max_tokens=40)])
            outputs.append([answer.token_ids for answer in answers[:8]])
    with LLM(str(coin)) as llm:
        (alone,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=1.0, seed=7, max_tokens=12))
    assert all(output == outputs[0] for output in outputs)
    assert len({tuple(ids) for ids in outputs[0]}) == 8
    assert outputs[0][0] == alone.token_ids


def test_samples_are_independent_draws(coin: Path) -> None:
    with LLM(str(coin), seed=3) as llm:
        answers = llm.generate([[1]] * 40, SamplingParams(n=25, temperature=1.0, max_tokens=3))
    counts = Counter(token for answer in answers for token in answer.token_ids)
    expected = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.25, 4: 0.15}
    # 99.99 % quantile for four degrees of freedom
    assert sum((counts[i] - 3000 * p) ** 2 / (3000 * p) for i, p in expected.items()) < 23.5
    pairs = Counter((a.token_ids[0], b.token_ids[0]) for a, b in itertools.pairwise(answers) if b.sample)
    total = sum(pairs.values())
    joint = {(i, j): p * q for i, p in expected.items() for j, q in expected.items()}
    # 99.99 % quantile for 24 degrees of freedom
    assert sum((pairs[pair] - total * p) ** 2 / (total * p) for pair, p in joint.items()) < 59


def test_the_prompt_is_stored_once(random_model: Callable[..., Path]) -> None:
    """Eight samples of a 200-token prompt: 12 full blocks once, and two blocks of its own for each sample."""
    folder = random_model("llama")
    given = SamplingParams(n=8, temperature=1.0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), dtype="float32", prefix_caching=False) as llm:
        blocks = llm.engine.scheduler.block_manager
        used: list[int] = []
        llm.engine.add(llm_request(llm, prompts_of([200])[0], given))
        while llm.engine.has_unfinished():
            llm.engine.step()
            used.append(blocks.num_blocks - blocks.num_free_blocks)
        stats = llm.engine.scheduler.stats
    assert max(used) == 12 + 8
    assert stats.num_scheduled_tokens == 199 + 8 * 8


def llm_request(llm: LLM, prompt: list[int], params: SamplingParams):  # type: ignore[no-untyped-def]
    from paged_infer.types import Request

    return Request(0, prompt, params, noise_key=1)


def test_a_row_fails_as_a_whole(tmp_path: Path) -> None:
    """One sample meets logits that are not finite: the row is one error, its other samples are gone."""
    table = markov_table(8, {1: {2: 0.5, 3: 0.5}, 2: {2: 1.0}, 4: {4: 1.0}})
    table[3, 5] = float("inf")
    with LLM(str(markov_checkpoint(tmp_path, table))) as llm:
        params = [SamplingParams(n=6, temperature=1.0, seed=1, max_tokens=5), SamplingParams(max_tokens=5)]
        answers = llm.generate([[1], [4]], params)
        assert not llm.engine.has_unfinished()
        assert llm.engine.scheduler.num_running == 0
    assert [answer.finish_reason for answer in answers] == ["error", "length"]
    assert answers[0].error_type == "non_finite_logits"
    assert answers[1].token_ids == [4] * 5
