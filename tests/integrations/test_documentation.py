"""The commands and the code in `docs/harnesses.md`, as they stand but for the names of model and tasks."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (make test-harness installs it)")
pytest.importorskip("lighteval", reason="lighteval is not installed (make test-harness installs it)")
pytest.importorskip("inspect_ai", reason="inspect-ai is not installed (make test-harness installs it)")

from tests.documentation import code_blocks
from tests.integrations.lm_eval_tasks import CHOICES, GENERATING, write_tasks
from tests.integrations.test_lighteval import NO_DOWNLOADS, TASKS, write_rows

COMMANDS = [
    line
    for block in code_blocks("harnesses.md", "bash")
    for line in block.splitlines()
    if not line.startswith("pip install ")
]

INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def snow():
    return Task(dataset=[Sample(input="What is snow?", target="white")], scorer=includes())
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with tasks for each harness."""
    write_tasks(tmp_path, num_questions=3, num_texts=1, num_characters=200, max_gen_toks=8)
    (tmp_path / "questions").mkdir()
    write_rows(tmp_path / "questions")
    (tmp_path / "task.py").write_text(INSPECT_TASK)
    (tmp_path / "sitecustomize.py").write_text(NO_DOWNLOADS)
    return tmp_path


def run(words: list[str], place: Path) -> str:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(place / "datasets"),
        "OFFLINE_TASKS": str(place / "questions"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(place), *sys.path]),
    }
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, random_model: Callable[..., Path], place: Path) -> None:
    model = random_model("llama", max_position_embeddings=1024)
    offline = {"arc_easy": CHOICES, "hellaswag": GENERATING, "arc:easy": "offline_choosing"}
    for hub, local in offline.items():
        command = command.replace(hub, local)
    words = shlex.split(command.replace("MODEL", str(model)))
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    if "lm-eval" in words:
        words += ["--include_path", str(place)]
    elif "lighteval" in words:
        words += ["--custom-tasks", str(TASKS)]
    else:
        words += ["--display", "plain", "--max-tokens", "4"]
    out = run(words, place)
    assert "acc" in out
    assert out.count("|Tasks|") <= 1, "one process reports"


@pytest.mark.full
def test_code(random_model: Callable[..., Path], place: Path) -> None:
    (code,) = code_blocks("harnesses.md", "python")
    code = code.replace("path/to/model", str(random_model("llama")))
    code = code.replace('["arc_easy"]', f'["{CHOICES}"], task_manager=lm_eval.tasks.TaskManager(include_path=".")')
    out = run([sys.executable, "-c", f"{code}\nprint(results['results']['{CHOICES}'])"], place)
    assert "'acc,none': " in out
