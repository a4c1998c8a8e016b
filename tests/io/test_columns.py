"""Completions to columns: logprobs against rows built by hand."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from paged_infer.io.columns import Sample, logprobs_array, result_batch
from paged_infer.io.counts import ResultCounts
from paged_infer.io.schema import RESULT_FIELDS, result_schema
from paged_infer.types import Completion, Logprobs, RowError

KIND = next(field.type for field in RESULT_FIELDS if field.name == "logprobs")

OUTPUT = Logprobs(
    token_ids=np.array([7, 8, 9]),
    logprobs=np.array([-0.5, -math.inf, -2.0], np.float32),
    ranks=np.array([1, 50, 3]),
    top_token_ids=np.array([[7, 1], [1, 2], [3, 4]]),
    top_logprobs=np.array([[-0.5, -1.0], [-0.25, -0.5], [-1.0, -1.5]], np.float32),
)
PROMPT = Logprobs(
    token_ids=[1, 2],
    logprobs=[math.nan, -1.0],
    ranks=[0, 2],
    top_token_ids=[[], [5]],
    top_logprobs=[[], [-0.5]],
)


def entry(token_id, logprob, rank, *top):
    best = [{"token_id": t, "logprob": lp} for t, lp in top]
    return {"token_id": token_id, "logprob": logprob, "rank": rank, "top": best}


EXPECTED_OUTPUT = [
    entry(7, -0.5, 1, (7, -0.5), (1, -1.0)),
    entry(8, -math.inf, 50, (1, -0.25), (2, -0.5)),
    entry(9, -2.0, 3, (3, -1.0), (4, -1.5)),
]
EXPECTED_PROMPT = [None, entry(2, -1.0, 2, (5, -0.5))]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([OUTPUT], [EXPECTED_OUTPUT]),
        ([None, OUTPUT, None, PROMPT], [None, EXPECTED_OUTPUT, None, EXPECTED_PROMPT]),
        ([PROMPT, OUTPUT], [EXPECTED_PROMPT, EXPECTED_OUTPUT]),
        ([None, None], [None, None]),
        ([Logprobs([], [], [], [], [])], [[]]),
        ([Logprobs([4], [-1.0], [1], np.zeros((1, 0)), np.zeros((1, 0)))], [[entry(4, -1.0, 1)]]),
        ([], []),
    ],
)
def test_logprobs_are_columns_of_structs(values, expected):
    array = logprobs_array(values, KIND)
    array.validate(full=True)
    assert array.type == KIND
    assert array.to_pylist() == expected


def test_a_first_position_without_logprob_may_stand_in_a_matrix():
    values = Logprobs(
        np.array([1, 2]),
        np.array([math.nan, -1.0]),
        np.array([0, 2]),
        np.array([[0, 0], [5, 2]]),
        np.array([[math.nan, math.nan], [-0.5, -1.0]]),
    )
    assert logprobs_array([values], KIND).to_pylist() == [[None, entry(2, -1.0, 2, (5, -0.5), (2, -1.0))]]


def test_every_figure_of_a_completion_is_a_column():
    completion = Completion(
        3,
        [7, 8, 9],
        "stop",
        text="abc",
        sample=1,
        stop_reason="x",
        prompt_tokens=2,
        cached_tokens=1,
        cumulative_logprob=-2.5,
        score=-0.5,
        valid=True,
        adapter="a",
        logprobs=OUTPUT,
        prompt_logprobs=PROMPT,
    )
    failed = Completion.failed(4, RowError("prompt_too_long", "33 > 32"), 33)
    schema = result_schema([pa.field("note", pa.int64())])
    batch = result_batch([Sample("i", completion, (5,)), Sample(None, failed, ())], schema)
    batch.validate(full=True)
    first, second = batch.to_pylist()
    assert first == {
        "row": 3,
        "id": "i",
        "sample": 1,
        "text": "abc",
        "token_ids": [7, 8, 9],
        "finish_reason": "stop",
        "stop_reason": "x",
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "output_tokens": 3,
        "cumulative_logprob": -2.5,
        "score": -0.5,
        "valid": True,
        "adapter": "a",
        "logprobs": EXPECTED_OUTPUT,
        "prompt_logprobs": EXPECTED_PROMPT,
        "error": None,
        "error_type": None,
        "note": 5,
    }
    assert {name for name, value in second.items() if value is None} == first.keys() - {
        "row",
        "sample",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "error",
        "error_type",
    }


def test_counting_columns_is_counting_completions():
    completions = [
        Completion(0, [1, 2], "stop", prompt_tokens=5, cached_tokens=4),
        Completion(1, [1], "length", prompt_tokens=3, sample=0),
        Completion(1, [1, 2, 3], "stop", prompt_tokens=3, sample=1),
        Completion.failed(2, RowError("empty_prompt", "x"), 9),
        Completion.failed(3, RowError("invalid_json", "x")),
    ]
    one_by_one, at_once = ResultCounts(), ResultCounts()
    for completion in completions:
        one_by_one.count(completion)
    at_once.count_batch(result_batch([Sample(None, completion, ()) for completion in completions], result_schema()))
    assert at_once == one_by_one
    assert (at_once.rows, at_once.samples, at_once.prompt_tokens, at_once.output_tokens) == (4, 5, 8, 6)
    assert at_once.errors == {"empty_prompt": 1, "invalid_json": 1}
    assert ResultCounts.from_json(at_once.to_json()) == at_once
    at_once.add(one_by_one)
    assert at_once.rows == 8
