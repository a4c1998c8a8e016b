"""What a row may ask for: each refusal names the field, shows the value and says what would do."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

import paged_infer
from paged_infer.types import Completion, RowError, SamplingParams, Score

BEAMS: dict[str, Any] = {"beam_width": 4}
REGEX: dict[str, Any] = {"regex": "a"}
A_NUMBER = "a finite number"
IDS = "token ids, whole numbers from 0 to 2147483647"
PAIRS = "token ids and what is added to their logits"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -2}, "max_tokens=-2: expected a whole number of at least -1"),
        ({"max_tokens": "3"}, "max_tokens='3': expected a whole number of at least -1"),
        ({"max_tokens": True}, "max_tokens=True: expected a whole number of at least -1"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: expected a whole number of at least -1"),
        ({"top_k": -2}, "top_k=-2: expected a whole number of at least -1"),
        ({"min_tokens": -1}, "min_tokens=-1: expected a whole number of at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: expected at most max_tokens (8)"),
        ({"n": 0}, "n=0: expected a whole number of at least 1"),
        ({"n": 2}, "n=2: expected 1 at temperature 0, where all samples would be equal"),
        ({"n": 5, **BEAMS}, "n=5: expected at most beam_width (4)"),
        ({"beam_width": 0}, "beam_width=0: expected a whole number of at least 1"),
        ({"stop": "x", **BEAMS}, "stop=('x',): expected no stop strings beside beam_width; stop_token_ids work"),
        ({"logprobs": 1, **BEAMS}, "logprobs=1: expected none beside beam_width; a beam's score is reported"),
        ({"logprobs": -1}, "logprobs=-1: expected a whole number of at least 0"),
        ({"logprobs": True}, "logprobs=True: expected a whole number of at least 0"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs='all': expected a whole number of at least 0"),
        ({"temperature": -1}, "temperature=-1.0: expected 0 (greedy) or more"),
        ({"temperature": "hot"}, f"temperature='hot': expected {A_NUMBER}"),
        ({"temperature": math.inf}, f"temperature=inf: expected {A_NUMBER}"),
        ({"presence_penalty": "1"}, f"presence_penalty='1': expected {A_NUMBER}"),
        ({"frequency_penalty": math.nan}, f"frequency_penalty=nan: expected {A_NUMBER}"),
        ({"length_penalty": False}, f"length_penalty=False: expected {A_NUMBER}"),
        ({"top_p": 1.5}, "top_p=1.5: expected a number from 0 to 1"),
        ({"min_p": -0.1}, "min_p=-0.1: expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0: expected a number above 0; 1 changes nothing"),
        ({"seed": "x"}, "seed='x': expected a whole number"),
        ({"ignore_eos": 1}, "ignore_eos=1: expected true or false"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output='no': expected true or false"),
        ({"early_stopping": 1}, 'early_stopping=1: expected true, false or "never"'),
        ({"early_stopping": "sometimes"}, "early_stopping='sometimes': expected true, false or \"never\""),
        ({"stop": ""}, "stop='': expected non-empty strings (an empty string would stop at once)"),
        ({"stop": ["", "x"]}, "stop=['', 'x']: expected non-empty strings (an empty string would stop at once)"),
        ({"stop": 5}, "stop=5: expected a string or a list of strings"),
        ({"bad_words": [""]}, "bad_words=['']: expected non-empty strings (nothing can avoid an empty one)"),
        ({"bad_words": {"a": 1}}, "bad_words={'a': 1}: expected a string or a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: expected a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12': expected a list of token ids"),
        ({"stop_token_ids": [1, True]}, f"stop_token_ids=True: expected {IDS}"),
        ({"stop_token_ids": [2**31]}, f"stop_token_ids=2147483648: expected {IDS}"),
        ({"allowed_token_ids": [-1]}, f"allowed_token_ids=-1: expected {IDS}"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[]: expected at least one token id"),
        ({"logit_bias": "abc"}, f"logit_bias='abc': expected {PAIRS}"),
        ({"logit_bias": 5}, f"logit_bias=5: expected {PAIRS}"),
        ({"logit_bias": [1, 2]}, f"logit_bias=[1, 2]: expected {PAIRS}"),
        ({"logit_bias": {"1.5": 1}}, f"logit_bias='1.5': expected {IDS}"),
        ({"logit_bias": {"7": "x"}}, "logit_bias='x': expected a finite number for token 7"),
        ({"logit_bias": {7: math.inf}}, "logit_bias=inf: expected a finite number for token 7"),
        ({"adapter": 3}, "adapter=3: expected a name"),
        ({"json_schema": 5}, "json_schema=5: expected a schema or its text"),
        ({"regex": ["a"]}, "regex=['a']: expected text"),
        ({"grammar": "start: /x/", **REGEX}, "grammar='start: /x/': expected no regex beside it"),
        ({**REGEX, **BEAMS}, "regex='a': expected no beam_width beside it"),
        ({**REGEX, "ignore_eos": True}, "ignore_eos=True: expected false, since regex says where the output ends"),
    ],
)
def test_a_refusal_names_field_value_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as refused:
        SamplingParams(**options)
    assert str(refused.value) == message
    assert refused.value.error_type == "invalid_parameter"
    assert refused.value.field == message.partition("=")[0]


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(RowError) as refused:
        SamplingParams(seed="x" * 200)  # type: ignore[arg-type]
    assert str(refused.value) == f"seed='{'x' * 76}...: expected a whole number"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop": None, "logit_bias": {"12": -100, 3: 1}}, {"stop": (), "logit_bias": ((3, 1.0), (12, -100.0))}),
        ({"stop": "ab", "max_tokens": 3.0, "top_k": -1}, {"stop": ("ab",), "max_tokens": 3, "top_k": -1}),
        ({"stop": [f"s{i}" for i in range(40)]}, {"stop": tuple(f"s{i}" for i in range(40))}),
        ({"json_schema": {"type": "integer"}}, {"json_schema": '{"type": "integer"}'}),
        ({"n": 2, **BEAMS}, {"n": 2}),
    ],
)
def test_what_is_accepted(options: dict[str, Any], expected: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert {name: getattr(params, name) for name in expected} == expected


def test_layers_of_options() -> None:
    assert SamplingParams.resolve({"top_k": 3, "seed": 1}, {"top_k": None, "seed": 2}) == SamplingParams(
        top_k=3, seed=2
    )
    with pytest.raises(RowError, match="unknown sampling option 'temprature'; did you mean 'temperature'"):
        SamplingParams.resolve({}, {"temprature": 1})


def test_a_row_error_survives_the_way_between_processes() -> None:
    again = pickle.loads(pickle.dumps(RowError("invalid_parameter", "n=0: expected 1", "n")))
    assert (again.error_type, str(again), again.field) == ("invalid_parameter", "n=0: expected 1", "n")


def test_a_score_needs_what_it_is_made_of() -> None:
    with pytest.raises(RowError, match="row 3: too long"):
        Score.of_completion(Completion.failed(3, RowError("prompt_too_long", "too long")))
    with pytest.raises(ValueError, match="did not ask for prompt_logprobs"):
        Score.of_completion(Completion(3, [1], "stop"))


def test_a_name_that_the_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="module 'paged_infer' has no attribute 'LLMs'"):
        _ = paged_infer.LLMs
