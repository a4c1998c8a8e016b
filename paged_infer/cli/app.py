"""The commands together, and how their failures look."""

from __future__ import annotations

import sys

import typer

from paged_infer.cli import doctor, eval, merge, plan, quantize, run, show
from paged_infer.config import ConfigError
from paged_infer.types import InputFailed

app = typer.Typer(
    name="paged-infer",
    help="From a file of prompts to a file of answers: offline LLM inference with a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(no_args_is_help=True)(run.run)
app.command()(plan.plan)
app.command(no_args_is_help=True)(show.show)
app.command(no_args_is_help=True)(merge.merge)
app.command(no_args_is_help=True)(quantize.quantize)
app.command()(doctor.doctor)
app.add_typer(eval.app, name="eval")


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad usage, 3 done with error rows, 130/143 stopped."""
    try:
        app(prog_name="paged-infer")
    except ConfigError as error:
        print(f"paged-infer: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stdout = None
        sys.exit(1)
    except InputFailed as error:
        print(f"paged-infer: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"paged-infer: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
