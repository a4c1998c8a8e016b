"""`paged-infer merge`: the shards of a job into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="SHARDS...",
            help="The shards' files, the name they share without I-of-N, or the folder with their parts.",
            show_default=False,
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Results: .arrow, .feather, .parquet or .jsonl.")],
) -> None:
    """Join the results of all shards, once nothing of them is missing."""
    from paged_infer.job.merge import merge as join

    counts = join([Path(path) for path in inputs], Path(output))
    typer.echo(f"{output}: {counts.rows:,} rows, {counts.errors.total():,} errors", err=True)
