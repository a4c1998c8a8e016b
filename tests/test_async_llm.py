"""The API for event loops: rows that join while others run, cancellation, failure, whose loop it is."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paged_infer import LLM, AsyncLLM, SamplingParams
from paged_infer.config import ConfigError
from paged_infer.engine.runner import ModelRunner
from paged_infer.types import RowError
from tests.fixtures.checkpoints import hf_greedy, markov_checkpoint, markov_table


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama")


@pytest.fixture
def llm(llama: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM(str(llama), dtype="float32", max_num_seqs=16) as llm:
        yield llm


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_many_coroutines_get_their_own_answers(llama: Path, llm: AsyncLLM) -> None:
    prompts = [[4 + i, 5, 6 + i % 7] for i in range(60)]
    expected, margins = hf_greedy(llama, prompts, 6)

    async def all_of_them() -> list[list[int]]:
        async def one(i: int) -> list[int]:
            await asyncio.sleep(0.002 * (i % 5))  # some arrive while others run
            (answer,) = await llm.generate(prompts[i], greedy(6))
            return answer.token_ids

        return await asyncio.gather(*(one(i) for i in range(len(prompts))))

    for _ in range(2):  # and it is no matter which loop asks
        for found, wanted, gaps in zip(asyncio.run(all_of_them()), expected, margins, strict=True):
            sure = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(gaps))
            assert found[:sure] == wanted[:sure]


def test_a_row_joins_those_that_run(llm: AsyncLLM) -> None:
    async def scenario() -> list[str]:
        order: list[str] = []

        async def ask(name: str, max_tokens: int) -> None:
            await llm.generate([5, 6, 7], greedy(max_tokens))
            order.append(name)

        long = asyncio.create_task(ask("long", 450))
        await asyncio.sleep(0.05)
        assert not long.done()
        await ask("short", 1)
        await long
        return order

    assert asyncio.run(scenario()) == ["short", "long"]


def test_a_cancelled_row_leaves_the_engine(llama: Path) -> None:
    """With one place in the batch, the next row can only run once the cancelled one is out."""

    async def scenario() -> None:
        async with AsyncLLM(str(llama), max_num_seqs=1) as llm:
            endless = [asyncio.create_task(llm.generate([5], greedy(500))) for _ in range(50)]
            await asyncio.sleep(0.05)
            for task in endless:
                task.cancel()
            (answer,) = await asyncio.wait_for(llm.generate([6], greedy(2)), 10)
            assert len(answer.token_ids) == 2
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*endless, return_exceptions=True)
            )

    asyncio.run(scenario())


def test_chats_scores_and_samples_are_those_of_the_other_api(llama: Path, llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Once"}]
    sampled = SamplingParams(max_tokens=3, temperature=1.0, seed=3, n=2)

    async def ask() -> tuple[object, ...]:
        return await asyncio.gather(
            llm.chat(messages, greedy(4), continue_final_message=True, add_generation_prompt=False),
            llm.generate({"messages": messages}, sampled),
            llm.score("Once upon", " a time"),
        )

    chat, samples, score = asyncio.run(ask())
    with LLM(str(llama), dtype="float32") as other:
        assert other.tokenizer.render_chat(messages, continue_final_message=True).endswith("Once")
        options = {"continue_final_message": True, "add_generation_prompt": False}
        assert [c.token_ids for c in chat] == [c.token_ids for c in other.chat(messages, greedy(4), **options)]
        assert [c.token_ids for c in samples] == [c.token_ids for c in other.chat(messages, sampled)]
        (expected,) = other.score(["Once upon"], [" a time"])
    assert score.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_what_makes_no_sense_fails_alone(llm: AsyncLLM) -> None:
    async def ask() -> list[object]:
        return await asyncio.gather(
            llm.generate(5),  # type: ignore[arg-type]
            llm.score([5], []),
            llm.score([5] * 600, [6]),
            llm.generate([99999]),
            llm.generate([5], greedy(1)),
            return_exceptions=True,
        )

    no_prompt, nothing, too_long, bad_id, good = asyncio.run(ask())
    assert isinstance(no_prompt, TypeError)
    assert isinstance(nothing, ValueError)
    assert isinstance(too_long, RowError)
    assert [c.finish_reason for c in bad_id] == ["error"]  # type: ignore[attr-defined]
    assert [c.finish_reason for c in good] == ["length"]  # type: ignore[attr-defined]


def test_a_failing_engine_fails_all_who_wait_with_the_reason(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    submit = ModelRunner.submit

    def failing(self: ModelRunner, batch: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise MemoryError("no room for the batch")
        submit(self, batch)  # type: ignore[arg-type]

    async def scenario() -> None:
        async with AsyncLLM(str(llama), max_num_seqs=2) as llm:
            answers = await asyncio.gather(*(llm.generate([5], greedy(100)) for _ in range(6)), return_exceptions=True)
            assert all(isinstance(a, RuntimeError) and "no room for the batch" in str(a) for a in answers)
            with pytest.raises(RuntimeError, match="no room for the batch"):
                await llm.generate([5])

    monkeypatch.setattr(ModelRunner, "submit", failing)
    asyncio.run(scenario())


def test_closing_fails_those_who_wait_and_ends_the_thread(llama: Path) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(str(llama))
        waiting = asyncio.create_task(llm.generate([5], greedy(500)))
        await asyncio.sleep(0.05)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await llm.generate([5])

    asyncio.run(scenario())
    assert not any(thread.name == "paged-infer engine" for thread in threading.enumerate())


def test_one_that_is_forgotten_ends_its_thread(llama: Path) -> None:
    llm = AsyncLLM(str(llama))
    forgotten = weakref.ref(llm)
    del llm
    gc.collect()
    assert forgotten() is None
    assert not any(thread.name == "paged-infer engine" for thread in threading.enumerate())


def test_settings_that_cannot_be_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match="no such"):
        AsyncLLM("/nowhere/at/all")


def test_noise_is_that_of_the_seed_whoever_else_runs(tmp_path: Path) -> None:
    flat = markov_checkpoint(tmp_path, markov_table(32, {t: dict.fromkeys(range(32), 1 / 32) for t in range(32)}))
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7)

    async def ask(beside: int) -> list[int]:
        async with AsyncLLM(str(flat)) as llm:
            others = [llm.generate([1], SamplingParams(max_tokens=30, temperature=1.0)) for _ in range(beside)]
            *_, (answer,) = await asyncio.gather(*others, llm.generate([1], params))
            return answer.token_ids

    assert asyncio.run(ask(0)) == asyncio.run(ask(9))
