"""`deterministic`: to the last bit of a log-probability, a row's results are those it has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_infer.config import ConfigError
from paged_infer.llm import LLM
from paged_infer.types import Completion, SamplingParams
from tests.engine.test_engine import prompts_of

LENGTHS = [700, 3, 530, 17, 640, 64]
"""Tokens, past and before what attention takes as one part."""


def answers(folder: Path, prompts: list[list[int]], **settings: Any) -> list[Completion]:
    """Of the prompts at once, then of the last one again."""
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7 * (i % 2), seed=i, logprobs=2)
        for i in range(len(prompts))
    ]
    with LLM(str(folder), deterministic=True, **settings) as llm:
        return [*llm.generate(prompts, params), *llm.generate(prompts[-1:], params[-1:])]


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("llama", {}, {"dtype": "float32"}),
        ("mistral", {"sliding_window": 70}, {"dtype": "bfloat16"}),
        pytest.param("llama", {}, {"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.full),
        pytest.param(
            "llama", {"intermediate_size": 128}, {"dtype": "bfloat16", "quantization": "int4"}, marks=pytest.mark.full
        ),
        pytest.param("mistral", {"sliding_window": 70}, {"dtype": "float32"}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", {}, {"dtype": "bfloat16"}, marks=pytest.mark.full),
    ],
)
def test_the_batch_changes_no_bit(
    random_model: Callable[..., Path], family: str, config: dict[str, int], options: dict[str, Any]
) -> None:
    """One at a time, together, in chunks of three sizes, behind a cached prefix, in a small pool, with guesses."""
    folder = random_model(family, max_position_embeddings=1024, **config)
    prompts = prompts_of(LENGTHS)
    prompts.append([*prompts[0][:600], 5, 6])
    together = answers(folder, prompts, **options)
    assert together[-1].cached_tokens >= 592
    for settings in (
        {"max_num_batched_tokens": 16, "max_num_seqs": 1, "prefix_caching": False},
        {"max_num_batched_tokens": 600},
        {"max_num_batched_tokens": 131, "num_kv_blocks": 60, "max_model_len": 900},
        {"speculative": "ngram", "num_speculative_tokens": 3},
    ):
        for got, expected in zip(answers(folder, prompts, **options, **settings), together, strict=True):
            assert got.token_ids == expected.token_ids
            assert got.logprobs == expected.logprobs


def test_what_cannot_promise_it_is_refused(random_model: Callable[..., Path]) -> None:
    folder = str(random_model("llama"))
    with pytest.raises(ConfigError, match="deterministic: the products of plain torch"):
        LLM(folder, deterministic=True, attention_backend="reference")
    with pytest.raises(ConfigError, match="deterministic needs a model that runs natively"):
        LLM(folder, deterministic=True, model_impl="transformers")
    with pytest.raises(ConfigError, match="heads of 24"):
        LLM(str(random_model("llama", head_dim=24)), deterministic=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(folder, deterministic=True, tensor_parallel_size=2)
