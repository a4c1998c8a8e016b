"""The job over a Ray cluster leaves what one process leaves, whatever the cluster loses on the way."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.config import ConfigError
from paged_infer.engine.shared_engine import SharedEngine
from paged_infer.integrations.ray_data import PagedInfer
from paged_infer.io.schema import read_settings
from paged_infer.job import ray_job
from paged_infer.job.config import RunConfig
from paged_infer.job.merge import merge
from paged_infer.job.ray_job import PartRunner, Plan, part_config, run_on_ray
from paged_infer.job.run import JobError, run_job
from paged_infer.job.summary import JobSummary
from paged_infer.llm import LLM
from paged_infer.types import Request, SamplingParams
from tests.job.fake_engine import FakeEngine

full_ray = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]


def fake(config):
    return FakeEngine(rate=8)


def slow(config):
    return FakeEngine(rate=4, on_step=lambda engine: time.sleep(0.02))


def slow_model(config):
    engine = ray_job.build_engine_of(config)
    step = engine.step
    engine.step = lambda: time.sleep(0.3) or step()
    return engine


def job(tmp_path, rows=2000, name="out.arrow", **options):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": i, "prompt": f"row {i}", "max_tokens": 1 + i % 9, "note": i}) for i in range(rows)]
    lines[5] = "{bad"
    path.write_text("\n".join(lines))
    given = {"inputs": [str(path)], "output": str(tmp_path / name), "progress": "none", "keep": ["note"]}
    return RunConfig.resolve(given, options)


def read(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def in_one_process(config, tmp_path, build=fake):
    single = replace(config, output=str(tmp_path / "single.arrow"), ray=None)
    run_job(single, build(single))
    return read(single.output_path)


def test_parts_share_an_engine_and_join_to_what_one_process_writes(tmp_path):
    config = job(tmp_path, rows=600, ray="local", seed=3)
    plan = Plan(3, 5)

    async def work():
        runner = PartRunner(config, plan, fake)
        batches = [runner({"part": [number]}) for number in range(1, 6)]
        return [json.loads(row["outcome"][0]) for row in await asyncio.gather(*(anext(batch) for batch in batches))]

    outcomes = asyncio.run(work())
    assert sum(outcome["rows"] for outcome in outcomes) == 600
    assert sum(outcome["errors"] for outcome in outcomes) == 1
    merge([part_config(config, plan, number).output_path for number in range(1, 6)], tmp_path / "joined.arrow")
    assert read(tmp_path / "joined.arrow").equals(in_one_process(config, tmp_path))


def test_a_part_that_cannot_be_done_says_why(tmp_path):
    config = job(tmp_path, rows=20, ray="local", on_error="fail")

    async def work():
        return await anext(PartRunner(config, Plan(1, 1), fake)({"part": [1]}))

    outcome = json.loads(asyncio.run(work())["outcome"][0])
    assert "line 6" in outcome["error"]
    assert outcome["usage"] is False


def test_views_of_an_engine_get_their_own_answers():
    engine = FakeEngine(rate=3)
    shared = SharedEngine(engine)
    views = [shared.view() for _ in range(3)]
    for i in range(30):
        views[i % 3].add(Request(i, b"abc", SamplingParams(max_tokens=2)))
    answered = {view: set() for view in views}
    while any(view.has_unfinished() for view in views):
        for view in views[::-1]:
            answered[view] |= {completion.request_id for completion in view.step()}
    assert [answered[view] for view in views] == [set(range(i, 30, 3)) for i in range(3)]
    assert engine.steps <= 12
    assert not shared._owner


def test_how_many_engines_a_cluster_has_room_for(tmp_path):
    def node(alive=True, **resources):
        return {"Alive": alive, "Resources": resources}

    def actors(*nodes, **options):
        return ray_job._actors(list(nodes), job(tmp_path, ray="auto", **options))

    cpus = node(CPU=8.0)
    assert actors(cpus, node(CPU=4.0)) == (3, {"num_cpus": 4})
    assert actors(cpus, node(CPU=4.0), threads=2) == (6, {"num_cpus": 2})
    assert actors(cpus, cpus, data_parallel_size=4) == (4, {"num_cpus": 4})
    assert actors(cpus, node(CPU=8.0, GPU=4.0), node(CPU=8.0, GPU=8.0, alive=False)) == (4, {"num_gpus": 1.0})
    with pytest.raises(ConfigError, match="no node of the cluster has the 2 GPUs that an engine needs"):
        actors(node(GPU=1.0), node(GPU=1.0), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="the cluster has no CPU to give"):
        actors(node(CPU=0.0), node(CPU=8.0, alive=False))


def test_too_many_errors_in_the_parts_fail_the_job(tmp_path):
    config = job(tmp_path, ray="auto", max_error_rate=0.25)
    summary = JobSummary(output=config.output_path, run_seed=0, rows=8)
    summary.errors["error"] = 3
    ray_job._check_error_rate(config, summary, at_end=False)
    with pytest.raises(JobError, match=r"3 of 8 rows failed, more than max_error_rate 0\.25"):
        ray_job._check_error_rate(config, summary, at_end=True)


@pytest.mark.parametrize(("usage", "kind"), [(True, ConfigError), (False, JobError)])
def test_a_part_that_fails_fails_the_job(tmp_path, monkeypatch, usage, kind):
    class Parts:
        def map_batches(self, *_, **__):
            return self

        def iter_rows(self):
            yield {"outcome": json.dumps({"error": "in.jsonl line 6: not JSON", "usage": usage})}

    data = SimpleNamespace(from_items=lambda *_, **__: Parts(), ActorPoolStrategy=lambda **options: options)
    ray = SimpleNamespace(data=data, nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    config = job(tmp_path, ray="auto")
    with pytest.raises(kind, match=r"in\.jsonl line 6: not JSON"):
        ray_job._run_parts(config, Plan(1, 2), [1, 2], fake, JobSummary(output=config.output_path, run_seed=0))


def test_standard_input_has_no_parts(tmp_path):
    with pytest.raises(ConfigError, match="standard input cannot be read in parts; save it as a file and name that"):
        run_on_ray(job(tmp_path, inputs=["-"], ray="local"), build=fake)


def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch):
    def init(**options):
        raise ConnectionError("could not find any running Ray instance")

    ray, data = ModuleType("ray"), ModuleType("ray.data")
    ray.data, ray.is_initialized, ray.init = data, lambda: False, init
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    with pytest.raises(ConfigError, match="ray='there:6379': no such cluster: could not find any running Ray instance"):
        run_on_ray(job(tmp_path, ray="there:6379"), build=fake)


@pytest.mark.parametrize("options", [{"shard": "1/2"}, {"report": "r.json"}, {"retry_errors": True}])
def test_what_cannot_be_had_with_ray_is_named(tmp_path, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        job(tmp_path, ray="auto", **options)


def test_without_ray_installed_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'paged-infer\[ray\]'"):
        run_on_ray(job(tmp_path, rows=10, ray="local"), build=fake)


@pytest.fixture(scope="session")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.second = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


class TestCluster:
    pytestmark = full_ray

    def test_two_nodes_write_what_one_process_writes(self, cluster, tmp_path):
        config = job(tmp_path, ray="auto", seed=3)
        began = time.monotonic()
        summary = run_on_ray(config, build=fake)
        print(f"2,000 rows of no work over Ray: {time.monotonic() - began:.1f} s")
        assert (summary.rows, summary.exit_code, summary.errors.total()) == (2000, 3, 1)
        assert read(config.output_path).equals(in_one_process(config, tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.arrow", "single.arrow"]
        assert run_on_ray(config, build=fake).resumed_rows == 2000
        again = run_job(replace(config, ray=None), FakeEngine())
        assert (again.resumed_rows, again.run_seed) == (2000, 3)

    @pytest.mark.parametrize("size", [1, 2])
    def test_a_real_model_answers_as_in_one_process(self, cluster, tmp_path, random_model, size):
        config = job(tmp_path, rows=64, ray="auto", temperature=1.0, seed=5, **tiny(random_model))
        shared = replace(config, engine=replace(config.engine, tensor_parallel_size=size))
        assert run_on_ray(shared).rows == 64
        assert without_cached(config) == without_cached(in_one_process(config, tmp_path, ray_job.build_engine_of))

    def test_a_model_in_shares_in_a_placement_group(self, cluster, tmp_path, random_model):
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([{"CPU": 1}])
        ray.get(group.ready())
        options = tiny(random_model)
        prompts = [f"row {i}" for i in range(8)]
        given = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
        pool = PagedInfer.pool(1, num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group))
        rows = ray.data.from_items([{"prompt": prompt, "i": i} for i, prompt in enumerate(prompts)])
        settings = {**options, **given, "tensor_parallel_size": 2}
        answers = rows.map_batches(PagedInfer, fn_constructor_kwargs=settings, **pool).take_all()
        remove_placement_group(group)
        with LLM(**options) as llm:
            expected = llm.generate(prompts, SamplingParams(**given))
        found = {row["i"]: row["token_ids"].tolist() for row in answers}
        assert found == {i: answer.token_ids for i, answer in enumerate(expected)}

    @pytest.mark.parametrize("kind", ["fake", "model"])
    def test_a_lost_actor_and_then_a_lost_node_cost_only_unfinished_parts(
        self, cluster, tmp_path, random_model, monkeypatch, kind
    ):
        if kind == "fake":
            num_parts, build, config = 8, slow, job(tmp_path, ray="auto")
        else:
            monkeypatch.setattr(ray_job, "PART_ROWS", 4)
            num_parts, build = 16, slow_model
            config = job(tmp_path, rows=64, ray="auto", temperature=1.0, seed=5, **tiny(random_model))
        done_at = []

        def breaker():
            while len(done_at) < 2:
                time.sleep(0.1)
                done = len([*(tmp_path / "out.arrow.parts").glob("part.*-of-*.arrow")])
                if not done_at and done >= 1 and (pids := actor_pids()):
                    os.kill(pids[0], signal.SIGKILL)
                    done_at.append(done)
                elif done_at and done > done_at[0]:
                    cluster.remove_node(cluster.second, allow_graceful=False)
                    done_at.append(done)

        thread = threading.Thread(target=breaker)
        thread.start()
        summary = run_on_ray(config, build=build)
        thread.join()
        cluster.second = cluster.add_node(num_cpus=1)
        assert done_at[0] < done_at[1] < num_parts
        assert read_settings(read(config.output_path).schema)["run_seed"] == summary.run_seed
        one = in_one_process(config, tmp_path, fake if kind == "fake" else ray_job.build_engine_of)
        assert without_cached(config) == without_cached(one)


def tiny(random_model):
    return {"model": str(random_model("llama")), "dtype": "float32", "num_kv_blocks": 64, "threads": 1}


def without_cached(job_or_table):
    """All that a row's engine does not decide."""
    table = read(job_or_table.output_path) if isinstance(job_or_table, RunConfig) else job_or_table
    return table.drop_columns(["cached_tokens"])


def actor_pids():
    """Of the processes in which engines are."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith("ray::") and ("PartRunner" in title or "MapWorker" in title):
            found.append(process.pid)
    return found
