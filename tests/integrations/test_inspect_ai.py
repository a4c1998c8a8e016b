"""Inspect: an offline task end to end, with Hugging Face as the oracle of what the model answers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="inspect-ai is not installed (make test-harness installs it)")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolInfo
from transformers import AutoTokenizer

import paged_infer.integrations.inspect_ai as integration
from paged_infer.types import RowError
from tests.fixtures.checkpoints import hf_greedy, markov_checkpoint, markov_table

QUESTIONS = ["What is snow?", "Who wrote this?", "Is it so?", "Why?"] * 3


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama")


@pytest.fixture
def model(llama: Path) -> Iterator[Model]:
    model = get_model(f"paged-infer/{llama}", dtype="float32", memoize=False)
    yield model
    asyncio.run(model.api.aclose())
    assert engine_threads() == 0


def expected(folder: Path, question: str, max_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (answer,), _ = hf_greedy(folder, [ids], max_tokens, stop_ids={1})
    return tokenizer.decode(answer, skip_special_tokens=True)


def engine_threads() -> int:
    return sum(thread.name == "paged-infer engine" for thread in threading.enumerate())


def test_a_task_runs_offline(llama: Path, model: Model, tmp_path: Path) -> None:
    assert model.api.max_connections() == 256
    assert engine_threads() == 0
    targets = {question: expected(llama, question, 5) for question in QUESTIONS}
    samples = [Sample(input=question, target=targets[question]) for question in QUESTIONS]
    samples.append(Sample(input="What?", target="something that this model does not say"))
    (log,) = eval(
        Task(dataset=samples, solver=generate(), scorer=includes(ignore_case=False)),
        model=model,
        max_tokens=5,
        temperature=0.0,
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "success", log.error
    assert engine_threads() == 1  # Inspect makes the model again to look up its name
    assert log.samples is not None
    assert [sample.output.completion for sample in log.samples[:-1]] == [targets[question] for question in QUESTIONS]
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(len(QUESTIONS) / len(samples))
    usage = log.samples[0].output.usage
    assert usage is not None
    assert usage.output_tokens == 5
    assert usage.total_tokens == usage.input_tokens + (usage.input_tokens_cache_read or 0) + 5


def test_settings_reach_the_engine(model: Model) -> None:
    async def ask() -> None:
        options = GenerateConfig(
            max_tokens=6, temperature=1.0, seed=5, num_choices=3, logprobs=True, top_logprobs=2, stop_seqs=["zzzz"]
        )
        output = await model.generate("Hello", config=options)
        assert len(output.choices) == 3
        assert {choice.stop_reason for choice in output.choices} <= {"stop", "max_tokens"}
        logprobs = output.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.content) <= 6
        assert all(entry.top_logprobs is not None and len(entry.top_logprobs) == 2 for entry in logprobs.content)
        again = await model.generate("Hello", config=options)
        assert [c.message.text for c in again.choices] == [c.message.text for c in output.choices]
        assert await model.api.count_text_tokens("Hello there") == len(await model.api.tokenize("Hello there"))

    asyncio.run(ask())


def test_what_is_too_long_says_so_and_what_is_wrong_raises(model: Model) -> None:
    async def ask() -> None:
        output = await model.generate("word " * 2000)
        assert output.stop_reason == "model_length"
        full = await model.generate("word " * 40, config=GenerateConfig(max_tokens=2000, logit_bias={1: -1e9, 3: -1e9}))
        assert full.stop_reason in ("model_length", "stop")
        with pytest.raises(RowError, match="temperature"):
            await model.api.generate([ChatMessageUser(content="x")], [], "auto", GenerateConfig(temperature=-1.0))

    asyncio.run(ask())


def test_a_model_without_a_chat_template_continues_a_single_text(tmp_path: Path) -> None:
    chain = markov_checkpoint(tmp_path, markov_table(8, {t: {t + 1: 1.0} for t in range(7)}), eos_token_id=7)

    async def ask() -> str:
        model = get_model(f"paged-infer/{chain}", memoize=False)
        try:
            with pytest.raises(RowError, match="chat template"):
                await model.generate([ChatMessageSystem(content=" 1"), ChatMessageUser(content=" 2")])
            return (await model.generate(" 1 2")).completion
        finally:
            await model.api.aclose()

    assert asyncio.run(ask()).strip() == "3 4 5 6"


def test_tool_calls_are_read() -> None:
    tools = [ToolInfo(name="add", description="adds")]
    text, (call,) = integration.split_tool_calls(
        'Yes. <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', tools
    )
    assert (text, call.function, call.arguments, call.parse_error) == ("Yes.", "add", {"x": 1}, None)
    assert integration.split_tool_calls('{"name": "add", "parameters": {}}', tools)[1][0].function == "add"
    assert integration.split_tool_calls('{"name": "sub", "arguments": {}}', tools)[1] == []
    assert integration.split_tool_calls("No call at all", tools) == ("No call at all", [])
    for bad in ("{", "[]", '{"name": 1}', '{"arguments": {}}', '{"name": "add", "arguments": [1]}'):
        _, (call,) = integration.split_tool_calls(f"<tool_call>{bad}", tools)
        assert call.parse_error is not None


def test_the_entry_point_names_the_module() -> None:
    entries = [e for e in importlib.metadata.entry_points(group="inspect_ai") if e.name == "paged-infer"]
    if not entries:
        pytest.skip("this package is not installed, or was before it had the entry point")
    assert entries[0].load() is integration
