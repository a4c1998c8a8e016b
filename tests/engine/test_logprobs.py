"""Log-probabilities of outputs and prompts against Hugging Face in float64, whatever the engine does meanwhile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_infer.engine import logprobs as logprobs_module
from paged_infer.llm import LLM
from paged_infer.types import Logprobs, RowError, SamplingParams
from tests.fixtures.checkpoints import hf_logits, markov_checkpoint, markov_table

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama")


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(4, 320) for _ in range(length)] for length in lengths]


def options(max_tokens: int, **given: Any) -> SamplingParams:
    return SamplingParams.resolve({"max_tokens": max_tokens, "ignore_eos": True, **given})


def expected_of(folder: Path, ids: Sequence[int]) -> Tensor:
    """[len(ids), V]: row p = log-probabilities of the token at position p; the first row is NaN."""
    after = hf_logits(folder, ids).double().log_softmax(dim=-1)
    return torch.cat([torch.full_like(after[:1], math.nan), after[:-1]])


def assert_logprobs(found: Logprobs | None, ids: Sequence[int], expected: Tensor, k: int) -> None:
    """`expected` [P, V] float64 belongs to the positions of `ids` [P]."""
    assert found is not None
    assert list(found.token_ids) == list(ids)
    columns = (found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs)
    for token, row, logprob, rank, top_ids, top in zip(ids, expected, *columns, strict=True):
        if row.isnan().all():
            assert (rank, top_ids, top) == (0, [], [])
            assert math.isnan(logprob)
            continue
        assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        margins = (row - row[token]).abs()
        margins[token] = math.inf
        if float(margins.min()) > TOLERANCE:
            assert rank == 1 + int((row > row[token]).sum())
        assert len(top_ids) == len(top) == k
        assert len(set(top_ids)) == k
        assert top == pytest.approx(row.topk(k).values.tolist(), abs=TOLERANCE)
        assert top == pytest.approx(row[list(top_ids)].tolist(), abs=TOLERANCE)
        assert top == sorted(top, reverse=True)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("k", [0, 1, 5, 320])
def test_outputs_equal_hugging_face(llama: Path, backend: str, k: int) -> None:
    """Raw distribution, whatever temperature, truncation, penalties and masks do to the choice."""
    given = [
        options(9, logprobs=k),
        options(9, logprobs=k, temperature=3.0, seed=1, top_k=50),
        options(9, logprobs=k, repetition_penalty=2.0, frequency_penalty=0.5, temperature=1.5, seed=2),
        options(9, logprobs=k, logit_bias={"7": 5.0}, allowed_token_ids=list(range(4, 60))),
        options(9),
    ]
    prompts = prompts_of([3, 20, 33, 18, 5])
    with LLM(str(llama), attention_backend=backend, dtype="float32", max_num_batched_tokens=30) as llm:
        answers = llm.generate(prompts, given)
    for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
        expected = expected_of(llama, [*prompt, *answer.token_ids])[len(prompt) :]
        assert_logprobs(answer.logprobs, answer.token_ids, expected, k)
        total = sum(float(row[token]) for token, row in zip(answer.token_ids, expected, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert answer.prompt_logprobs is None
    assert answers[4].logprobs is None
    assert answers[4].cumulative_logprob is None


@pytest.mark.parametrize("length", [1, 2, 17, 33, 64, 65])
@pytest.mark.parametrize("budget", [1, 7, 16, 32, 512, "N-1", "N"])
def test_prompts_in_chunks_equal_hugging_face(llama: Path, length: int, budget: int | str) -> None:
    tokens = {"N-1": max(1, length - 1), "N": length}.get(str(budget), budget)
    prompts = prompts_of([length, length, 5])
    with LLM(str(llama), dtype="float32", max_num_batched_tokens=tokens) as llm:
        answers = llm.generate(prompts, options(2, prompt_logprobs=2))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_logprobs(answer.prompt_logprobs, prompt, expected_of(llama, prompt), 2)
        assert len(answer.token_ids) == 2


def test_prompts_that_share_a_prefix_in_any_order(llama: Path) -> None:
    stem, x, y = prompts_of([40, 9, 21], seed=4)
    rows = {"x": [*stem, *x], "y": [*stem, *y], "stem": stem}
    for order in (["x", "y", "stem"], ["y", "x", "x"], ["stem", "x", "y"]):
        for settings in ({}, {"prefix_caching": False}, {"max_num_seqs": 1}, {"num_kv_blocks": 5}, {"block_size": 4}):
            with LLM(str(llama), dtype="float32", order="input", **settings) as llm:
                prompts = [rows[name] for name in order]
                for _ in range(2):  # the second time everything is in the cache
                    plain = options(1)
                    answers = llm.generate(
                        [*prompts, *prompts], [options(1, prompt_logprobs=3)] * len(order) + [plain] * len(order)
                    )
                    for prompt, answer in zip(prompts, answers, strict=False):
                        assert_logprobs(answer.prompt_logprobs, prompt, expected_of(llama, prompt), 3)


@pytest.mark.parametrize("budget", [7, 512])
def test_scores_are_kept_with_cached_blocks(llama: Path, budget: int) -> None:
    """The same prompt again, or one with the same beginning, is scored from what its cached blocks hold; more of the
    likeliest than they hold are computed anew.
    """
    stem, x = prompts_of([70, 9], seed=8)
    settings = {"max_num_batched_tokens": budget, "order": "input", "max_num_seqs": 1}
    with LLM(str(llama), dtype="float32", **settings) as llm:
        stats = llm.engine.scheduler.stats
        for prompt, k, cached in (
            (stem, 2, 0),
            (stem, 2, 64),
            (stem, 1, 64),
            ([*stem, *x], 2, 64),
            ([*stem, *x], 0, 64),
            (stem[:64], 2, 48),
            (stem[:65], 2, 64),
            (stem[:49], 2, 48),
            (stem, 5, 0),
            (stem, 5, 64),
            (stem[:20], 2, 16),
        ):
            before = stats.num_cached_tokens
            (answer,) = llm.generate([prompt], options(1, prompt_logprobs=k))
            assert stats.num_cached_tokens - before == answer.cached_tokens == cached
            assert_logprobs(answer.prompt_logprobs, prompt, expected_of(llama, prompt), k)
        (score,) = llm.score([stem[:20]], [stem[20:]])  # within scored blocks, too
        assert stats.num_cached_tokens - before == 16 + 64
        assert_logprobs(score.tokens, stem[20:], expected_of(llama, stem)[20:], 1)
        llm.engine.scheduler.check_invariants()


def test_prompts_that_are_preempted(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_infer.engine.scheduler._GROWTH_BLOCKS", 0)
    prompts = prompts_of([30, 41, 52, 33], seed=5)
    with LLM(str(llama), dtype="float32", num_kv_blocks=11, max_num_batched_tokens=16) as llm:
        answers = llm.generate(prompts, options(40, prompt_logprobs=1, logprobs=1))
        assert llm.engine.scheduler.stats.num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        everything = expected_of(llama, [*prompt, *answer.token_ids])
        assert_logprobs(answer.prompt_logprobs, prompt, everything[: len(prompt)], 1)
        assert_logprobs(answer.logprobs, answer.token_ids, everything[len(prompt) :], 1)


def test_scoring_without_generating(llama: Path) -> None:
    prompt, one = prompts_of([37, 1])
    with LLM(str(llama), dtype="float32", max_model_len=37) as llm:
        answer, short = llm.generate([prompt, one], options(0, prompt_logprobs=1))
        assert llm.engine.stats.output_tokens == 0
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    assert_logprobs(answer.prompt_logprobs, prompt, expected_of(llama, prompt), 1)
    assert_logprobs(short.prompt_logprobs, one, expected_of(llama, one), 1)


def test_prompt_logits_are_made_piece_by_piece(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more rows at a time than the memory set aside for them holds, and the same values."""
    prompt = prompts_of([200])[0]
    with LLM(str(llama), dtype="float32") as llm:
        runner = llm.engine._runner
        rows: list[int] = []
        to_logits = runner._model.logits  # type: ignore[attr-defined]
        monkeypatch.setattr(runner._model, "logits", lambda h: rows.append(len(h)) or to_logits(h))  # type: ignore[attr-defined]
        monkeypatch.setattr(logprobs_module, "_PIECE_BYTES", 4 * 320 * 8)
        (answer,) = llm.generate([prompt], options(1, prompt_logprobs=1))
    assert max(rows) == 8
    assert sum(rows) == 200
    assert_logprobs(answer.prompt_logprobs, prompt, expected_of(llama, prompt), 1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ties_ranks_and_ids_without_text(tmp_path: Path, backend: str) -> None:
    """Ids 10 and up have no text: they are not listed and not ranked, but have their share of the probability."""
    table = markov_table(12, {t: {2: 0.2, 5: 0.2, 7: 0.1, 11: 0.5} for t in range(12)})
    folder = markov_checkpoint(tmp_path, table, pieces=[f" {i}" for i in range(10)])
    with LLM(str(folder), attention_backend=backend) as llm:
        (answer,) = llm.generate([[5, 7]], options(1, logprobs=3, prompt_logprobs=3))
        assert answer.logprobs is not None
        assert answer.prompt_logprobs is not None
    assert answer.token_ids == [2]
    assert answer.logprobs.top_token_ids == [[2, 5, 7]]
    assert answer.logprobs.top_logprobs[0] == pytest.approx([math.log(0.2), math.log(0.2), math.log(0.1)], abs=1e-5)
    assert answer.logprobs.ranks == [1]
    assert answer.prompt_logprobs.ranks == [0, 3]  # two are strictly likelier than 7
    assert answer.prompt_logprobs.logprobs[1] == pytest.approx(math.log(0.1), abs=1e-5)


def test_logprobs_end_with_the_output(tmp_path: Path) -> None:
    table = markov_table(8, {1: {2: 0.9, 3: 0.1}, 2: {3: 0.8, 1: 0.2}, 3: {4: 0.7, 1: 0.3}})
    folder = markov_checkpoint(tmp_path, table, eos_token_id=4)
    with LLM(str(folder)) as llm:
        (answer,) = llm.generate([[1]], SamplingParams(logprobs=0))
    assert answer.token_ids == [2, 3, 4]
    assert answer.logprobs is not None
    assert answer.logprobs.logprobs == pytest.approx([math.log(p) for p in (0.9, 0.8, 0.7)], abs=1e-5)
    assert answer.cumulative_logprob == pytest.approx(math.log(0.9 * 0.8 * 0.7), abs=1e-5)


# --- LLM.score --------------------------------------------------------------------------------------------------------


def test_scores_are_table_entries(tmp_path: Path) -> None:
    transitions = {0: {1: 0.6, 2: 0.4}, 1: {2: 0.7, 3: 0.3}, 2: {3: 0.5, 4: 0.5}, 3: {0: 0.8, 1: 0.2}}
    folder = markov_checkpoint(tmp_path, markov_table(6, transitions), max_position_embeddings=8)
    with LLM(str(folder)) as llm:
        given = [([0, 1], [2, 3]), ([0, 1], [3, 1]), ([3], [0, 1, 2, 4]), ([0, 1], [2, 3, 0, 1, 2, 3, 1])]
        scores = llm.score([context for context, _ in given], [continuation for _, continuation in given])
        expected = [0.7 * 0.5, 0.3 * 0.2, 0.8 * 0.6 * 0.7 * 0.5, 0.7 * 0.5 * 0.8 * 0.6 * 0.7 * 0.5 * 0.2]
        assert [score.logprob for score in scores] == pytest.approx([math.log(p) for p in expected], abs=1e-5)
        # 4 is as likely as 3 after 2, but greedy takes the lower id; the last row has one token more than the model may
        # read, which is not run
        assert [score.is_greedy for score in scores] == [True, False, False, False]
        assert llm.engine.scheduler.stats.num_scheduled_tokens == 3 + 3 + 4 + 8
        assert [list(score.tokens.token_ids) for score in scores] == [continuation for _, continuation in given]
        with pytest.raises(RowError, match="10 tokens"):
            llm.score([[0, 1]], [[2, 3, 0, 1, 2, 3, 0, 1]])
        (unanswered,) = llm.generate([[0, 1, 2, 3, 0, 1, 2, 3, 0]], SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert unanswered.error_type == "prompt_too_long"
        with pytest.raises(ValueError, match="continuation"):
            llm.score([[0, 1]], [[]])
        assert llm.score(["0 1".join([" ", ""])], [" 2 3"])[0].logprob == pytest.approx(math.log(0.35), abs=1e-5)


def test_contexts_are_computed_once(llama: Path) -> None:
    """Four continuations of one context: its blocks come from the cache, and only what is asked for is scored."""
    context = prompts_of([70])[0]
    continuations = prompts_of([1, 2, 5, 9], seed=1)
    with LLM(str(llama), dtype="float32") as llm:
        scores = llm.score([context] * 4, continuations)
        assert llm.engine.scheduler.stats.num_cached_tokens == 3 * 64
        assert llm.engine.scheduler.stats.num_scheduled_tokens <= 4 * 70 + 17 - 3 * 64
    for continuation, score in zip(continuations, scores, strict=True):
        expected = expected_of(llama, [*context, *continuation])[70:]
        assert_logprobs(score.tokens, continuation, expected, 1)


@pytest.mark.full
def test_memory_of_a_long_document_with_a_large_vocabulary(random_model: Callable[..., Path]) -> None:
    """All logits of it would be 20 GB, and those of one step 1.2 GB, as would be its attention scores."""
    length, vocab_size = 32_768, 150_000
    folder = random_model("llama", vocab_size=vocab_size, hidden_size=32, head_dim=16, max_position_embeddings=length)
    ids = prompts_of([length], seed=3)[0]
    with LLM(str(folder), dtype="float32", num_kv_blocks=length // 16 + 1, max_num_batched_tokens=2048) as llm:
        llm.score([ids[:40]], [ids[40:60]])
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        (score,) = llm.score([ids[:1]], [ids[1:]])
        assert _memory("VmHWM") - before < 1e9
    assert len(score.tokens.logprobs) == length - 1
    assert score.logprob == pytest.approx(-length * math.log(vocab_size), rel=0.2)


def _memory(field: str) -> int:
    """Bytes, out of the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
