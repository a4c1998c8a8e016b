"""Penalties, biases and masks: arithmetic on Markov checkpoints, Hugging Face's own processors on random models."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_infer.llm import LLM
from paged_infer.models.generation import sampling_defaults
from paged_infer.types import RowError, SamplingParams
from tests.fixtures.checkpoints import hf_model, markov_checkpoint

V = 12


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams.resolve({"max_tokens": max_tokens, "ignore_eos": True, **options})


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After every token the logits are 2.0 for 5, -1.0 for 7, 1.4 for 9 and -10 for the rest."""
    table = torch.full((V, V), -10.0)
    table[:, 5], table[:, 7], table[:, 9] = 2.0, -1.0, 1.4
    return markov_checkpoint(tmp_path_factory.mktemp("flat"), table)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5, 5, 5]),
        ({"repetition_penalty": 1.5}, [9, 5, 5]),  # 1.333 against 1.4; then 0.933, and the prompt's 5 counts once
        ({"repetition_penalty": 0.5}, [5, 5, 5]),
        ({"presence_penalty": 1.0}, [5, 9, 5, 5]),  # 2.0, then 1.0 against 1.4, then 1.0 against 0.4 however often
        ({"frequency_penalty": 0.5}, [5, 5, 9, 5, 9]),  # 2, 1.5, 1.4, 1.0 > 0.9, 0.9 > 0.5
        ({"frequency_penalty": 0.25, "presence_penalty": 0.3}, [5, 5, 9, 5]),  # 2, 1.45, 1.4, then 1.2 > 0.85
        ({"logit_bias": {"9": 0.5, "5": -0.5}}, [9, 9]),
        ({"logit_bias": {"9": 0.7}}, [9, 9]),
        ({"logit_bias": {9: 0.5}}, [5, 5]),
        ({"logit_bias": {"5": -100}, "repetition_penalty": 1.5}, [9, 9]),
        ({"allowed_token_ids": [7, 9]}, [9, 9]),
        ({"allowed_token_ids": [3, 7]}, [7, 7]),
        ({"allowed_token_ids": [3, 7], "logit_bias": {"5": 100, "3": 9.5}}, [3, 3]),  # the mask comes first
        ({"bad_words": [" 5"]}, [9, 9]),
        ({"bad_words": [" 5", " 9"]}, [7, 7]),
        ({"bad_words": " 5 5"}, [9, 5, 9, 5]),  # the prompt ends with 5
        ({"bad_words": [" 5 9"], "logit_bias": {"9": 1}}, [5, 5]),
        ({"bad_words": [" 5 5"], "min_tokens": 2, "stop_token_ids": [9]}, [7, 5, 9]),
    ],
)
def test_each_option_by_arithmetic(flat: Path, backend: str, options: dict[str, Any], expected: list[int]) -> None:
    with LLM(str(flat), attention_backend=backend) as llm:
        (answer,) = llm.generate([[5, 5, 7, 5]], params(len(expected), **options))
    assert answer.token_ids == expected


def test_options_of_neighbours_do_not_mix(flat: Path) -> None:
    each: list[tuple[dict[str, Any], list[int]]] = [
        ({"bad_words": [" 5"]}, [9] * 4),
        ({}, [5] * 4),
        ({"frequency_penalty": 0.5}, [5, 5, 9, 5]),
        ({"allowed_token_ids": [7]}, [7] * 4),
        ({"logit_bias": {"3": 20}}, [3] * 4),
        ({"presence_penalty": 1.0}, [5, 9, 5, 5]),
    ]
    for options in ({}, {"max_num_seqs": 2}, {"num_kv_blocks": 2}, {"max_num_batched_tokens": 3}):
        for seed in range(3):
            random.Random(seed).shuffle(each)
            with LLM(str(flat), **options) as llm:
                answers = llm.generate([[5, 7]] * len(each), [params(4, **given) for given, _ in each])
            assert [answer.token_ids for answer in answers] == [expected for _, expected in each]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_nothing_fail_alone(flat: Path, temperature: float) -> None:
    nothing = params(3, allowed_token_ids=[3], bad_words=[" 3"], temperature=temperature)
    with LLM(str(flat)) as llm:
        answers = llm.generate([[5]] * 3, [params(3), nothing, params(3)])
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert answers[1].error_type == "nothing_allowed"
    assert "position 0" in str(answers[1].error)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("bad", [V, -1, 2**63, "x", 5.5, True])
def test_ids_outside_the_vocabulary_fail_alone(flat: Path, name: str, bad: Any) -> None:
    value = {bad: 1.0} if name == "logit_bias" else [4, bad]
    with LLM(str(flat)) as llm:
        if bad == V:
            fine, failed = llm.generate([[5], [5]], [params(2), params(2, **{name: value})])
            assert fine.token_ids == [5, 5]
            message = str(failed.error)
            assert failed.error_type == "invalid_parameter"
        else:
            with pytest.raises(RowError) as caught:
                params(2, **{name: value})
            message = str(caught.value)
    assert name in message
    assert str(bad) in message


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_penalties_and_bad_words_equal_hugging_face(random_model: Callable[..., Path], backend: str) -> None:
    folder = random_model("llama")
    model = hf_model(folder)
    choose = random.Random(1)
    prompts = [[choose.randrange(4, 320) for _ in range(length)] for length in (3, 17, 40)]
    with LLM(str(folder), attention_backend=backend, dtype="float32", max_num_batched_tokens=24) as llm:
        plain = [answer.token_ids for answer in llm.generate(prompts, params(24))]
        words = [ids[:2] for ids in plain] + [plain[0][5:6], plain[1][3:6]]
        for penalty, bad in ((1.0, words), (1.3, []), (0.8, words), (2.0, words)):
            answers = llm.generate(prompts, [params(24, repetition_penalty=penalty)] * 3)
            if bad:
                llm.engine._spellings = lambda word: [words[int(word)]]  # type: ignore[method-assign]
                names = [str(i) for i in range(len(words))]
                answers = llm.generate(prompts, params(24, repetition_penalty=penalty, bad_words=names))
            for prompt, answer in zip(prompts, answers, strict=True):
                extra = {"bad_words_ids": bad} if bad else {}
                expected = model.generate(
                    torch.tensor([prompt]),
                    max_new_tokens=24,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    repetition_penalty=penalty,
                    **extra,
                )[0, len(prompt) :].tolist()
                assert answer.token_ids == expected


def test_which_of_a_models_own_settings_are_defaults(caplog: pytest.LogCaptureFixture) -> None:
    """As in `generate`: temperature and truncation only where it samples; what is unknown here is said."""
    own = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [1, 2], "bos_token_id": 1}
    assert sampling_defaults({}) == {}
    assert sampling_defaults(own) == {"repetition_penalty": 1.1}
    assert sampling_defaults(own | {"do_sample": True}) == {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    assert sampling_defaults({"do_sample": True, "max_new_tokens": 9}) == {"temperature": 1.0, "max_tokens": 9}
    assert not caplog.records
    sampling_defaults({"no_repeat_ngram_size": 3})
    assert "no_repeat_ngram_size=3" in caplog.text


def test_penalties_that_come_with_the_model_apply(tmp_path: Path) -> None:
    table = torch.full((V, V), -10.0)
    table[:, 5], table[:, 9] = 2.0, 1.4
    folder = markov_checkpoint(tmp_path, table, generation_config={"repetition_penalty": 1.5})
    with LLM(str(folder)) as llm:
        assert llm.generate([[5]])[0].token_ids[0] == 9
    with LLM(str(folder), generation_config="none") as llm:
        assert llm.generate([[5]])[0].token_ids[0] == 5
