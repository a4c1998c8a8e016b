"""How far a running job is, on standard error: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paged_infer.job.config import ProgressKind
from paged_infer.job.summary import JobSummary

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from paged_infer.engine.interface import AnyEngine

BAR_SECONDS = 0.2
PLAIN_SECONDS = 5.0


class Progress:
    """Shows a job's counters, a few times a second at most.

    Args:
        num_rows: how many rows the job has, where that is known or can be estimated.
    """

    def __init__(
        self, kind: ProgressKind, summary: JobSummary, engine: AnyEngine, num_rows: Callable[[], float | None]
    ) -> None:
        if kind == "auto":
            kind = "bar" if sys.stderr.isatty() else "plain"
        self._kind = kind
        self._summary = summary
        self._engine = engine
        self._num_rows = num_rows
        self._every = BAR_SECONDS if kind == "bar" else PLAIN_SECONDS
        self._began = self._shown = perf_counter()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        self._began = self._shown = perf_counter()
        if self._kind == "bar":
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                SpinnerColumn(),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._bar.add_task("", total=None)
        return self

    def update(self) -> None:
        """Show the present state, if the last one is old enough."""
        now = perf_counter()
        if self._kind == "none" or now - self._shown < self._every:
            return
        self._shown = now
        rows = self._num_rows()
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=self._summary.rows, total=rows, description=self._line(rows)
            )
        else:
            try:
                print(self._line(rows), file=sys.stderr, flush=True)
            except OSError:  # whoever was reading has gone; the job goes on
                self._kind = "none"

    def _line(self, rows: float | None) -> str:
        summary, stats, load = self._summary, self._engine.stats, self._engine.load
        seconds = max(perf_counter() - self._began, 1e-9)
        parts = [
            f"{summary.rows:,}{'' if rows is None else f'/{rows:,.0f}'} rows",
            f"{rate(stats.prompt_tokens / seconds)} prompt + {rate(stats.output_tokens / seconds)} output tok/s",
            f"{load.num_running:,} running",
            f"{load.kv_share:.0%} of KV",
        ]
        if stats.cached_tokens:
            parts.append(f"{stats.cached_tokens / stats.prompt_tokens:.0%} of prompts cached")
        if load.num_preemptions:
            parts.append(f"{load.num_preemptions:,} preempted")
        if summary.errors:
            parts.append(f"{summary.errors.total():,} errors")
        remaining = self._seconds_left(rows, seconds)
        if remaining is not None:
            parts.append(f"{duration(remaining)} left")
        return " · ".join(parts)

    def _seconds_left(self, rows: float | None, seconds: float) -> float | None:
        """By output tokens: long rows finish last, so counting rows would promise too much at first."""
        summary, done = self._summary, self._engine.stats.output_tokens
        answered = summary.samples - summary.errors.total()
        if not rows or answered <= 0 or not done:
            return None
        begun = done - summary.computed_output_tokens
        expected = summary.output_tokens / answered * summary.samples / summary.rows * (rows - summary.rows) - begun
        return expected * seconds / done if expected > 0 else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def rate(per_second: float) -> str:
    """Three digits or more."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def duration(seconds: float) -> str:
    """`1h02m`, `3m20s` or `4.5s`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
