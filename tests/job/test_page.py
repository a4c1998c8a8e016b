"""The page of results: its plots against counts made by hand, and a real browser's look at it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from paged_infer.io.columns import Sample, result_batch
from paged_infer.io.schema import result_schema
from paged_infer.job.page import histogram, look_at, page, shares, throughput
from paged_infer.types import Completion, RowError

REPORT = {
    "rates": {"output_tokens_per_second": 123.4, "output_tokens_per_core_second": 61.7},
    "seconds": {"wall": 10.0, "input_share": 0.015},
    "run": {"cached_share": 0.25, "preemptions": 3, "copied_rows": 7},
    "row_seconds": {"p50": 1.0, "p99": 2.0},
    "cost": {"per_million_output_tokens": 4.5},
    "timeline": [[0.0, 0, 0, 0], [1.0, 1, 10, 100], [3.0, 2, 20, 200], [4.0, 3, 30, 350]],
}


def look(num_rows=300):
    samples = [
        Sample(f"id {i}", Completion(i, [1] * (i % 50), "stop", text=f"Answer <{i}>\n" * 3, prompt_tokens=i), ())
        for i in range(num_rows)
    ]
    samples.append(Sample(None, Completion.failed(num_rows, RowError("prompt_too_long", "too <long>")), ()))
    return look_at(result_batch(samples[i : i + 100], result_schema()) for i in range(0, len(samples), 100))


def test_a_histogram_counts_every_length_once():
    plot = histogram("x", {3: 4, 5: 1, 100: 2})
    assert (plot.left, plot.right, plot.top) == ("3", "102", "5 rows")
    assert [bar.label for bar in plot.bars] == ["3–7 tokens: 5", "98–102 tokens: 2"]
    assert max(bar.height for bar in plot.bars) == 1
    single = histogram("x", {7: 9})
    assert [(bar.x, bar.width, bar.label) for bar in single.bars] == [(0, 1, "7 tokens: 9")]
    assert histogram("x", {}).bars == []


def test_throughput_is_tokens_over_time():
    plot = throughput(REPORT["timeline"])
    assert [bar.label for bar in plot.bars] == ["0–1 s: 100 tok/s", "1–3 s: 50 tok/s", "3–4 s: 150 tok/s"]
    assert [bar.width for bar in plot.bars] == [0.25, 0.5, 0.25]
    assert [bar.height for bar in plot.bars] == pytest.approx([2 / 3, 1 / 3, 1])


def test_shares():
    assert shares({"a": 1, "b": 4}) == [("b", 4, 1.0), ("a", 1, 0.25)]


def test_the_page_needs_nothing_else_and_trusts_no_text():
    text = page("a & b.arrow", look(), {"sampling": {"max_tokens": 5, "stop": []}, "version": "1"}, REPORT)
    assert "a &amp; b.arrow" in text
    assert "Answer &lt;0&gt;" in text
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    for shown in ("301", "sampling.max_tokens", "cost per million output tokens", "4.50", "prompt_too_long"):
        assert shown in text
    assert "sampling.stop" not in text
    assert text.count("<svg") == 3


def test_a_page_of_nothing():
    text = page("empty", look_at([]), {})
    assert "<svg" not in text


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_renders_the_page(tmp_path):
    (tmp_path / "page.html").write_text(page("results.arrow", look(), {"version": "1"}, REPORT), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    measure = (
        "<script>onload = () => { const bars = [...document.querySelectorAll('rect')].map(r => "
        "r.getBoundingClientRect()); document.title = JSON.stringify({bars: bars.length, flat: bars.filter(b => "
        "b.width < 1 || b.height < 0.5).length, wide: document.documentElement.scrollWidth > innerWidth}) }</script>"
    )
    (tmp_path / "measured.html").write_text((tmp_path / "page.html").read_text() + measure, encoding="utf-8")
    dump = subprocess.run(
        [BROWSER, *flags, "--dump-dom", str(tmp_path / "measured.html")], capture_output=True, text=True, timeout=120
    ).stdout
    assert '"flat":0,"wide":false' in dump
    assert int(re.search(r'"bars":([0-9]+)', dump)[1]) == dump.count("<rect")
    picture = tmp_path / "page.png"
    subprocess.run(
        [BROWSER, *flags, f"--screenshot={picture}", str(tmp_path / "page.html")], capture_output=True, timeout=120
    )
    assert picture.stat().st_size > 10_000
