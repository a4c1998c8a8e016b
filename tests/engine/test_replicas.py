"""Several engines as one: the same results as from a single one, whichever of them dies when."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time

import psutil
import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.config import ConfigError
from paged_infer.engine.replicas import MAX_RESTARTS, Replicas, serve_engine
from paged_infer.job.config import RunConfig
from paged_infer.job.run import JobError, run_job
from paged_infer.llm import LLM
from paged_infer.parallel import process
from paged_infer.parallel.process import Worker
from paged_infer.types import Request, SamplingParams
from tests.fixtures.checkpoints import hf_greedy
from tests.job.fake_engine import FakeEngine, FakeTokenizer
from tests.models.test_lora import make_adapter
from tests.parallel import targets

ROWS = [{"id": i, "prompt": f"{'shared ' * (i % 3)}{i}", "max_tokens": 1 + i % 11} for i in range(600)]
ROWS[7] = {"prompt": "x" * 2000}


class Fleet:
    """Starts workers around fake engines and remembers them."""

    def __init__(self, count=2, builds=None):
        self.count = count
        self.builds = builds or {}
        self.workers: list[Worker] = []

    def start(self, number):
        build = self.builds.get(number, targets.slow_engine)
        self.workers.append(Worker(f"engine {number + 1} of {self.count}", serve_engine, build, 8))
        return self.workers[-1]

    def engine(self):
        return Replicas(self.start, self.count, FakeTokenizer, 4)

    def kill(self, index):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.workers[index].pid, signal.SIGKILL)

    def alive(self):
        return [worker.pid for worker in self.workers if psutil.pid_exists(worker.pid)]


def same(table, expected):
    return table.drop_columns(["error"]).equals(expected.drop_columns(["error"]))  # which names the folder


def run(tmp_path, engine, name="out.arrow", **options):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    settings = {"inputs": [str(path)], "output": str(tmp_path / name), "progress": "none", "seed": 1, **options}
    summary = run_job(RunConfig.resolve(settings), engine)
    with pa.memory_map(str(tmp_path / name)) as source:
        return summary, pa.ipc.open_stream(source).read_all()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(tmp_path_factory.mktemp("single"), FakeEngine())[1]


def test_one_output_as_from_one_engine(tmp_path, expected):
    fleet = Fleet(2)
    summary, table = run(tmp_path, fleet.engine)
    assert same(table, expected)
    assert (summary.exit_code, summary.errors) == (3, {"prompt_too_long": 1})
    assert summary.computed_output_tokens == sum(filter(None, table["output_tokens"].to_pylist()))
    assert not fleet.alive()


def test_a_request_is_forgotten_wherever_it_is():
    """Some are with an engine and some in the pool when every third one is given up."""
    fleet = Fleet(2)
    engine = fleet.engine()
    try:
        for i in range(90):
            engine.add(Request(i, [65 + i % 20] * 6, SamplingParams(max_tokens=3)))
        done = [completion.request_id for completion in engine.step()]
        dropped = {*range(0, 90, 3)} - {*done}
        for i in dropped:
            engine.abort(i)
        engine.abort(1000)
        while engine.has_unfinished():
            done += [completion.request_id for completion in engine.step()]
        assert sorted(done) == [i for i in range(90) if i not in dropped]
        assert len(dropped) > 20
        assert [slot.work for slot in engine._slots] == pytest.approx([0, 0], abs=1e-6)
    finally:
        engine.close()


def test_the_work_is_shared_and_the_figures_are_those_of_all(tmp_path):
    fleet = Fleet(2)
    engine = fleet.engine()
    try:
        run(tmp_path, engine)
        shares = [slot.stats.output_tokens for slot in engine._slots]
        assert min(shares) > 0.3 * sum(shares)
        assert (
            engine.stats.output_tokens
            == sum(shares)
            == sum(min(1 + i % 11, 30) for i in range(600) if i != 7)
            - sum(max(0, 1 + i % 11 - len(ROWS[i]["prompt"])) for i in range(600) if i != 7)
        )
        assert engine.load.core_seconds > 0.1
        assert engine.load.num_blocks == 2 * FakeEngine().load.num_blocks
    finally:
        engine.close()
    assert not fleet.alive()


def test_a_killed_engine_costs_no_row_and_is_replaced(tmp_path, expected):
    fleet = Fleet(2)
    engine = fleet.engine()
    choose = random.Random(5)

    def killer():
        for _ in range(3):
            time.sleep(choose.uniform(0.2, 0.6))
            if done.is_set():
                return
            fleet.kill(-1)

    done = threading.Event()
    thread = threading.Thread(target=killer)
    thread.start()
    try:
        _, table = run(tmp_path, engine)
    finally:
        done.set()
        thread.join()
        engine.close()
    assert same(table, expected)
    assert len(fleet.workers) > 2
    assert not fleet.alive()


def test_a_stopped_engine_costs_no_row_and_is_replaced(tmp_path, expected, monkeypatch, caplog):
    monkeypatch.setattr(process, "HUNG_SECONDS", 1.5)
    fleet = Fleet(2)
    engine = fleet.engine()
    os.kill(fleet.workers[1].pid, signal.SIGSTOP)
    try:
        _, table = run(tmp_path, engine)
    finally:
        engine.close()
    assert same(table, expected)
    assert "engine 2 of 2" in caplog.text
    assert "gave no sign of life" in caplog.text
    assert len(fleet.workers) == 3
    assert not fleet.alive()


def test_an_engine_that_dies_while_it_is_loaded_is_done_without(tmp_path, expected, caplog):
    fleet = Fleet(2, builds={1: targets.hanging_engine})

    def killer():
        while len(fleet.workers) < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        fleet.kill(1)

    thread = threading.Thread(target=killer)
    thread.start()
    _, table = run(tmp_path, fleet.engine)
    thread.join()
    assert same(table, expected)
    assert "engine 2 of 2" in caplog.text
    assert "SIGKILL" in caplog.text


def test_the_job_ends_with_a_name_once_no_engine_lives_and_is_resumed(tmp_path, expected):
    fleet = Fleet(2)
    stop = threading.Event()

    def killer():
        while not stop.wait(0.15):
            for index in range(len(fleet.workers)):
                fleet.kill(index)

    thread = threading.Thread(target=killer)
    engine = fleet.engine()
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(JobError, match=r"engine [12] of 2 \(process \d+\) was killed by SIGKILL"):
            run(tmp_path, engine)
    finally:
        stop.set()
        thread.join()
        engine.close()
    assert time.monotonic() - began < 15
    assert 2 <= len(fleet.workers) <= 2 * (1 + MAX_RESTARTS)
    assert not fleet.alive()
    _, table = run(tmp_path, FakeEngine(), resume=True)
    assert same(table, expected)


def test_what_refuses_one_engine_refuses_the_job(tmp_path):
    fleet = Fleet(2, builds={0: targets.refused_engine, 1: targets.hanging_engine})
    with pytest.raises(ConfigError, match="no memory"):
        fleet.engine()
    assert not fleet.alive()


def test_each_engine_has_the_adapters(random_model, prompts, tmp_path):
    base = random_model("qwen2")
    merged = make_adapter(tmp_path / "lora", base, ("q_proj", "down_proj"), 3, 1) / "merged"
    params = [SamplingParams(max_tokens=8, ignore_eos=True, adapter="a" if i % 2 else None) for i in range(12)]
    options = {"lora": [f"a={tmp_path}/lora/adapter"], "data_parallel_size": 2, "max_num_seqs": 3}
    with LLM(str(base), dtype="float32", num_kv_blocks=64, **options) as llm:
        answers = llm.generate(prompts[:12], params)
        assert min(slot.stats.output_tokens for slot in llm.engine._slots) > 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
        (expected,), (gaps,) = hf_greedy(merged if i % 2 else base, [prompt], 8)
        certain = next((step for step, gap in enumerate(gaps) if gap < 1e-3), 8)
        assert answer.token_ids[:certain] == expected[:certain]


@pytest.fixture(scope="module")
def prompts():
    return [[2 + (7 * i + j) % 50 for j in range(3 + i % 20)] for i in range(24)]


def test_a_real_model_answers_as_in_one_process(random_model, prompts):
    options = {"dtype": "float32", "num_kv_blocks": 64, "seed": 7}
    params = [SamplingParams(max_tokens=4 + i % 9, temperature=i % 2, seed=None if i % 3 else i) for i in range(24)]
    many = SamplingParams(max_tokens=6, temperature=1, n=8, seed=7)
    results = []
    for size in (1, 2):
        with LLM(str(random_model("llama")), data_parallel_size=size, **options) as llm:
            answers = llm.generate(prompts, params)
            answers += llm.generate([prompts[0]], many)
            answers += llm.generate([prompts[1]] * 4, SamplingParams(max_tokens=6, temperature=1))
        results.append([answer.token_ids for answer in answers])
    assert results[0] == results[1]
    assert len({*map(tuple, results[0][24:32])}) > 1
    assert len({*map(tuple, results[0][32:])}) > 1
