"""Every figure of a run, as plain data for machines."""

from __future__ import annotations

import os
import resource
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_infer.job.summary import JobSummary

if TYPE_CHECKING:
    from paged_infer.engine.interface import AnyEngine
    from paged_infer.engine.speculative import SpeculationStats

PERCENTILES = (50, 90, 99, 100)
TIMELINE_POINTS = 240


class Reservoir:
    """A bounded sample of a long series: every value at first, then every second one, every fourth, and so on."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._values = array("d")
        self._stride = 1
        self._count = 0
        self._greatest = 0.0

    def add(self, value: float) -> None:
        """Append to the series."""
        if self._count % self._stride == 0:
            if len(self._values) == self._capacity:
                self._values = self._values[::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self._values.append(value)
        self._count += 1
        self._greatest = max(self._greatest, value)

    def percentiles(self) -> dict[str, float]:
        """`p50` and so on; p100 is the greatest of all values. Empty where there are none."""
        if not self._values:
            return {}
        points = np.percentile(np.asarray(self._values), PERCENTILES)
        return {f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)} | {"p100": self._greatest}


class Timeline:
    """How far a run was when: (seconds, rows, computed prompt tokens, output tokens), at most `TIMELINE_POINTS` points,
    ever farther apart."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int, int]] = []
        self._every = 0.5
        self._next = 0.0

    def add(self, seconds: float, rows: int, prompt_tokens: int, output_tokens: int) -> None:
        """Take a point, if the last one is old enough."""
        if seconds < self._next:
            return
        if len(self.points) == TIMELINE_POINTS:
            self.points = self.points[::2]
            self._every *= 2
        self.points.append((round(seconds, 3), rows, prompt_tokens, output_tokens))
        self._next = seconds + self._every


def report_of(
    summary: JobSummary,
    settings: Mapping[str, Any],
    engine: AnyEngine,
    latencies: Reservoir,
    timeline: Timeline,
    cost_per_hour: float | None = None,
) -> dict[str, Any]:
    """The report of a run that is over.

    Rates count what this run computed; `results` counts all results, those of earlier runs and copies of identical rows
    included.
    """
    seconds = max(summary.run_seconds, 1e-9)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    load = engine.load
    core_seconds = usage.ru_utime + usage.ru_stime + load.core_seconds
    tokens = summary.computed_prompt_tokens + summary.computed_output_tokens
    report: dict[str, Any] = {
        "output": str(summary.output),
        "exit_code": summary.exit_code,
        "stopped_by": None if summary.stopped_by is None else summary.stopped_by.name,
        "results": {
            "rows": summary.rows,
            "samples": summary.samples,
            "errors": dict(summary.errors),
            "finish_reasons": dict(summary.finish_reasons),
            "prompt_tokens": summary.prompt_tokens,
            "cached_tokens": summary.cached_tokens,
            "output_tokens": summary.output_tokens,
        },
        "run": {
            "rows": summary.rows - summary.resumed_rows,
            "resumed_rows": summary.resumed_rows,
            "copied_rows": summary.copied_rows,
            "prompt_tokens": summary.computed_prompt_tokens,
            "output_tokens": summary.computed_output_tokens,
            "cached_share": summary.cached_share,
            "preemptions": load.num_preemptions,
            "kv_utilisation": load.kv_utilisation,
        },
        "seconds": {
            "wall": summary.wall_seconds,
            "run": summary.run_seconds,
            "first_row": summary.first_row_seconds,
            "input": summary.input_seconds,
            "output": summary.output_seconds,
            "input_share": summary.input_seconds / seconds,
            "output_share": summary.output_seconds / seconds,
            "cores": core_seconds,
        },
        "rates": {
            "rows_per_second": (summary.rows - summary.resumed_rows) / seconds,
            "output_tokens_per_second": summary.computed_output_tokens / seconds,
            "tokens_per_second": tokens / seconds,
            "output_tokens_per_core_second": summary.computed_output_tokens / max(core_seconds, 1e-9),
        },
        "speculation": _speculation(engine.speculation),
        "row_seconds": latencies.percentiles(),
        "peak_memory_bytes": usage.ru_maxrss * 1024 + load.memory_bytes,
        "cpus": len(os.sched_getaffinity(0)),
        "timeline": timeline.points,
        "settings": settings,
    }
    if cost_per_hour is not None:
        cost = cost_per_hour * summary.wall_seconds / 3600
        report["cost"] = {
            "per_hour": cost_per_hour,
            "total": cost,
            "per_million_output_tokens": _per_million(cost, summary.computed_output_tokens),
            "per_million_tokens": _per_million(cost, tokens),
        }
    return report


def _speculation(stats: SpeculationStats | None) -> dict[str, float] | None:
    """What guessing at tokens brought, where it was on."""
    if stats is None:
        return None
    return {
        "rounds": stats.num_rounds,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "tokens_per_round": stats.tokens_per_round,
    }


def _per_million(cost: float, tokens: int) -> float | None:
    return 1e6 * cost / tokens if tokens else None
