"""The text that a model is rounded with, out of a job's own rows, and that no other is taken later."""

from __future__ import annotations

import json

import pytest

from paged_infer.config import ConfigError
from paged_infer.job.calibration import CHARS, ROW_CHARS, calibrated
from paged_infer.job.config import RunConfig
from paged_infer.job.run import run_job
from tests.job.fake_engine import FakeEngine

COMMON = "You are asked for a capital. " * 20
ROWS = [{"prompt": f"{COMMON}Of land {i}?"} for i in range(3)]


def text_of(tmp_path, rows=ROWS, **options):
    return settings(tmp_path, rows, **options).engine.calibration


def settings(tmp_path, rows=ROWS, **options):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    defaults = {
        "inputs": [str(tmp_path / "in.jsonl")],
        "output": str(tmp_path / "out.arrow"),
        "progress": "none",
        "quantization": "int8",
        "calibration": "job",
    }
    return calibrated(RunConfig.resolve(defaults, options))


def test_ends_of_the_first_prompts(tmp_path):
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Of land 0?"}]}
    rows = [ROWS[0], "{bad", chat, {"prompt_token_ids": [1, 2]}, ROWS[0], *ROWS[1:]]
    ends = [row["prompt"][-ROW_CHARS:] for row in ROWS]
    assert text_of(tmp_path, rows) == "\n\n".join([ends[0], "Be brief.", "Of land 0?", *ends[1:]])


def test_every_shard_and_a_grown_input_have_the_same(tmp_path):
    rows = [{"prompt": f"{i} " * 100} for i in range(100)]
    text = text_of(tmp_path, rows)
    assert len(text) == CHARS
    assert text_of(tmp_path, rows, shard="2/2") == text
    assert text_of(tmp_path, [*rows, *ROWS]) == text


def test_a_file_or_a_text(tmp_path):
    (tmp_path / "like.txt").write_text("Like this. " * 5000)
    assert text_of(tmp_path, calibration=f"@{tmp_path / 'like.txt'}") == ("Like this. " * 5000)[:CHARS]
    assert text_of(tmp_path, calibration="Like that.") == "Like that."
    assert calibrated(RunConfig(inputs=("nowhere.jsonl",))).engine.calibration is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"inputs": ["-"]}, "standard input"),
        ({"calibration": "@nowhere.txt"}, "nowhere.txt"),
        ({"quantization": "int4"}, "quantization='int8'"),
        ({"rows": [{"prompt_token_ids": [1, 2]}]}, "no text"),
    ],
)
def test_refusals(tmp_path, options, named):
    with pytest.raises(ConfigError, match=named):
        settings(tmp_path, **options)


def test_rows_of_one_job_come_from_one_rounding(tmp_path):
    """A row more is an input that grew, which goes on; that it would change the weights is refused."""
    assert run_job(settings(tmp_path, time_limit=0), FakeEngine()).exit_code == 143
    more = [*ROWS, {"prompt": "Of land 3?"}]
    with pytest.raises(ConfigError, match="calibration is now"):
        run_job(settings(tmp_path, more), FakeEngine())
    with pytest.raises(ConfigError, match="calibration is now"):
        run_job(settings(tmp_path, calibration="Like that."), FakeEngine())
    assert run_job(settings(tmp_path), FakeEngine()).exit_code == 0
