"""Results as one self-contained web page: figures, plots, a look at some rows. No script, nothing fetched."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from paged_infer.io.arrays import integers
from paged_infer.io.counts import ResultCounts, is_failed
from paged_infer.job.summary import PREVIEW_CHARS

BINS = 24
SAMPLE_ROWS = 20


@dataclass(slots=True)
class Bar:
    """One bar of a plot; `x` and `width` are shares of the plot's width, `height` of its height."""

    x: float
    width: float
    height: float
    label: str


@dataclass(slots=True)
class Plot:
    """Bars above an axis with labels at its ends and what the tallest bar stands for."""

    title: str
    bars: list[Bar]
    left: str
    right: str
    top: str


@dataclass(slots=True)
class Look:
    """What a page shows of results, gathered batch by batch."""

    counts: ResultCounts = field(default_factory=ResultCounts)
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    output_lengths: Counter[int] = field(default_factory=Counter)
    answers: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch of results."""
        self.counts.count_batch(batch)
        failed = is_failed(batch)
        answered = batch.filter(pc.invert(failed))
        for column, lengths in (("prompt_tokens", self.prompt_lengths), ("output_tokens", self.output_lengths)):
            values, counts = np.unique(integers(answered[column].drop_null()), return_counts=True)
            lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        for rows, kept in ((answered, self.answers), (batch.filter(failed), self.failures)):
            for row in rows.slice(0, SAMPLE_ROWS - len(kept)).select(_SHOWN).to_pylist():
                shown = (row["error"] or row["text"] or "").strip()
                kept.append({**row, "shown": shown[:PREVIEW_CHARS] + ("…" if len(shown) > PREVIEW_CHARS else "")})


_SHOWN = ["row", "id", "sample", "text", "finish_reason", "prompt_tokens", "output_tokens", "error", "error_type"]


def look_at(batches: Iterable[pa.RecordBatch]) -> Look:
    """Everything a page shows of these results."""
    look = Look()
    for batch in batches:
        look.add(batch)
    return look


def page(title: str, look: Look, settings: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> str:
    """The page as HTML.

    Args:
        settings: of the results' metadata; may be empty.
        report: of the run (`job.figures.report_of`): adds throughput over time and the run's rates.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("paged_infer.job").joinpath("page.html.jinja").read_text(encoding="utf-8"))
    plots = [
        histogram("Prompt tokens", look.prompt_lengths),
        histogram("Output tokens", look.output_lengths),
        *([throughput(report["timeline"])] if report and len(report.get("timeline", [])) > 2 else []),
    ]
    return template.render(
        title=title,
        counts=look.counts,
        plots=[plot for plot in plots if plot.bars],
        tallies=[
            ("Finish reasons", shares(look.counts.finish_reasons)),
            ("Errors by type", shares(look.counts.errors)),
        ],
        answers=look.answers,
        failures=look.failures,
        rates=[] if report is None else _rates(report),
        settings=_settings(settings),
    )


def histogram(title: str, lengths: Mapping[int, int]) -> Plot:
    """How often which length comes, in at most `BINS` bins of equal width."""
    if not lengths:
        return Plot(title, [], "", "", "")
    least, most = min(lengths), max(lengths)
    width = max(1, -(-(most - least + 1) // BINS))
    bins = Counter[int]()
    for length, count in lengths.items():
        bins[(length - least) // width] += count
    number, tallest = max(bins) + 1, max(bins.values())
    bars = [
        Bar(
            place / number,
            1 / number,
            count / tallest,
            f"{_span(least + place * width, width)} tokens: {count:,}",
        )
        for place, count in sorted(bins.items())
    ]
    return Plot(title, bars, f"{least:,}", f"{least + number * width - 1:,}", f"{tallest:,} rows")


def throughput(timeline: Sequence[Sequence[float]]) -> Plot:
    """Output tokens a second between the points of a report's timeline."""
    end = timeline[-1][0]
    speeds = [
        (before[0], after[0], (after[3] - before[3]) / max(after[0] - before[0], 1e-9))
        for before, after in itertools.pairwise(timeline)
    ]
    fastest = max(speed for _, _, speed in speeds) or 1.0
    bars = [
        Bar(begin / end, (stop - begin) / end, speed / fastest, f"{begin:,.0f}–{stop:,.0f} s: {speed:,.0f} tok/s")
        for begin, stop, speed in speeds
    ]
    return Plot("Output tokens a second", bars, "0 s", f"{end:,.0f} s", f"{fastest:,.0f} tok/s")


def shares(tally: Mapping[str, int]) -> list[tuple[str, int, float]]:
    """(name, count, share of the largest), the largest first."""
    most = max(tally.values(), default=1)
    return [(name, count, count / most) for name, count in Counter(tally).most_common()]


def _span(begin: int, width: int) -> str:
    return f"{begin:,}" if width == 1 else f"{begin:,}–{begin + width - 1:,}"


def _rates(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rates, seconds, run = report["rates"], report["seconds"], report["run"]
    figures = [
        ("output tokens a second", f"{rates['output_tokens_per_second']:,.1f}"),
        ("output tokens a core-second", f"{rates['output_tokens_per_core_second']:,.1f}"),
        ("run time", f"{seconds['wall']:,.1f} s"),
        ("of it reading and tokenising", f"{seconds['input_share']:.1%}"),
        ("from the prefix cache", f"{run['cached_share']:.1%}"),
        ("preemptions", f"{run['preemptions']:,}"),
        ("identical rows", f"{run['copied_rows']:,}"),
        *((f"row latency {name}", f"{value:,.2f} s") for name, value in report["row_seconds"].items()),
    ]
    cost = report.get("cost", {}).get("per_million_output_tokens")
    return figures if cost is None else [*figures, ("cost per million output tokens", f"{cost:,.2f}")]


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`part.name` and value, the fingerprint left out."""
    found = []
    for name, value in settings.items():
        if name == "fingerprint":
            continue
        if isinstance(value, Mapping):
            found += [(f"{name}.{inner}", str(v)) for inner, v in value.items() if v not in (None, [], "")]
        elif value not in (None, [], ""):
            found.append((name, str(value)))
    return found
