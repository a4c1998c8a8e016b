"""Structured outputs: whatever the model would rather say, what comes out fits the structure, or says it does not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_infer.engine.speculative import NGramProposer, Speculator
from paged_infer.engine.structured import check_structure
from paged_infer.llm import LLM
from paged_infer.types import RowError, SamplingParams
from tests.fixtures.checkpoints import markov_checkpoint

PIECES = ["</s>", " ", "\n", "{", "}", '"', "a", ":", "1", "2", "b", '"a"', "  ", ",", "x", "[", "]", "-", "bc", "ab"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likes spaces best, then line breaks, and the end least of all."""
    table = torch.arange(len(PIECES), 0, -1).float().repeat(len(PIECES), 1)
    table[:, 0], table[:, 1], table[:, 2] = -5.0, 40.0, 39.0
    return markov_checkpoint(tmp_path_factory.mktemp("babbler"), table, eos_token_id=0, pieces=PIECES)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_json_ends_within_bounded_whitespace(babbler: Path, backend: str) -> None:
    schema = SCHEMA | {"properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}}}
    with LLM(str(babbler), attention_backend=backend) as llm:
        cut, whole = llm.generate(
            [[14], [14]], [SamplingParams.resolve({"json_schema": schema, "max_tokens": n}) for n in (5, 200)]
        )
    assert (cut.finish_reason, cut.valid, len(cut.token_ids)) == ("length", False, 5)
    assert (whole.finish_reason, whole.valid, whole.stop_reason) == ("stop", True, None)
    assert set(json.loads(whole.text)) == {"a"}
    assert len(whole.text) < 100
    assert whole.token_ids[-1] == 0


def test_every_row_has_its_own_structure(babbler: Path) -> None:
    patterns = ["[ab]{3}", "(1|2){5}", "x(ab)*x", "-?[12]{1,3}", "(abc|xx)"]
    rows: list[tuple[str | None, str]] = [(patterns[i % 5], "regex") for i in range(15)] + [(None, "")] * 3
    params = [
        SamplingParams.resolve({name: text, "temperature": 2.0, "max_tokens": 40} if text else {"max_tokens": 5})
        for text, name in rows
    ]
    seen = set()
    for settings in ({}, {"max_num_seqs": 4}, {"num_kv_blocks": 7}, {"max_num_batched_tokens": 3}):
        with LLM(str(babbler), seed=2, **settings) as llm:
            answers = llm.generate([[14]] * len(rows), params)
        for answer, (text, _) in zip(answers, rows, strict=True):
            if text is None:
                assert (answer.text, answer.valid) == (" " * 5, None)
                continue
            assert answer.valid == (re.fullmatch(text, answer.text) is not None)
            assert answer.valid or answer.finish_reason == "length"
        assert sum(bool(answer.valid) for answer in answers) >= 13
        seen.add(tuple(tuple(answer.token_ids) for answer in answers))
    assert len(seen) == 1


def test_a_grammar(babbler: Path) -> None:
    params = SamplingParams.resolve({"grammar": 'start: "[" item ("," item){2} "]"\nitem: /[12]{2}/', "max_tokens": 40})
    with LLM(str(babbler)) as llm:
        (answer,) = llm.generate([[14]], params)
    assert answer.text == "[11,11,11]"
    assert answer.valid


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("regex", "[a", "unclosed"),
        ("grammar", "start: nothing", "nothing"),
        ("json_schema", {"type": "objekt"}, "objekt"),
        ("json_schema", '{"type":', "json_schema"),
        ("json_schema", {"type": "string", "format": "nonsense"}, "nonsense"),
    ],
)
def test_a_bad_structure_fails_alone(babbler: Path, name: str, value: Any, part: str) -> None:
    with LLM(str(babbler)) as llm:
        answers = llm.generate(
            [[14]] * 3,
            [SamplingParams(max_tokens=3), SamplingParams.resolve({name: value}), SamplingParams(regex="ab")],
        )
    assert [answer.finish_reason for answer in answers] == ["length", "error", "stop"]
    assert answers[1].error_type == "invalid_parameter"
    assert part in str(answers[1].error)
    assert name in str(answers[1].error)


def test_a_library_or_an_end_token_that_is_missing_fails_its_row_alone(
    babbler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = markov_checkpoint(tmp_path, torch.zeros(6, 6), pieces=["z", "a", "b", "c", "d", "e"])
    asked = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, regex="ab")]

    def outcome(folder: Path) -> list[str | None]:
        with LLM(str(folder)) as llm:
            return [answer.error for answer in llm.generate([[1]] * 2, asked)]

    assert outcome(endless) == [None, "structured output needs a model that has an end token"]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert outcome(babbler) == [None, "structured output needs llguidance: pip install llguidance"]
    with pytest.raises(RowError, match="pip install llguidance"):
        check_structure(asked[1])


def test_other_options_act_within_the_structure(babbler: Path) -> None:
    """12 and 11 are likeliest; a bias, a ban and the allowed ids decide among what the pattern allows."""
    given: list[tuple[dict[str, Any], str]] = [
        ({}, "111"),
        ({"logit_bias": {"9": 5.0, "14": 90.0}}, "222"),
        ({"bad_words": ["1"]}, "222"),
        ({"allowed_token_ids": [0, 9, 14]}, "222"),
        ({"frequency_penalty": 0.6}, "112"),
        ({"stop": ["11"], "include_stop_str_in_output": True}, "11"),
        ({"logprobs": 1}, "111"),
    ]
    with LLM(str(babbler)) as llm:
        answers = llm.generate(
            [[14]] * len(given), [SamplingParams.resolve({"regex": "[12]{3}", **options}) for options, _ in given]
        )
    assert [answer.text for answer in answers] == [text for _, text in given]
    assert [answer.valid for answer in answers] == [True] * 5 + [False, True]
    logprobs = answers[-1].logprobs
    assert logprobs is not None
    assert logprobs.top_token_ids[0] == [1]  # of the model's own distribution
    assert logprobs.ranks[0] > 1
    with LLM(str(babbler)) as llm:
        (nothing,) = llm.generate([[14]], SamplingParams.resolve({"regex": "[12]", "allowed_token_ids": [14]}))
    assert nothing.error_type == "nothing_allowed"


@pytest.mark.parametrize("drafts", [1, 4])
def test_speculation_changes_nothing(random_model: Callable[..., Path], drafts: int) -> None:
    folder = random_model("llama")
    structures: list[dict[str, Any]] = [
        {"json_schema": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 8, "maxItems": 12}},
        {"regex": "(ab|cd){10,30}"},
        {"regex": "(la ){3,9}!", "temperature": 1.0, "seed": 4},
        {},
    ]
    params = [SamplingParams.resolve({"max_tokens": 60, **options}) for options in structures]
    prompts = [[5, 6, 7], [8] * 20, [40, 41] * 9, [9] * 8]
    with LLM(str(folder), dtype="float32") as llm:
        off = llm.generate(prompts, params)
    with LLM(str(folder), dtype="float32", speculative="ngram") as llm:
        speculator = llm.engine.scheduler.speculator = Speculator(NGramProposer(3), drafts, adaptive=False)
        on = llm.generate(prompts, params)
    assert speculator.stats.num_accepted_tokens > 0
    assert [(a.token_ids, a.valid, a.text) for a in on] == [(a.token_ids, a.valid, a.text) for a in off]
    assert off[1].valid
