"""Tables for people: what a job did and what its results look like."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from paged_infer.job.progress import duration, rate
from paged_infer.job.summary import JobSummary, Preview


def summary_table(summary: JobSummary) -> Table:
    """The figures of a finished or stopped job."""
    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    computed = summary.computed_prompt_tokens + summary.computed_output_tokens
    seconds = max(summary.run_seconds, 1e-9)
    resumed = f", {summary.resumed_rows:,} of them from earlier runs" if summary.resumed_rows else ""
    table.add_row("rows", f"{summary.rows:,}{resumed}")
    if summary.copied_rows:
        table.add_row("identical rows", f"{summary.copied_rows:,} got the answer of another row")
    if summary.errors:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary.errors.most_common())
        table.add_row("errors", Text(f"{summary.errors.total():,}: {kinds}", style="red"))
    table.add_row("finish reasons", ", ".join(f"{n:,} {reason}" for reason, n in summary.finish_reasons.most_common()))
    table.add_row("prompt tokens", f"{summary.prompt_tokens:,} ({summary.cached_share:.1%} from the prefix cache)")
    table.add_row("output tokens", f"{summary.output_tokens:,}")
    if computed:
        output = f"{rate(summary.computed_output_tokens / seconds)} output tok/s"
        table.add_row("throughput", f"{output}, {rate(computed / seconds)} in all")
    if summary.first_row_seconds is not None:
        table.add_row("first row after", duration(summary.first_row_seconds))
    table.add_row("time", f"{duration(summary.wall_seconds)}, of which {duration(summary.run_seconds)} answering")
    table.add_row("seed", str(summary.run_seed))
    table.add_row("results", Text(str(summary.output)) if summary.stopped_by is None else "not complete")
    return table


def results_table(previews: Iterable[Preview], title: str) -> Table:
    """Rows as a table: what was asked, what came back."""
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("row", justify="right", no_wrap=True)
    rows = list(previews)
    with_prompt = any(row.prompt for row in rows)
    if with_prompt:
        table.add_column("prompt", ratio=1)
    table.add_column("answer", ratio=2)
    table.add_column("finish", no_wrap=True)
    for row in rows:
        style = "red" if row.finish_reason == "error" else ""
        prompt = [Text(row.prompt)] if with_prompt else []
        table.add_row(str(row.row), *prompt, Text(row.text.strip(), style=style), Text(row.finish_reason, style=style))
    return table
