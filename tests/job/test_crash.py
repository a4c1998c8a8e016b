"""A job that is killed and started again leaves what an undisturbed one leaves: no row lost, twice or changed."""

from __future__ import annotations

import json
import random
import signal

import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.io.targets import make_target
from paged_infer.io.writers import journal_path, read_results
from tests.job import crash_job

NUM_ROWS = 2000
RECOMPUTED = ["cached_tokens"]
"""Columns that say how a row was computed, not what came out."""


@pytest.fixture(scope="module")
def job_input(tmp_path_factory):
    choose = random.Random(3)
    path = tmp_path_factory.mktemp("crash") / "in.jsonl"
    lines = []
    for i in range(NUM_ROWS):
        row = {
            "id": i,
            "prompt": f"{choose.choice(['shared beginning of prompts ', ''])}{choose.random()}",
            "note": [i],
        }
        row["max_tokens"] = choose.randrange(1, 12)
        lines.append("{bad" if i % 97 == 5 else json.dumps(row))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def undisturbed(job_input, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out.arrow"
    process = crash_job.start(job_input, output)
    process.join()
    assert process.exitcode == 3
    table = read(output)
    assert table["row"].to_pylist() == list(range(NUM_ROWS))
    assert sum(reason == "error" for reason in table["finish_reason"].to_pylist()) == len(range(5, NUM_ROWS, 97))
    return table


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


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("point", crash_job.CRASHES)
def test_a_crash_at_a_named_point(job_input, undisturbed, tmp_path, point, count):
    if count > 1 and point in ("present", "rename"):
        pytest.skip("happens once")
    output = tmp_path / "out.arrow"
    process = crash_job.start(job_input, output, crash=(point, count))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(job_input, output)
    assert_same(output, undisturbed)


def kill_again_and_again(job_input, output, kills, seed, seconds):
    """Kill the job that many times, each time a while after it got further; how many rows were done each time."""
    choose = random.Random(seed)
    done = []
    journal = journal_path(make_target(output))
    while len(done) < kills:
        process = crash_job.start(job_input, output, delay=0.01)
        process.join(choose.uniform(0, seconds))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        if journal.exists() and journal.stat().st_size:
            rows = [row for batch in read_results(journal) for row in batch["row"].to_pylist()]
            assert len(rows) == len(set(rows))
            done.append(len(rows))
        else:
            done.append(0)
    return done


def test_kills_at_random_moments(job_input, undisturbed, tmp_path):
    output = tmp_path / "out.arrow"
    done = kill_again_and_again(job_input, output, 5, seed=1, seconds=0.8)
    assert done == sorted(done)
    assert done[-1] > 0
    finish(job_input, output)
    assert_same(output, undisturbed)


@pytest.mark.full
def test_thirty_kills_at_random_moments(job_input, undisturbed, tmp_path):
    output = tmp_path / "out.arrow"
    done = kill_again_and_again(job_input, output, 30, seed=2, seconds=0.5)
    assert len(done) == 30
    assert done == sorted(done)
    finish(job_input, output)
    assert_same(output, undisturbed)


def test_a_second_process_on_the_same_output_is_refused(job_input, tmp_path):
    output = tmp_path / "out.arrow"
    first = crash_job.start(job_input, output, delay=0.02)
    while not journal_path(make_target(output)).exists():
        first.join(0.01)
    second = crash_job.start(job_input, output)
    second.join()
    assert second.exitcode == 1  # ConfigError, unhandled in this process
    first.kill()
    first.join()
    finish(job_input, output)
