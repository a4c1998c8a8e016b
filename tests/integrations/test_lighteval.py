"""lighteval: offline tasks end to end, beside its own transformers model."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lighteval", reason="lighteval is not installed (make test-harness installs it)")
pytest.importorskip("lm_eval", reason="its questions come with lm-eval, which is not installed")

from paged_infer.config import ConfigError
from paged_infer.integrations.lighteval import parse_name, rolling_windows
from tests.integrations.lm_eval_tasks import questions

TASKS = Path(__file__).with_name("lighteval_tasks.py")

NO_DOWNLOADS = """
import huggingface_hub, requests  # some of the harness' own tasks fetch a file, or ask the hub, when they are imported
requests.get = lambda *_, **__: type("Refusal", (), {"status_code": 404})
huggingface_hub.HfApi.list_models = lambda *_, **__: iter(["any"])
"""


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama", max_position_embeddings=1024)


def write_rows(folder: Path) -> Path:
    """The questions of `lighteval_tasks`."""
    asked = questions()
    for split, part in (("train", asked[:3]), ("test", asked[3:15])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("questions"))


def run(code: str, arguments: list[str], rows: Path, output: Path) -> dict[str, Any]:
    """What is written by a lighteval command that `code` starts."""
    environment = os.environ | {
        "OFFLINE_TASKS": str(rows),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(output / "datasets"),
        "HOME": str(output),
        "PAGED_INFER_CACHE": os.environ.get("PAGED_INFER_CACHE", str(Path.home() / ".cache/paged-infer")),
    }
    command = [
        sys.executable,
        "-c",
        NO_DOWNLOADS + code,
        *arguments,
        "--custom-tasks",
        str(TASKS),
        "--output-dir",
        str(output),
    ]
    done = subprocess.run([*command, "--save-details"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (found,) = output.glob("results/**/results_*.json")
    return json.loads(found.read_text())["results"]


def details(output: Path) -> dict[str, list[dict[str, Any]]]:
    import pyarrow.parquet as parquet

    found = output.glob("details/**/*.parquet")
    return {re.sub(r"_\d{4}-.*", "", file.name): parquet.read_table(file).to_pylist() for file in found}


def test_tasks_run_offline_and_agree_with_the_transformers_model(llama: Path, rows: Path, tmp_path: Path) -> None:
    tasks = "offline_choosing|2,offline_choosing|0,offline_generating|1"
    ours = run(
        "from paged_infer.cli import main; main()",
        ["eval", "lighteval", "--", f"{llama},dtype=float32", f"{tasks},offline_rolling|0"],
        rows,
        tmp_path / "ours",
    )
    theirs = run(
        "from lighteval.__main__ import app; app()",
        ["accelerate", f"model_name={llama},dtype=float32,batch_size=1", tasks],
        rows,
        tmp_path / "theirs",
    )
    (rolling,) = [metrics for task, metrics in ours.items() if "offline_rolling" in task]
    assert 1 < rolling["word_perplexity"] < math.inf  # where their model stops with an error
    for task, metrics in theirs.items():
        if task != "all":  # the mean over all tasks
            assert ours[task] == pytest.approx(metrics, abs=1e-6), task
    mine, other = details(tmp_path / "ours"), details(tmp_path / "theirs")
    assert len(other) == 3
    for task, samples in other.items():
        for a, b in zip(mine[task], samples, strict=True):
            if "choosing" in task:
                assert a["model_response"]["logprobs"] == pytest.approx(b["model_response"]["logprobs"], abs=1e-3)
            if "generating" in task:
                assert a["model_response"]["text"] == b["model_response"]["text"]


def test_the_name_carries_settings() -> None:
    assert parse_name("a/b") == ("a/b", {})
    assert parse_name("a/b,dtype=float32,max_num_seqs=4,prefix_caching=false") == (
        "a/b",
        {"dtype": "float32", "max_num_seqs": 4, "prefix_caching": False},
    )
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_name("a/b,float32")


def test_windows_score_each_token_once() -> None:
    assert list(rolling_windows(list(range(10)), 99, 4)) == [
        ([99], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
    assert list(rolling_windows([], 99, 4)) == []
