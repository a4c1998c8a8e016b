"""`paged-infer show`: a readable look at results."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer


def show(
    output: Annotated[
        str, typer.Argument(metavar="RESULTS", help="Results file or folder, or the .partial of a running job.")
    ],
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows.")] = 10,
    errors: Annotated[bool, typer.Option("--errors", help="Only error rows.")] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE.html", help="Write a page with plots there instead; any browser opens it."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE.json", help="Report of the run (run --report), for its speed on the page."),
    ] = None,
) -> None:
    """Show rows of results, or make a page of them."""
    from paged_infer.io.writers import read_results

    path = Path(output)
    if html is not None:
        from paged_infer.job.page import look_at, page
        from paged_infer.job.settings import read_report, settings_in

        figures = None if report is None else read_report(Path(report))
        text = page(path.name, look_at(read_results(path)), settings_in(path), figures)
        Path(html).write_text(text, encoding="utf-8")
        return

    from rich.console import Console

    from paged_infer.job.report import results_table
    from paged_infer.job.summary import PREVIEW_CHARS, Preview

    def previews() -> itertools.islice[Preview]:
        found = (
            Preview(row["row"], "", (row["error"] or row["text"] or "")[:PREVIEW_CHARS], row["finish_reason"])
            for batch in read_results(path)
            for row in batch.select(["row", "text", "finish_reason", "error"]).to_pylist()
            if not errors or row["finish_reason"] == "error"
        )
        return itertools.islice(found, rows)

    Console().print(results_table(previews(), output))
