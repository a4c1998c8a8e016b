"""Identical rows: computed once where the same answer is certain, written as often as asked."""

from __future__ import annotations

import json
import signal

import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.io import writers
from paged_infer.io.targets import make_target
from paged_infer.io.writers import journal_path, read_results
from paged_infer.job import dedupe as dedupe_module
from paged_infer.job import run as job
from paged_infer.job.config import RunConfig
from paged_infer.job.dedupe import Dedupe
from paged_infer.job.run import run_job
from paged_infer.types import Completion, Request, RowError, SamplingParams
from tests.job.fake_engine import FakeEngine


def run(tmp_path, rows, engine=None, **options):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    engine = engine or FakeEngine()
    config = RunConfig.resolve({"inputs": [str(path)], "progress": "none", "overwrite": True, "seed": 1, **options})
    summary = run_job(config, engine)
    with pa.memory_map(str(config.output_path)) as source:
        return pa.ipc.open_stream(source).read_all(), summary, engine


def test_greedy_rows_are_computed_once(tmp_path):
    rows = [{"id": i, "prompt": f"prompt {i % 7}"} for i in range(700)]
    table, summary, engine = run(tmp_path, rows)
    assert len(engine.requests) == 7
    assert summary.copied_rows == 693
    assert table["row"].to_pylist() == list(range(700))
    assert table["id"].to_pylist() == [str(i) for i in range(700)]
    assert table["text"].to_pylist() == [f"prompt {i % 7}" for i in range(700)]
    assert summary.rows == 700
    assert summary.computed_output_tokens == 7 * len("prompt 0")


def test_no_dedupe_computes_every_row(tmp_path):
    table, summary, engine = run(tmp_path, [{"prompt": "a"}] * 20, dedupe=False)
    assert (len(engine.requests), summary.copied_rows, table.num_rows) == (20, 0, 20)


@pytest.mark.parametrize(
    ("other", "computed"),
    [
        ({}, 1),
        ({"prompt": "b"}, 2),
        ({"max_tokens": 1}, 2),
        ({"stop": "x"}, 2),
        ({"temperature": 1}, 3),
        ({"temperature": 1, "seed": 5}, 2),
        ({"seed": 5}, 2),
    ],
)
def test_what_counts_as_the_same(tmp_path, other, computed):
    """A row, itself again, and two others: sampled rows without a seed of their own are never the same."""
    table, _, engine = run(
        tmp_path, [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", **other}, {"prompt": "a", **other}]
    )
    assert len(engine.requests) == computed
    assert table.num_rows == 4


def test_error_rows_are_copied_with_their_own_place(tmp_path):
    rows = [{"prompt": "long " * 99}, {"prompt": "long " * 99}, *({"prompt": f"{i}"} for i in range(600))]
    table, summary, _ = run(tmp_path, [*rows, rows[0]], FakeEngine(max_model_len=20))
    assert [error.split(":")[0] for error in table["error"].drop_null().to_pylist()] == [
        f"{tmp_path}/in.jsonl line {line}" for line in (1, 2, 603)
    ]
    assert {error.count("in.jsonl") for error in table["error"].drop_null().to_pylist()} == {1}
    assert summary.exit_code == 3


def test_following_rows_are_bounded(tmp_path, monkeypatch):
    """While the first of many equal rows is computed, the file is not read to its end."""
    monkeypatch.setattr(job, "WINDOW_ROWS", 300)
    seen = []

    def look(engine):
        seen.append(pending[0].num_following)

    pending = []
    original = Dedupe.__init__

    def remember(self, *args):
        original(self, *args)
        pending.append(self)

    monkeypatch.setattr(Dedupe, "__init__", remember)
    monkeypatch.setattr(job, "HEAD_START_SECONDS", 5)
    run(tmp_path, [{"prompt": "a"}] * 5000, FakeEngine(on_step=look))
    assert 300 <= max(seen) <= 300 + job.CHUNK_ROWS


def test_answers_kept_are_bounded():
    dedupe = Dedupe(capacity=10_000)
    params = SamplingParams()
    for row in range(1000):
        assert dedupe.ask(Request(row, [row], params)) is None
        dedupe.answered(row, [Completion(row, [1] * 10, "stop", text="x" * 40)])
    assert dedupe.ask(Request(2000, [999], params))[0].request_id == 999
    assert dedupe.ask(Request(2001, [0], params)) is None
    assert dedupe.num_copied == 1


def test_options_remembered_are_bounded_and_never_confused(monkeypatch):
    monkeypatch.setattr(dedupe_module, "KEPT_PARAMS", 3)
    dedupe = Dedupe()
    for row in range(20):
        assert dedupe.ask(Request(row, [1], SamplingParams(max_tokens=row + 1))) is None
    assert dedupe.ask(Request(20, [1], SamplingParams(max_tokens=20))) == ()


def test_samples_are_copied_together():
    dedupe = Dedupe()
    params = SamplingParams()
    samples = [Completion(0, [1], "stop", sample=0), Completion(0, [2], "stop", sample=1)]
    assert dedupe.ask(Request(0, [1], params)) is None
    assert dedupe.ask(Request(1, [1], params)) == ()
    assert dedupe.num_following == 1
    assert dedupe.answered(0, samples) == (1,)
    assert dedupe.num_following == 0
    assert dedupe.ask(Request(2, [1], params)) == samples


@pytest.mark.parametrize("segment", [10, 1 << 16])
def test_a_resumed_job_copies_what_an_earlier_run_computed(tmp_path, monkeypatch, segment):
    """Twelve prompts, each asked four times. What is sealed cannot be read back and is computed again."""
    monkeypatch.setattr(writers, "SEGMENT_ROWS", segment)
    rows = [{"prompt": f"prompt {i % 12}", "max_tokens": 9} for i in range(48)]
    monkeypatch.setattr(job, "CHUNK_ROWS", 12)
    monkeypatch.setattr(job, "HEAD_START_SECONDS", 0)
    monkeypatch.setattr(job, "WINDOW_ROWS", 12)

    def stop(engine):
        if engine.steps == 2:
            signal.raise_signal(signal.SIGTERM)

    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = RunConfig.resolve({"inputs": [str(path)], "progress": "none", "seed": 1})
    first = FakeEngine(on_step=stop)
    run_job(config, first)
    finished = [
        row["row"] for batch in read_results(journal_path(make_target(config.output_path))) for row in batch.to_pylist()
    ]
    second = FakeEngine()
    summary = run_job(config, second)
    with pa.memory_map(str(config.output_path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table["text"].to_pylist() == [row["prompt"][:9] for row in rows]
    known = {tuple(rows[row]["prompt"].encode()) for row in finished}
    asked = [tuple(r.prompt_token_ids) for r in second.requests.values()]
    assert len(asked) == len(set(asked))
    if segment > 48:
        assert len(known) > 3
        assert known.isdisjoint(asked)
        assert summary.copied_rows > 0


def test_answers_that_left_memory_are_read_back_and_rows_known_are_bounded():
    asked = []

    def recall(row):
        asked.append(row)
        return [Completion(row, [row], "stop")] if row != 7 else None

    dedupe = Dedupe(recall=recall, capacity=0, max_rows=3)
    params = SamplingParams(temperature=1, seed=3)
    for row in (5, 6, 7, 8):
        assert dedupe.ask(Request(row, [row], params, noise_key=1)) is None
        dedupe.answered(row, [Completion(row, [row], "stop")])
    assert [*dedupe.rows.values()] == [6, 7, 8]
    assert dedupe.ask(Request(20, [6], params, noise_key=1))[0].token_ids == [6]
    assert [*dedupe.rows.values()] == [7, 8, 20]
    assert dedupe.ask(Request(21, [7], params, noise_key=1)) is None
    assert dedupe.ask(Request(22, [8], params, noise_key=2)) is None
    assert dedupe.ask(Request(23, [5], params, noise_key=1)) is None
    assert asked == [6, 7]
    later = Dedupe(dict(dedupe.rows), recall)
    assert later.ask(Request(30, [8], params, noise_key=1))[0].token_ids == [8]


def test_failures_are_not_remembered():
    dedupe = Dedupe()
    assert dedupe.ask(Request(0, [1], SamplingParams())) is None
    dedupe.answered(0, [Completion.failed(0, RowError("prompt_too_long", "too long"))])
    assert not dedupe.rows
    assert dedupe.ask(Request(1, [1], SamplingParams())) is None
