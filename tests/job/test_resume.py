"""Running the same job again, or another one over it: what is continued, what is refused, and how it says so."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys

import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from paged_infer.config import ConfigError
from paged_infer.io import writers
from paged_infer.io.lock import OutputLock
from paged_infer.io.targets import make_target
from paged_infer.io.writers import journal_path, ledger_path, lock_path, read_results
from paged_infer.job import run as job
from paged_infer.job.config import RunConfig
from paged_infer.job.run import JobError, preflight, run_job
from paged_infer.types import InputFailed
from tests.job.fake_engine import FakeEngine

ROWS = [{"id": i, "prompt": f"prompt {i}", "max_tokens": 9} for i in range(40)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Segments of ten rows, so that jobs of a few rows have several; every row read before the first step."""
    monkeypatch.setattr(writers, "SEGMENT_ROWS", 10)


def config(tmp_path, rows=ROWS, **options):
    if rows is not None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"inputs": [str(tmp_path / "in.jsonl")], "output": str(tmp_path / "out.arrow"), "progress": "none"}
    return RunConfig.resolve(settings, options)


def stopping(after_steps, **options):
    """An engine in whose n-th step a SIGTERM arrives."""

    def on_step(engine):
        if engine.steps == after_steps:
            signal.raise_signal(signal.SIGTERM)

    return FakeEngine(on_step=on_step, **options)


def interrupted(tmp_path, rows=ROWS, steps=5, **options):
    run_config = config(tmp_path, rows, **options)
    summary = run_job(run_config, stopping(steps))
    assert summary.exit_code == 143
    assert not make_target(run_config.output_path).is_complete()
    return summary


def texts(path):
    return [row["text"] for batch in read_results(path) for row in batch.to_pylist()]


EXPECTED = [f"prompt {i}"[:9] for i in range(40)]


def files(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet", ".jsonl"])
def test_a_stopped_job_goes_on_where_it_was(tmp_path, suffix):
    output = str(tmp_path / f"out{suffix}")
    first = interrupted(tmp_path, output=output, seed=None)
    assert first.rows == 20
    assert files(tmp_path) == sorted(
        f"{n}" for n in ("in.jsonl", *(f"out{suffix}.{s}" for s in ("ledger", "partial", "sealed")))
    )
    engine = FakeEngine()
    second = run_job(config(tmp_path, None, output=output), engine)
    assert sorted(engine.requests) == list(range(20, 40))
    assert (second.rows, second.resumed_rows, second.exit_code) == (40, 20, 0)
    assert second.run_seed == first.run_seed
    assert texts(tmp_path / f"out{suffix}") == EXPECTED
    extra = [f"out{suffix}.ledger"] if suffix == ".jsonl" else []
    assert files(tmp_path) == sorted(["in.jsonl", f"out{suffix}", *extra])


def test_sealed_input_is_not_read_again(tmp_path, monkeypatch):
    interrupted(tmp_path, steps=8)
    lines = (tmp_path / "in.jsonl").read_text().split("\n")
    monkeypatch.setattr(job, "HEAD_START_SECONDS", 0)
    run_config = config(tmp_path, None)
    read = []
    original = job.Inputs.rows

    def rows(self, start=None):
        for row in original(self, start):
            read.append(row.index)
            yield row

    monkeypatch.setattr(job.Inputs, "rows", rows)
    run_job(run_config, FakeEngine())
    assert read[0] == 30
    assert len(lines) == 41


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet", ".jsonl"])
def test_a_complete_job_is_summed_up_again(tmp_path, suffix):
    output = str(tmp_path / f"out{suffix}")
    rows = [*ROWS, "{bad"]
    first = run_job(config(tmp_path, rows, output=output), FakeEngine())

    def no_engine():
        raise AssertionError("loaded a model for nothing")

    second = run_job(config(tmp_path, None, output=output), no_engine)
    assert (second.rows, second.errors, second.finish_reasons) == (first.rows, first.errors, first.finish_reasons)
    assert (second.prompt_tokens, second.output_tokens) == (first.prompt_tokens, first.output_tokens)
    assert (first.exit_code, second.exit_code) == (3, 3)
    assert second.resumed_rows == 41


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "temperature is now 0.5, was not set"),
        ({"max_tokens": 3}, "max_tokens is now 3, was 7"),
        ({"system": "Be brief."}, "system is now 'Be brief.', was not set"),
        ({"seed": 2}, "seed is now 2, was not set"),
        ({"keep": ["id"]}, r"keep is now \['id'\], was \[\]"),
        ({"model": "other"}, "model is now 'other', was"),
        ({"limit": 5}, "limit is now 5, was not set"),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_other_settings_are_refused_by_name(tmp_path, options, message, complete):
    if complete:
        run_job(config(tmp_path, max_tokens=7), FakeEngine())
    else:
        interrupted(tmp_path, max_tokens=7)
    for check in (preflight, lambda c: run_job(c, FakeEngine())):
        with pytest.raises(ConfigError, match=message):
            check(config(tmp_path, None, **{"max_tokens": 7, **options}))
    preflight(config(tmp_path, None, max_tokens=7, num_kv_blocks=5, threads=1, order="input"))


def test_other_input_is_refused_by_name(tmp_path):
    interrupted(tmp_path)
    changed = [{"prompt": "other"}, *ROWS[1:]]
    with pytest.raises(ConfigError, match=r"in\.jsonl is not what it was"):
        run_job(config(tmp_path, changed), FakeEngine())


def test_other_weights_are_refused(tmp_path):
    engine = stopping(5)
    engine.description = {"model": {"digest": "1"}, "engine": {"dtype": "float32"}}
    run_job(config(tmp_path), engine)
    for part, name, value in (("model", "digest", "2"), ("engine", "dtype", "bfloat16")):
        other = FakeEngine()
        other.description = {**engine.description, part: {name: value}}
        with pytest.raises(ConfigError, match=f"{name} is now {value}, was"):
            run_job(config(tmp_path, None), other)
    again = FakeEngine()
    again.description = engine.description
    assert run_job(config(tmp_path, None), again).rows == 40


def test_another_version_is_refused(tmp_path):
    interrupted(tmp_path)
    path = tmp_path / "out.arrow.ledger"
    ledger = orjson.loads(path.read_bytes())
    ledger["fingerprint"]["version"] = "0.0.1"
    path.write_bytes(orjson.dumps(ledger))
    with pytest.raises(ConfigError, match=r"was 0\.0\.1"):
        preflight(config(tmp_path, None))


@pytest.mark.parametrize("complete", [False, True])
def test_input_that_grew_at_its_end_is_continued(tmp_path, complete):
    if complete:
        run_job(config(tmp_path), FakeEngine())
    else:
        interrupted(tmp_path)
    more = [*ROWS, *({"prompt": f"more {i}"} for i in range(25))]
    engine = FakeEngine()
    summary = run_job(config(tmp_path, more), engine)
    assert (summary.rows, summary.resumed_rows) == (65, 40 if complete else 20)
    assert sorted(engine.requests) == list(range(40 if complete else 20, 65))
    assert texts(tmp_path / "out.arrow") == [*EXPECTED, *(f"more {i}" for i in range(25))]
    assert run_job(config(tmp_path, None), FakeEngine).resumed_rows == 65


def test_no_resume_starts_again_and_overwrite_replaces(tmp_path):
    interrupted(tmp_path)
    engine = FakeEngine()
    run_job(config(tmp_path, None, resume=False), engine)
    assert len(engine.requests) == 40
    with pytest.raises(ConfigError, match=r"exists already.*--overwrite"):
        preflight(config(tmp_path, None, resume=False))
    assert run_job(config(tmp_path, ROWS[:3], overwrite=True), FakeEngine()).rows == 3
    assert files(tmp_path) == ["in.jsonl", "out.arrow"]


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet", ".jsonl"])
def test_error_rows_are_answered_again_on_request(tmp_path, suffix):
    output = str(tmp_path / f"out{suffix}")
    assert run_job(config(tmp_path, output=output), FakeEngine(max_model_len=9)).errors.total() == 30
    engine = FakeEngine()
    again = run_job(config(tmp_path, None, output=output, retry_errors=True), engine)
    assert sorted(engine.requests) == list(range(10, 40))
    assert (again.rows, again.resumed_rows, again.exit_code) == (40, 10, 0)
    assert texts(tmp_path / f"out{suffix}") == EXPECTED
    untouched = run_job(config(tmp_path, None, output=output, retry_errors=True), FakeEngine)
    assert untouched.resumed_rows == 40


def test_error_rows_that_fail_again_do_not_look_like_a_failing_job(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TRIAL_ROWS", 5)
    rows = [row if i % 2 else "{bad" for i, row in enumerate(ROWS)]
    for limits in ({}, {"max_error_rate": 0.6}):
        for _ in range(2):
            summary = run_job(config(tmp_path, rows, retry_errors=True, **limits), FakeEngine())
            assert (summary.exit_code, summary.errors.total(), summary.rows) == (3, 20, 40)
    with pytest.raises(JobError, match=r"rows failed, more than max_error_rate 0\.4"):
        run_job(config(tmp_path, rows, retry_errors=True, max_error_rate=0.4), FakeEngine())


def test_error_rows_of_an_unfinished_job_are_answered_again(tmp_path):
    run_config = config(tmp_path)
    run_job(run_config, stopping(6, max_model_len=9))
    assert run_job(config(tmp_path, None, retry_errors=True), stopping(2)).exit_code == 143
    assert run_job(config(tmp_path, None, retry_errors=True), FakeEngine()).exit_code == 0
    assert texts(tmp_path / "out.arrow") == EXPECTED


def test_a_job_of_nothing_but_errors_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TRIAL_ROWS", 15)
    with pytest.raises(JobError, match="all of the first 15 rows failed, mostly with prompt_too_long"):
        run_job(config(tmp_path), FakeEngine(max_model_len=3))
    assert not (tmp_path / "out.arrow").exists()
    assert len(texts(tmp_path / "out.arrow.partial")) == 15


def test_bad_lines_before_the_first_answer_do_not_look_like_a_failing_job(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TRIAL_ROWS", 5)
    rows = [*["{bad"] * 4, *ROWS[:6], *["{bad"] * 6]
    assert run_job(config(tmp_path, rows), FakeEngine()).errors.total() == 10
    with pytest.raises(JobError, match="all of the first 5 rows failed, mostly with invalid_json"):
        run_job(config(tmp_path, [*["{bad"] * 5, *ROWS], overwrite=True), FakeEngine())


def test_max_error_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TRIAL_ROWS", 20)
    rows = [row if i % 4 else "{bad" for i, row in enumerate(ROWS)]
    with pytest.raises(JobError, match=r"rows failed, more than max_error_rate 0.2"):
        run_job(config(tmp_path, rows, max_error_rate=0.2), FakeEngine())
    assert run_job(config(tmp_path, rows, max_error_rate=0.3, overwrite=True), FakeEngine()).exit_code == 3
    with pytest.raises(JobError, match="1 of 1 rows failed"):
        run_job(config(tmp_path, ["{bad"], max_error_rate=0.5, overwrite=True), FakeEngine())


def test_the_time_limit_is_a_stop(tmp_path):
    summary = run_job(config(tmp_path, time_limit=0), FakeEngine())
    assert (summary.exit_code, summary.stopped_by) == (143, signal.SIGTERM)
    assert run_job(config(tmp_path, None, time_limit="1h30m"), FakeEngine()).rows == 40


def test_a_damaged_journal_is_computed_again_and_a_damaged_segment_refused(tmp_path, caplog):
    interrupted(tmp_path)
    target = make_target(tmp_path / "out.arrow")
    data = bytearray(journal_path(target).read_bytes())
    data[len(data) // 2] ^= 0xFF
    journal_path(target).write_bytes(data)
    sealed = (tmp_path / "out.arrow.sealed").read_bytes()
    (tmp_path / "out.arrow.sealed").write_bytes(sealed[:-100] + bytes([sealed[-100] ^ 1]) + sealed[-99:])
    with pytest.raises(ConfigError, match=r"out\.arrow\.sealed is damaged: .*--overwrite"):
        run_job(config(tmp_path, None), FakeEngine())
    (tmp_path / "out.arrow.sealed").write_bytes(sealed)
    assert run_job(config(tmp_path, None), FakeEngine()).rows == 40
    assert texts(tmp_path / "out.arrow") == EXPECTED


def test_flipped_bits_in_the_journal_cost_only_time(tmp_path, caplog):
    interrupted(tmp_path, steps=4)
    path = tmp_path / "out.arrow.partial"
    data = bytearray(path.read_bytes())
    data[-40] ^= 0x01
    path.write_bytes(data)
    engine = FakeEngine()
    run_job(config(tmp_path, None), engine)
    assert "is damaged: the rows in it are answered again" in caplog.text
    assert texts(tmp_path / "out.arrow") == EXPECTED


def test_rows_of_an_unknown_job_are_not_touched(tmp_path):
    (tmp_path / "out.arrow.partial").write_bytes(b"rows of somebody")
    with pytest.raises(ConfigError, match="rows of an unknown job: move it away, or --overwrite"):
        preflight(config(tmp_path))
    assert run_job(config(tmp_path, overwrite=True), FakeEngine()).rows == 40


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 99}', b'{"format": 1}'])
def test_an_unusable_ledger_is_refused(tmp_path, data):
    (tmp_path / "out.arrow.ledger").write_bytes(data)
    with pytest.raises(ConfigError, match=r"out\.arrow\.ledger .*--overwrite"):
        preflight(config(tmp_path))
    assert run_job(config(tmp_path, overwrite=True), FakeEngine()).rows == 40


def test_a_locked_output_is_refused_and_says_by_whom(tmp_path):
    message = r"another process \(process [0-9]+ on .*\) is writing these results"
    with OutputLock(lock_path(make_target(tmp_path / "out.arrow"))), pytest.raises(ConfigError, match=message):
        run_job(config(tmp_path), FakeEngine())
    assert run_job(config(tmp_path), FakeEngine()).rows == 40


def test_a_full_disk_keeps_what_was_safe(tmp_path, monkeypatch):
    written = 0
    fsync = os.fsync

    def full(descriptor):
        nonlocal written
        written += 1
        if written > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(writers, "FLUSH_SECONDS", 0.0)
    with pytest.raises(JobError, match="No space left on device"):
        run_job(config(tmp_path), FakeEngine())
    monkeypatch.setattr(os, "fsync", fsync)
    engine = FakeEngine()
    summary = run_job(config(tmp_path, None), engine)
    assert summary.resumed_rows > 0
    assert len(engine.requests) == 40 - summary.resumed_rows
    assert texts(tmp_path / "out.arrow") == EXPECTED


def test_a_folder_that_cannot_be_written_is_found_out_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ConfigError, match=rf"out\.arrow: the folder {tmp_path} is not writable"):
        preflight(config(tmp_path))


def test_the_ledger_shows_that_a_job_without_new_rows_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "FLUSH_SECONDS", 0.0)
    beats = []

    def on_step(engine):
        beats.append(orjson.loads(ledger_path(make_target(tmp_path / "out.arrow")).read_bytes())["heartbeat"]["time"])
        engine._rate = 0 if engine.steps <= 5 else 4

    run_job(config(tmp_path), FakeEngine(on_step=on_step))
    assert len({*beats[:5]}) == 5


def test_a_folder_of_parts(tmp_path):
    folder = tmp_path / "out"
    interrupted(tmp_path, output=str(folder), steps=7)
    assert [path.name for path in sorted(folder.glob("*.arrow"))] == ["part-00000.arrow", "part-00001.arrow"]
    assert not (folder / "manifest.json").exists()
    engine = FakeEngine()
    run_job(config(tmp_path, None, output=str(folder)), engine)
    assert sorted(engine.requests) == list(range(28, 40))
    assert files(folder) == ["manifest.json", *(f"part-0000{i}.arrow" for i in range(4))]
    assert texts(folder) == EXPECTED
    parts = orjson.loads((folder / "manifest.json").read_bytes())["parts"]
    assert [part["rows"] for part in parts] == [10, 10, 10, 10]
    assert run_job(config(tmp_path, None, output=str(folder)), FakeEngine).resumed_rows == 40
    run_job(config(tmp_path, ROWS[:5], output=str(folder), overwrite=True), FakeEngine())
    assert files(folder) == ["manifest.json", "part-00000.arrow"]


def test_a_part_that_was_changed_is_refused_and_a_lost_one_named(tmp_path):
    folder = tmp_path / "out"
    interrupted(tmp_path, output=str(folder), steps=7)
    part = folder / "part-00001.arrow"
    content = part.read_bytes()
    part.write_bytes(content[:-8])
    with pytest.raises(ConfigError, match=r"part-00001\.arrow is not what was written: restore it, or --overwrite"):
        run_job(config(tmp_path, None, output=str(folder)), FakeEngine())
    part.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no complete results: merge its shards, or name a file in it"):
        texts(folder)
    run_job(config(tmp_path, None, output=str(folder)), FakeEngine())
    part.unlink()
    with pytest.raises(ConfigError, match=r"part-00001\.arrow: no such file"):
        texts(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[]", "is no manifest of results"), (b'{"parts": 3}', "is no manifest of results"), (b"{", "cannot be read: ")],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, content, message):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"manifest\.json {message}"):
        texts(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"[1]\n", r"a\.jsonl holds no results: b'\[1\]\\n' is no object"),
        ("a.jsonl", b"{bad\n", r"a\.jsonl holds no readable results: "),
        ("a.arrow", b"", r"a\.arrow holds no readable results: "),
        ("a.parquet", b"", r"a\.parquet holds no readable results: "),
        ("b.arrow.partial", None, r"b\.arrow\.partial: no such file"),
        ("b.arrow", None, r"b\.arrow: no such file$"),
        ("c.arrow", None, r"c\.arrow: no such file; .*c\.arrow\.partial is there, unfinished"),
    ],
)
def test_what_holds_no_results(tmp_path, name, content, message):
    (tmp_path / "c.arrow.partial").touch()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        texts(tmp_path / name)


def test_no_resume_does_not_replace_results_that_an_unfinished_job_was_to_replace(tmp_path):
    run_job(config(tmp_path), FakeEngine())
    assert run_job(config(tmp_path, None, max_tokens=3, overwrite=True), stopping(2)).exit_code == 143
    with pytest.raises(ConfigError, match=r"out\.arrow exists already: choose another -o, or --overwrite"):
        preflight(config(tmp_path, None, max_tokens=3, resume=False))
    assert texts(tmp_path / "out.arrow") == EXPECTED
    assert run_job(config(tmp_path, None, max_tokens=3), FakeEngine()).resumed_rows == 8


def test_an_input_that_fails_for_now_fails_the_job_and_keeps_what_is_done(tmp_path, monkeypatch):
    run_config = config(tmp_path)
    monkeypatch.setattr(job, "CHUNK_ROWS", 10)
    monkeypatch.setattr(job, "HEAD_START_SECONDS", 0)
    original = job.Inputs.rows

    def rows(self, start=None):
        for row in original(self, start):
            if row.index == 25:
                raise InputFailed("reading in.jsonl failed: connection reset")
            yield row

    monkeypatch.setattr(job.Inputs, "rows", rows)
    with pytest.raises(JobError, match=r"reading in\.jsonl failed: connection reset"):
        run_job(run_config, FakeEngine(rate=100))
    monkeypatch.undo()
    assert run_job(config(tmp_path, None), FakeEngine()).resumed_rows == 20
    assert texts(tmp_path / "out.arrow") == EXPECTED


def test_an_empty_job_in_a_folder_has_a_part_that_opens(tmp_path):
    run_job(config(tmp_path, [], output=str(tmp_path / "out")), FakeEngine())
    assert pa.ipc.open_stream(tmp_path / "out" / "part-00000.arrow").read_all().num_rows == 0


def test_standard_input_is_only_gone_on_with_when_asked(tmp_path, monkeypatch):
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()

    def feed():
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    feed()
    options = {"inputs": ["-"]}
    run_job(config(tmp_path, None, **options), stopping(5))
    feed()
    with pytest.raises(ConfigError, match=r"standard input cannot be checked.*--resume.*--no-resume"):
        run_job(config(tmp_path, None, **options), FakeEngine())
    engine = FakeEngine()
    run_job(config(tmp_path, None, resume=True, **options), engine)
    assert sorted(engine.requests) == list(range(20, 40))
    assert texts(tmp_path / "out.arrow") == EXPECTED


def test_results_that_were_removed_are_made_again(tmp_path):
    output = tmp_path / "out.jsonl"
    run_job(config(tmp_path, output=str(output)), FakeEngine())
    output.unlink()
    assert run_job(config(tmp_path, None, output=str(output)), FakeEngine()).resumed_rows == 0
    assert texts(output) == EXPECTED


def test_a_report_that_cannot_be_written_is_found_out_beforehand(tmp_path):
    with pytest.raises(ConfigError, match=r"report=.*expected a file in a folder that is there and writable"):
        preflight(config(tmp_path, report=str(tmp_path / "missing" / "report.json")))


@pytest.mark.parametrize("name", ["in.jsonl", "../{here}/in.jsonl", "link.jsonl"])
def test_inputs_are_not_written_over(tmp_path, name):
    run_config = config(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    path = str(tmp_path / name.format(here=tmp_path.name))
    before = (tmp_path / "in.jsonl").read_bytes()
    for options, message in (
        ({"output": path}, "in.jsonl is one of the inputs: choose another -o|link.jsonl is one of the inputs"),
        ({"report": path}, "is one of the inputs, or the output: choose another --report"),
        ({"report": str(run_config.output_path)}, "is one of the inputs, or the output"),
        ({"inputs": [str(tmp_path / "*.jsonl")], "output": path}, "is one of the inputs"),
    ):
        for check in (preflight, lambda c: run_job(c, FakeEngine())):
            with pytest.raises(ConfigError, match=message):
                check(config(tmp_path, None, overwrite=True, **options))
    with pytest.raises(ConfigError, match="is one of the inputs"):
        run_job(config(tmp_path, None, inputs=[str(tmp_path)], output=str(tmp_path)), FakeEngine())
    assert (tmp_path / "in.jsonl").read_bytes() == before


def test_the_report_has_the_figures(tmp_path):
    path = tmp_path / "report.json"
    run_job(config(tmp_path, [*ROWS, ROWS[0], "{bad"], report=str(path), cost_per_hour=3.6), FakeEngine())
    report = json.loads(path.read_text())
    assert report["exit_code"] == 3
    assert report["results"]["rows"] == 42
    assert report["results"]["errors"] == {"invalid_json": 1}
    assert report["run"]["copied_rows"] == 1
    assert report["run"]["output_tokens"] == 40 * 8 + 30
    wall = report["seconds"]["wall"]
    assert report["cost"]["total"] == pytest.approx(wall * 0.001)
    assert report["cost"]["per_million_output_tokens"] == pytest.approx(1e6 * wall * 0.001 / 350)
    assert report["rates"]["output_tokens_per_second"] == pytest.approx(350 / report["seconds"]["run"])
    assert 0 <= report["row_seconds"]["p50"] <= report["row_seconds"]["p100"] <= report["seconds"]["run"]
    assert report["settings"]["versions"]["python"]


def test_parquet_results_keep_their_settings(tmp_path):
    run_job(config(tmp_path, output=str(tmp_path / "out.parquet")), FakeEngine())
    assert b"paged_infer" in pq.read_schema(tmp_path / "out.parquet").metadata


def test_journal_and_ledger_stand_beside_the_output(tmp_path):
    target = make_target(tmp_path / "out.arrow")
    assert ledger_path(target) == tmp_path / "out.arrow.ledger"
    assert journal_path(make_target(tmp_path / "out", "2-of-3")) == tmp_path / "out" / "2-of-3-results.partial"
