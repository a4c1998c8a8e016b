"""`paged-infer eval`: evaluation harnesses with this engine as their model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import typer

from paged_infer.config import ConfigError

app = typer.Typer(help="Run an evaluation harness with this engine as its model.", no_args_is_help=True)

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGUMENTS...", help="What the harness' own command takes.")
]


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"{module} is not installed: pip install 'paged-infer[{extra}]'")


def _names_a_model(arguments: Sequence[str]) -> bool:
    return any(word in ("--model", "-M") or word.startswith("--model=") for word in arguments)


@app.command("lighteval", context_settings=_PASSED_ON)
def lighteval(arguments: Arguments = None) -> None:
    """lighteval, as in: paged-infer eval lighteval -- MODEL,dtype=float32 'gsm8k|5'"""
    _require("lighteval", "lighteval")
    spec = find_spec("paged_infer.integrations.lighteval")
    assert spec is not None
    from lighteval.__main__ import app as harness

    model, *others = arguments or ["--help"]
    sys.argv = ["lighteval", "custom", model, *([] if model.startswith("-") else [str(spec.origin)]), *others]
    harness()


@app.command("lm-eval", context_settings=_PASSED_ON)
def lm_eval(arguments: Arguments = None) -> None:
    """lm-evaluation-harness, as in: paged-infer eval lm-eval -- --model_args pretrained=MODEL --tasks hellaswag"""
    _require("lm_eval", "lm-eval")
    from lm_eval.__main__ import cli_evaluate

    import paged_infer.integrations.lm_eval  # noqa: F401 - registers the model

    given = list(arguments or ())
    runs = not given or given[0] == "run" or given[0].startswith("-")
    if runs and not _names_a_model(given) and not {"-h", "--help"} & {*given}:
        at = 1 if given[:1] == ["run"] else 0
        given[at:at] = ["--model", "paged-infer"]
    sys.argv = ["lm-eval", *given]
    cli_evaluate()
