"""The Python API: lazy streams, calls that share the engine, what is given up, what is freed."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paged_infer import LLM, AsyncLLM, SamplingParams
from paged_infer.types import RowError
from tests.fixtures.checkpoints import hf_greedy, markov_checkpoint, markov_table


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After t comes t + 1; 9 ends."""
    table = markov_table(10, {t: {t + 1: 1.0} for t in range(9)})
    return markov_checkpoint(tmp_path_factory.mktemp("chain"), table, eos_token_id=9)


def test_a_stream_draws_prompts_as_it_needs_them_and_yields_what_is_done(chain: Path) -> None:
    drawn = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal drawn
        for i in range(1000):
            drawn += 1
            yield [0] if i == 0 else [7]  # nine more tokens, or two

    with LLM(str(chain), max_num_seqs=4) as llm:
        done = []
        for completion in llm.stream(prompts(), lookahead=8):
            if not done:
                assert drawn <= 4 + 2 * 8
            done.append(completion)
        assert drawn == 1000
        assert not llm.engine.has_unfinished()
    rows = [completion.request_id for completion in done]
    assert sorted(rows) == list(range(1000))
    assert rows[0] != 0  # the long row does not hold up the short ones
    assert {completion.request_id: completion.token_ids for completion in done}[0] == list(range(1, 10))


def test_a_stream_with_options_of_each_row_and_rows_that_fail(chain: Path) -> None:
    options = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2), SamplingParams()]
    with LLM(str(chain), max_model_len=16) as llm:
        found = {c.request_id: c for c in llm.stream([[3], [0] * 17, {"messages": []}], options)}
        assert found[0].token_ids == [4]
        assert found[1].error_type == "prompt_too_long"
        assert found[2].error_type == "chat_template"
        with pytest.raises(ValueError, match="shorter"):
            list(llm.stream([[3], [4]], options[:1]))
        assert not llm.engine.has_unfinished()


def test_leaving_a_stream_takes_its_rows_out_of_the_engine(llama: Path) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0, n=3)
    with LLM(str(llama), num_kv_blocks=64, max_num_seqs=8) as llm:
        for prompts in ([[5, 6, 7]] * 20, [[5, 6, 7] * 40] * 3):
            stream = llm.stream(
                itertools.chain([[4]], prompts),
                itertools.chain([SamplingParams(max_tokens=1)], itertools.repeat(endless, len(prompts))),
            )
            next(stream)
            stream.close()
            assert not llm.engine.scheduler.num_waiting
            assert not llm.engine.num_running
            llm.engine.scheduler.check_invariants()
        ids, _ = hf_greedy(llama, [[5, 6, 7]], 8)
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids == ids[0]


def test_samples_that_have_not_started_can_be_given_up(llama: Path) -> None:
    """Followers start when their leader's prompt is stored; until then nobody but the leader knows them."""
    sampled = SamplingParams(max_tokens=4, temperature=1.0, n=4)
    with LLM(str(llama), max_num_batched_tokens=8, max_num_seqs=8) as llm:
        call = llm.calls.open()
        call.add(0, [5] * 40, sampled)
        call.add(1, [6] * 40, sampled)
        llm.calls.step()
        call.abandon_all()
        assert not llm.engine.scheduler.has_work
        llm.engine.scheduler.check_invariants()
        assert [c.sample for c in llm.generate([[6] * 40], sampled)] == [0, 1, 2, 3]


def test_calls_within_a_stream_get_their_own_answers(chain: Path) -> None:
    with LLM(str(chain), max_num_seqs=2) as llm:
        texts = []
        for completion in llm.stream([[t] for t in (0, 5, 6, 7)]):
            (other,) = llm.generate([[8]])
            (score,) = llm.score([[1]], [[2, 3]])
            texts.append((completion.request_id, len(completion.token_ids), other.token_ids, score.is_greedy))
        assert sorted(texts) == [(0, 9, [9], True), (1, 4, [9], True), (2, 3, [9], True), (3, 2, [9], True)]


def test_a_failing_step_leaves_nothing_behind(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(chain)) as llm:
        runner = llm.engine._runner
        with monkeypatch.context() as patch:
            patch.setattr(type(runner), "submit", lambda self, batch: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([[0]] * 3)
        assert not llm.engine.num_running
        assert not llm.engine.num_waiting


def test_beam_search_returns_the_beams_of_each_prompt(tmp_path: Path) -> None:
    table = markov_table(6, {0: {1: 0.6, 2: 0.4}, 1: {3: 0.5, 4: 0.5}, 2: {5: 1.0}, 3: {5: 1.0}, 4: {5: 1.0}})
    with LLM(str(markov_checkpoint(tmp_path, table, eos_token_id=5))) as llm:
        first, second, failed = llm.beam_search([[0], [2], []], beam_width=2, max_tokens=3, length_penalty=0.0)
        assert [beam.token_ids for beam in first] == [[2, 5], [1, 3, 5]]  # 0.4 and 0.3; greedy starts with 1
        assert second[0].token_ids == [5]
        assert [beam.error_type for beam in failed] == ["empty_prompt"]
        assert len(llm.beam_search([[0]], beam_width=3, n=1)[0]) == 1
        with pytest.raises(RowError, match="beam_width"):
            llm.beam_search([[0]], beam_width=2, n=3)


def test_scores_come_as_they_are_done(chain: Path) -> None:
    with LLM(str(chain), max_num_seqs=1) as llm:
        scores = llm.stream_scores([[0], [1], [2]], [[1, 2], [2, 3], [4, 5]])
        rows = [next(scores)[0]]
        assert llm.engine.num_waiting == 2
        rows += [row for row, _ in scores]
        assert sorted(rows) == [0, 1, 2]
        scores = llm.stream_scores([[0]] * 3, [[1]] * 3)
        next(scores)
        scores.close()  # type: ignore[attr-defined]
        assert not llm.engine.has_unfinished()


def test_closing_frees_model_and_cache(llama: Path) -> None:
    with LLM(str(llama)) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        runner = llm.engine._runner
        kept = [weakref.ref(runner._model), weakref.ref(runner._kv)]  # type: ignore[attr-defined]
        del runner
        unfinished = llm.stream([[5]] * 3)
        next(unfinished)
    assert [reference() for reference in kept] == [None, None]
    for call in (lambda: llm.generate(["x"]), lambda: llm.score(["x"], ["y"]), lambda: list(llm.stream(["x"]))):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    unfinished.close()
    llm.close()


def test_calls_that_make_no_sense_say_why(chain: Path) -> None:
    with LLM(str(chain)) as llm:
        calls: list[tuple[Callable[[], object], type[Exception], str]] = [
            (lambda: llm.generate([[1]], {"n": 1}), TypeError, r"params: expected SamplingParams\(\*\*{'n': 1}\)"),
            (lambda: llm.generate([[1], [2]], [SamplingParams()]), ValueError, "1 sampling params for 2 prompts"),
            (lambda: llm.score([[1], [2]], [[3]]), ValueError, "2 contexts for 1 continuations"),
            (lambda: llm.score([[1]], [[]]), ValueError, "at least one token before it are needed"),
            (lambda: llm.score([{"messages": []}], [[3]]), RowError, "no default chat template|messages is empty"),
        ]
        for call, kind, message in calls:
            with pytest.raises(kind, match=message):
                call()


@pytest.mark.full
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_closing_gives_memory_back_to_the_system(
    kind: type[LLM] | type[AsyncLLM], random_model: Callable[..., Path]
) -> None:
    """Weights of 300 MB. The first round pays for what a process keeps: code, thread pools, compiled kernels."""
    folder = random_model("llama", vocab_size=150_000, hidden_size=256, num_attention_heads=8)
    memory = psutil.Process().memory_info
    outside, inside = [], []
    for _ in range(4):
        with kind(str(folder), dtype="float32", num_kv_blocks=4096) as llm:
            answers = llm.generate({"prompt_token_ids": [5, 6, 7] * 50}, SamplingParams(max_tokens=4))
            if isinstance(llm, AsyncLLM):
                asyncio.run(answers)
            inside.append(memory().rss)
        del llm, answers
        outside.append(memory().rss)
        assert [thread.name for thread in threading.enumerate() if "paged-infer" in thread.name] == []
    assert min(inside) - outside[0] > 250e6
    assert max(outside[1:]) - outside[0] < 30e6
