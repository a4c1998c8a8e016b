"""What `paged-infer eval` hands to the harnesses; they themselves need not be installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from paged_infer.cli import eval as eval_command
from paged_infer.cli import main

INSTALLED = {"lm_eval": "lm_eval.__main__", "lighteval": "lighteval.__main__"}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand-ins for the harnesses; returns the command lines they are run with."""
    seen: list[list[str]] = []
    for package, entry in INSTALLED.items():
        module = ModuleType(entry)
        for name in ("cli_evaluate", "app"):
            setattr(module, name, lambda: seen.append(sys.argv))
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, entry, module)
    monkeypatch.setitem(sys.modules, "paged_infer.integrations.lm_eval", ModuleType("registration"))
    monkeypatch.setattr(eval_command, "_require", lambda module, extra: None)
    return seen


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paged-infer", "eval", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--", "--tasks", "a"], ["--model", "paged-infer", "--tasks", "a"]),
        (["--tasks", "a", "--limit", "3"], ["--model", "paged-infer", "--tasks", "a", "--limit", "3"]),
        (["--", "run", "--tasks", "a"], ["run", "--model", "paged-infer", "--tasks", "a"]),
        (["--", "--model", "hf", "--tasks", "a"], ["--model", "hf", "--tasks", "a"]),
        (["--", "--model=hf"], ["--model=hf"]),
        (["--", "run", "-M", "hf"], ["run", "-M", "hf"]),
        (["--", "ls", "tasks"], ["ls", "tasks"]),
        (["--", "--help"], ["--help"]),
    ],
)
def test_the_model_is_named_where_nobody_names_one(
    harness: list[list[str]], monkeypatch: pytest.MonkeyPatch, given: list[str], passed: list[str]
) -> None:
    assert run(monkeypatch, "lm-eval", *given) == 0
    assert harness == [["lm-eval", *passed]]


def test_lighteval_is_given_the_file_of_the_model(harness: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "lighteval", "--", "model,dtype=float32", "task|0", "--max-samples", "2") == 0
    ((*start, file, task, option, value),) = harness
    assert start == ["lighteval", "custom", "model,dtype=float32"]
    assert file.endswith("integrations/lighteval.py")
    assert (task, option, value) == ("task|0", "--max-samples", "2")


def test_a_harness_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(eval_command, "find_spec", lambda name: None)
    assert run(monkeypatch, "lm-eval", "--", "--tasks", "a") == 2
    assert "pip install 'paged-infer[lm-eval]'" in capsys.readouterr().err
