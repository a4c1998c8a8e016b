"""`paged-infer show`: a readable look at results."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer


def show(
    output: Annotated[str, typer.Argument(metavar="RESULTS", help="Results file, or the .partial of a running job.")],
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows.")] = 10,
    errors: Annotated[bool, typer.Option("--errors", help="Only error rows.")] = False,
) -> None:
    """Show rows of a results file."""
    from rich.console import Console

    from paged_infer.io.writers import read_results
    from paged_infer.job.report import results_table
    from paged_infer.job.summary import PREVIEW_CHARS, Preview

    def previews() -> itertools.islice[Preview]:
        found = (
            Preview(row["row"], "", (row["error"] or row["text"] or "")[:PREVIEW_CHARS], row["finish_reason"])
            for batch in read_results(Path(output))
            for row in batch.select(["row", "text", "finish_reason", "error"]).to_pylist()
            if not errors or row["finish_reason"] == "error"
        )
        return itertools.islice(found, rows)

    Console().print(results_table(previews(), output))
