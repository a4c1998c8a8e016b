"""Every feature beside every other: what a row gets does not depend on what else is going on.

Rows of all kinds run together under combinations of settings that hold every pair of them. Each must come out as it
does alone, on the plain torch backend, with no prefix cache, nothing preempted and nothing guessed; those plain answers
are held against Hugging Face elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_infer.engine.speculative import NGramProposer, Proposer, Speculator, SuffixProposer
from paged_infer.llm import LLM
from paged_infer.types import Completion, SamplingParams
from tests.pairwise import pairwise

SETTINGS: dict[str, list[Any]] = {
    "prefix_caching": [True, False],
    "max_num_batched_tokens": [9, 16, 512],
    "pool_tokens": [416, 6400],
    "max_num_seqs": [5, 64],
    "guesses": [None, NGramProposer, SuffixProposer],
    "kernels": [("cpu", 16), ("reference", 4)],
}
STRUCTURES: list[dict[str, Any]] = [{}, {"regex": "(ab|c|[ -~]{2}){2,9}"}, {"allowed_token_ids": list(range(20, 260))}]
REPORTS: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"logprobs": 0, "prompt_logprobs": 3}]
CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "n": 3, "top_p": 0.9},
    {"beam_width": 3, "n": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
]


def rows() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share their beginnings and repeat themselves, and every pair of what may be asked."""
    choose = random.Random(7)
    shared = [choose.randrange(4, 320) for _ in range(11)]
    kinds = (STRUCTURES, REPORTS, CHOICES)
    places = pairwise({str(i): range(len(kind)) for i, kind in enumerate(kinds)})
    asked = [[dict(kind[row[str(i)]]) for i, kind in enumerate(kinds)] for row in places]
    for structure, report, choice in asked:
        if "beam_width" in choice:  # refused beside these
            report.pop("logprobs", None)
            structure.pop("regex", None)
    prompts = [shared + [token for _ in range(2) for token in choose.sample(shared, 4)] for _ in asked]
    params = [
        SamplingParams.resolve(
            {"max_tokens": 40, "ignore_eos": "regex" not in structure, **structure, **report, **choice}
        )
        for structure, report, choice in asked
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(random_model: Callable[..., Path]) -> list[list[Completion]]:
    """The answers to each row when there is nothing else."""
    with LLM(str(random_model("llama")), attention_backend="reference", prefix_caching=False, max_num_seqs=3) as llm:
        return [llm.generate([prompt], [options]) for prompt, options in zip(*rows(), strict=True)]


@pytest.mark.parametrize("settings", pairwise(SETTINGS), ids=str)
def test_together_as_alone(
    random_model: Callable[..., Path], alone: list[list[Completion]], settings: dict[str, Any]
) -> None:
    prompts, params = rows()
    guesses: type[Proposer] | None = settings["guesses"]
    backend, block_size = settings["kernels"]
    options = {name: settings[name] for name in ("prefix_caching", "max_num_batched_tokens", "max_num_seqs")}
    options |= {"attention_backend": backend, "block_size": block_size}
    options["num_kv_blocks"] = settings["pool_tokens"] // block_size
    with LLM(str(random_model("llama")), **options, speculative="ngram" if guesses else "off") as llm:
        if guesses is not None:
            llm.engine.scheduler.speculator = Speculator(guesses(), 3, adaptive=False)
        found = llm.generate(prompts, params)
        stats = llm.engine.scheduler.stats
        if settings["pool_tokens"] == 416 and settings["max_num_seqs"] == 64 and block_size == 4:
            assert stats.num_preemptions > 0
        if guesses is not None:
            assert llm.engine.scheduler.speculator.stats.num_accepted_tokens > 0
        assert settings["prefix_caching"] or not stats.num_cached_tokens
    expected = [completion for answers in alone for completion in answers]
    assert len(found) == len(expected)
    row_of = [row for row, answers in enumerate(alone) for _ in answers]
    for row, ours, theirs in zip(row_of, found, expected, strict=True):
        same = ("sample", "token_ids", "text", "finish_reason", "stop_reason", "valid", "error")
        assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same], (row, params[row])
        assert ours.request_id == row
        for name in ("score", "cumulative_logprob"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-3), (row, name)
        for name in ("logprobs", "prompt_logprobs"):
            mine, plain = getattr(ours, name), getattr(theirs, name)
            assert (mine is None) == (plain is None), (row, name)
            if mine is not None:
                assert list(mine.token_ids) == list(plain.token_ids)
                assert list(mine.ranks) == list(plain.ranks)
                assert mine.logprobs == pytest.approx(plain.logprobs, abs=1e-4, nan_ok=True)
