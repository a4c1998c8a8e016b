"""Beam search: Hugging Face's `generate` on the same weights, arithmetic on Markov checkpoints."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_infer.engine.beam import BeamSearch
from paged_infer.llm import LLM
from paged_infer.types import Completion, RowError, SamplingParams
from tests.engine.test_logprobs import assert_logprobs, expected_of, prompts_of
from tests.fixtures.checkpoints import hf_model, markov_checkpoint, markov_table

P, A, B, X, Y, Z, W, EOS = range(8)
TREE = {
    P: {A: 0.6, B: 0.4},
    A: {X: 0.35, Y: 0.33, EOS: 0.32},
    B: {Z: 0.9, EOS: 0.1},
    X: {EOS: 0.55, W: 0.45},
    Y: {EOS: 0.5, W: 0.5},
    Z: {EOS: 1.0},
    W: {EOS: 1.0},
    EOS: {EOS: 1.0},
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markov_checkpoint(tmp_path_factory.mktemp("tree"), markov_table(8, TREE), eos_token_id=EOS)


def probability(tokens: list[int]) -> float:
    """Of a path from P through the tree."""
    product = 1.0
    for before, after in zip([P, *tokens], tokens, strict=False):
        product *= TREE[before][after]
    return product


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "second"),
    [
        (0.0, False, [A, X, EOS]),  # not A EOS, which is likelier but was fourth of four when it ended
        (1.0, True, [A, X, EOS]),
        (1.0, False, [A, X, EOS]),
        (1.0, "never", [A, X, W, EOS]),
    ],
)
def test_the_pool_and_the_end_of_a_search(
    tree: Path, length_penalty: float, early_stopping: Any, second: list[int]
) -> None:
    params = SamplingParams(
        n=2, beam_width=2, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=10
    )
    with LLM(str(tree)) as llm:
        best, other = llm.generate([[P]], params)
        (greedy,) = llm.generate([[P]])
    assert best.token_ids == [B, Z, EOS]
    assert other.token_ids == second
    assert greedy.token_ids == [A, X, EOS]
    assert (best.sample, other.sample, best.finish_reason, best.stop_reason) == (0, 1, "stop", None)
    for answer in (best, other):
        expected = math.log(probability(answer.token_ids)) / len(answer.token_ids) ** length_penalty
        assert answer.score == pytest.approx(expected, abs=1e-5)
        assert answer.text == "".join(f" {token}" for token in answer.token_ids[:-1])


def test_length_counts_the_output_alone() -> None:
    """-2.0 over two tokens and -2.7 over three, EOS among them: -1.0 and -0.9, so the longer one wins."""
    search = BeamSearch(2, {9}, 10, length_penalty=1.0, early_stopping=True)
    assert search.num_candidates == 4
    assert search.advance([[]], [([1, 2, 3], [-1.0, -1.2, -9.0])]) == [(0, 1), (0, 2)]
    running = search.advance([[1], [2]], [([9, 4], [-1.0, -2.0]), ([5, 6], [-0.5, -4.0])])
    assert running == [(1, 5), (0, 4)]
    assert search.advance([[2, 5], [1, 4]], [([9, 7], [-1.0, -3.0]), ([8, 9], [-7.0, -8.0])]) == []
    assert [(h.token_ids, h.score) for h in search.finished] == [
        ([2, 5, 9], pytest.approx(-0.9)),
        ([1, 9], pytest.approx(-1.0)),
    ]


def hf_beams(folder: Path, prompt: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    found = hf_model(folder).generate(
        torch.tensor([prompt]),
        do_sample=False,
        pad_token_id=319,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    outputs = []
    for ids in found.sequences[:, len(prompt) :].tolist():
        while ids[-1] == 319:
            ids.pop()
        outputs.append(ids)
    return outputs, found.sequences_scores.tolist()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefix_caching": False, "max_num_batched_tokens": 12},
    {"max_num_seqs": 5},
    {"num_kv_blocks": 18},
    {"num_kv_blocks": 18, "prefix_caching": False, "max_num_batched_tokens": 9},
    {"block_size": 4, "num_kv_blocks": 100},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_random_models_equal_hugging_face(
    random_model: Callable[..., Path], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many searches at once, with rows of other kinds between them, preempted and chunked."""
    monkeypatch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", 0)
    folder = random_model("llama")
    prompts = prompts_of([1, 15, 16, 17, 30, 30, 33, 5], seed=6)
    ends = [list(range(40, 90)), [7], list(range(4, 300, 7)), list(range(4, 300, 5))]
    searches: list[dict[str, Any]] = [
        {"beam_width": 4, "n": 4, "length_penalty": 1.0, "early_stopping": False},
        {"beam_width": 2, "n": 1, "length_penalty": 0.0, "early_stopping": True},
        {"beam_width": 3, "n": 3, "length_penalty": 2.0, "early_stopping": "never"},
        {"beam_width": 4, "n": 2, "length_penalty": -1.0, "early_stopping": "never"},
    ]
    rows: list[tuple[list[int], SamplingParams]] = []
    for i, prompt in enumerate(prompts):
        given = searches[i % 4] | {"stop_token_ids": ends[(i + i // 4) % 4], "max_tokens": 20}
        rows.append(
            (prompt, SamplingParams.resolve({"ignore_eos": True, **given, "repetition_penalty": 1 + i % 2 / 2}))
        )
        rows.append((prompt, SamplingParams(max_tokens=9, ignore_eos=True)))
        rows.append((prompt, SamplingParams(max_tokens=9, ignore_eos=True, n=2, temperature=1.0)))
    with LLM(str(folder), dtype="float32", **settings) as llm:
        answers = llm.generate([prompt for prompt, _ in rows], [params for _, params in rows])
        llm.engine.scheduler.check_invariants()
        blocks = llm.engine.scheduler.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks
        if settings == {"num_kv_blocks": 18}:
            assert llm.engine.scheduler.stats.num_preemptions > 0
    by_row: dict[int, list[Completion]] = {}
    for answer in answers:
        by_row.setdefault(answer.request_id, []).append(answer)
    for row, (prompt, params) in enumerate(rows):
        if params.beam_width == 1:
            assert [len(answer.token_ids) for answer in by_row[row]] == [9] * params.n
            continue
        outputs, scores = hf_beams(
            folder,
            prompt,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            max_new_tokens=20,
            eos_token_id=list(params.stop_token_ids),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            repetition_penalty=params.repetition_penalty,
        )
        assert [answer.sample for answer in by_row[row]] == list(range(params.n))
        assert [answer.token_ids for answer in by_row[row]] == outputs
        assert [answer.score for answer in by_row[row]] == pytest.approx(scores, abs=1e-4)


def test_beams_share_their_blocks(random_model: Callable[..., Path]) -> None:
    folder = random_model("llama")
    prompts = prompts_of([256] * 4)
    params = SamplingParams(beam_width=4, max_tokens=64, ignore_eos=True)
    with LLM(str(folder), dtype="float32", prefix_caching=False) as llm:
        blocks = llm.engine.scheduler.block_manager
        peak, take = 0, blocks._take

        def counted() -> int:
            nonlocal peak
            block = take()
            peak = max(peak, blocks.num_blocks - blocks.num_free_blocks)
            return block

        blocks._take = counted  # type: ignore[method-assign]
        llm.generate(prompts, params)
    unshared = 4 * 4 * (320 // 16)
    assert peak <= 0.45 * unshared


def test_options_and_reports_of_a_search(random_model: Callable[..., Path]) -> None:
    folder = random_model("llama")
    (prompt,) = prompts_of([20])
    choose = random.Random(2)
    allowed = sorted(choose.sample(range(4, 320), 40))
    params = SamplingParams.resolve(
        {
            "beam_width": 3,
            "n": 3,
            "max_tokens": 12,
            "allowed_token_ids": allowed,
            "min_tokens": 5,
            "stop_token_ids": allowed[:20],
            "prompt_logprobs": 1,
            "temperature": 2.0,
        }
    )
    with LLM(str(folder), dtype="float32") as llm:
        answers = llm.generate([prompt], params)
        again = llm.generate([prompt], params)
        (scored,) = llm.generate([prompt], SamplingParams(beam_width=3, n=1, max_tokens=0, prompt_logprobs=1))
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    for answer in answers:
        assert set(answer.token_ids) <= set(allowed)
        assert len(answer.token_ids) >= 5
        assert not set(answer.token_ids[:4]) & set(allowed[:20])
        row = expected_of(folder, [*prompt, *answer.token_ids])[len(prompt) :]
        total = sum(float(x[token]) for x, token in zip(row, answer.token_ids, strict=True))
        assert answer.score == pytest.approx(total / len(answer.token_ids), abs=1e-4)
    assert_logprobs(answers[0].prompt_logprobs, prompt, expected_of(folder, prompt), 1)
    assert answers[1].prompt_logprobs is None
    assert_logprobs(scored.prompt_logprobs, prompt, expected_of(folder, prompt), 1)


def test_searches_that_cannot_be_run_fail_alone(tree: Path) -> None:
    table = markov_table(8, TREE)
    table[Z] = math.nan
    with LLM(str(tree), max_num_seqs=3, num_kv_blocks=6) as llm:
        search = SamplingParams(beam_width=2, max_tokens=8)
        answers = llm.generate(
            [[P]] * 4,
            [
                search,
                SamplingParams(beam_width=4, max_tokens=8),
                SamplingParams(beam_width=3, max_tokens=80),
                search,
            ],
        )
    assert [answer.error_type for answer in answers] == [None, "invalid_parameter", "kv_cache_too_small", None]
    assert "max_num_seqs" in str(answers[1].error)
    for name, value in (("stop", "x"), ("logprobs", 1)):
        with pytest.raises(RowError) as caught:
            SamplingParams.resolve({"beam_width": 2, name: value})
        assert caught.value.field == name


def test_logits_that_are_not_finite_end_the_search(tmp_path: Path) -> None:
    table = markov_table(8, TREE)
    table[Z, Z] = math.inf
    with LLM(str(markov_checkpoint(tmp_path, table, eos_token_id=EOS))) as llm:
        failed, fine = llm.generate([[P], [A]], SamplingParams(beam_width=2, max_tokens=9))
        assert llm.engine.scheduler.num_running == 0
    assert failed.error_type == "non_finite_logits"
    assert fine.token_ids == [Y, W, EOS]  # ln(0.33 * 0.5) / 3 is the best score
