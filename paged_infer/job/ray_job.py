"""A job over a Ray cluster: parts of the input go to engines on its nodes, and come back as part files.

Ray does the scheduling: a part is a row of a Ray dataset that is mapped over a pool of actors, each with an engine.
Where an actor or its node is lost, Ray gives its unfinished parts to another, which goes on with the part's own ledger.
What is finished stays; the same command again does only what is missing. Inputs, model and output must be reachable
under the same path from every node.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import orjson

from paged_infer.config import ConfigError
from paged_infer.engine.interface import AnyEngine
from paged_infer.engine.shared_engine import SharedEngine
from paged_infer.io.counts import ResultCounts
from paged_infer.io.ledger import replace_file
from paged_infer.io.lock import OutputLock
from paged_infer.io.readers import STDIN
from paged_infer.io.targets import FileTarget, Target, make_target
from paged_infer.io.writers import lock_path
from paged_infer.job.config import RunConfig
from paged_infer.job.merge import merge
from paged_infer.job.resume import look, tidy
from paged_infer.job.run import TRIAL_ROWS, JobError, open_inputs, open_target, prompt_reader, run_job, shard_name
from paged_infer.job.signals import Stopped, StopSignals
from paged_infer.job.summary import JobSummary

PART_ROWS = 256
MAX_PARTS = 256
"""Each part counts the rows before it, so their number is bounded, and large jobs have larger parts."""

PARTS_AT_ONCE = 4
"""Parts that share an engine: while one comes to its end, others keep it busy."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the job is cut up; recorded, so that a later run cuts it the same way."""

    run_seed: int
    num_parts: int

    @classmethod
    def load(cls, path: Path) -> Plan | None:
        try:
            return cls(**orjson.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, orjson.dumps(self))


class PartRunner:
    """An actor: an engine, and parts of the job that take turns with it.

    Args:
        config: the whole job.
        plan: how it is cut up.
        build: makes the engine.
    """

    def __init__(self, config: RunConfig, plan: Plan, build: Callable[[RunConfig], AnyEngine]) -> None:
        self._config = config
        self._plan = plan
        self._engine = SharedEngine(build(config))
        self._threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="part")

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        for number in batch["part"]:
            done = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, int(number))
            yield {"part": np.array([number]), "outcome": np.array([orjson.dumps(done).decode()], object)}

    def _run(self, number: int) -> dict[str, Any]:
        """Do a part; what came of it, or why it could not be done."""
        try:
            done = run_job(
                part_config(self._config, self._plan, number), self._engine.view, run_seed=self._plan.run_seed
            )
        except (JobError, ConfigError) as error:
            return {"error": str(error), "usage": isinstance(error, ConfigError)}
        return {
            "rows": done.rows,
            "errors": done.errors.total(),
            "resumed_rows": done.resumed_rows,
            "copied_rows": done.copied_rows,
            "prompt_tokens": done.computed_prompt_tokens,
            "output_tokens": done.computed_output_tokens,
        }


def part_config(config: RunConfig, plan: Plan, number: int) -> RunConfig:
    """The job that does one part, 1 <= number <= plan.num_parts, of the whole one."""
    return replace(
        config,
        shard=f"{number}/{plan.num_parts}",
        output=str(_parts_output(config)),
        overwrite=False,
        max_error_rate=None,
        time_limit=None,
        progress="none",
        ray=None,
        engine=replace(config.engine, data_parallel_size=1),
    )


def _parts_output(config: RunConfig) -> Path:
    path = config.output_path
    return _work_folder(path) / "part.arrow" if isinstance(make_target(path), FileTarget) else path


def _work_folder(output: Path) -> Path:
    return output.with_name(output.name + ".parts")


def _target_of(config: RunConfig) -> Target:
    return make_target(config.output_path, shard_name(config))


def build_engine_of(config: RunConfig) -> AnyEngine:
    """The engine of an actor, on what Ray has given to it."""
    from paged_infer.engine.build import build_engine

    return build_engine(replace(config.engine, data_parallel_size=1))


def run_on_ray(
    config: RunConfig,
    *,
    build: Callable[[RunConfig], AnyEngine] = build_engine_of,
    started: float | None = None,
    signals: StopSignals | None = None,
) -> JobSummary:
    """`run_job` over the Ray cluster `config.ray`: an address, `auto` for the one this machine is in, or `local`.

    Args:
        build: makes an actor's engine; picklable.

    Raises:
        ConfigError: the settings cannot be used, Ray is not installed or not reachable.
        JobError: a part cannot be done, or too many rows fail.
    """
    started = perf_counter() if started is None else started
    output = config.output_path
    inputs = open_inputs(config, prompt_reader(config))
    target = open_target(config, inputs)
    if STDIN in inputs.paths:
        raise ConfigError("ray: standard input cannot be read in parts; save it as a file and name that")
    work = _work_folder(output)
    summary = JobSummary(output=output, run_seed=0)
    with OutputLock(lock_path(target)), signals or StopSignals():
        if isinstance(target, FileTarget):
            outcome = look(replace(config, ray=None), inputs, target)
            if outcome.is_complete:
                summary.run_seed = outcome.ledger.run_seed
                summary.add(tidy(target))
                summary.resumed_rows = summary.rows
                shutil.rmtree(work, ignore_errors=True)
                return summary
        if config.overwrite or config.resume is False:
            target.clear()
            shutil.rmtree(work, ignore_errors=True)
        plan = Plan.load(work / "plan.json") or _new_plan(config, inputs.count())
        plan.save(work / "plan.json")
        summary.run_seed = plan.run_seed
        numbers = range(1, plan.num_parts + 1)
        missing = [number for number in numbers if not _is_complete(part_config(config, plan, number), summary)]
        began = perf_counter()
        try:
            if missing:
                with _cluster(str(config.ray)), _alarm(config.time_limit):
                    _run_parts(config, plan, missing, build, summary)
        except Stopped as stop:
            summary.stopped_by = stop.number
        if summary.stopped_by is None:
            parts = [part_config(config, plan, number).output_path for number in numbers]
            counts = ResultCounts()
            if isinstance(target, FileTarget):
                merged = work / f"merged{output.suffix}"
                merged.unlink(missing_ok=True)
                counts.add(merge(parts, merged))
                os.replace(merged, output)
            else:
                for number in numbers:
                    counts.add(tidy(_target_of(part_config(config, plan, number))))
            shutil.rmtree(work, ignore_errors=True)
            for name in (
                "rows",
                "samples",
                "errors",
                "finish_reasons",
                "prompt_tokens",
                "cached_tokens",
                "output_tokens",
            ):
                setattr(summary, name, getattr(counts, name))
        summary.run_seconds = perf_counter() - began
        summary.wall_seconds = perf_counter() - started
    return summary


def _new_plan(config: RunConfig, rows: int) -> Plan:
    seed = secrets.randbits(63) if config.engine.seed is None else config.engine.seed
    if config.limit is not None:
        return Plan(seed, 1)
    return Plan(seed, max(1, min(MAX_PARTS, -(-rows // PART_ROWS))))


def _is_complete(config: RunConfig, summary: JobSummary) -> bool:
    """Whether a part is done; counts its rows if so. Raises `ConfigError` where it was made with other settings."""
    inputs = open_inputs(config, prompt_reader(config))
    target = _target_of(config)
    if not look(config, inputs, target).is_complete:
        return False
    done = tidy(target)
    summary.rows += done.rows
    summary.errors.update(done.errors)
    summary.resumed_rows += done.rows
    return True


def _run_parts(
    config: RunConfig, plan: Plan, missing: list[int], build: Callable[[RunConfig], AnyEngine], summary: JobSummary
) -> None:
    """Have the parts done, and add up what comes of them."""
    import ray

    count, options = _actors(ray.nodes(), config)
    logger.info("%d parts for %d engines", len(missing), count)
    parts = ray.data.from_items([{"part": number} for number in missing], override_num_blocks=len(missing))
    outcomes = parts.map_batches(
        PartRunner,
        fn_constructor_args=(config, plan, build),
        batch_size=1,
        **actor_pool(min(count, len(missing)), PARTS_AT_ONCE, in_flight=PARTS_AT_ONCE),
        **options,
    )
    for finished, row in enumerate(outcomes.iter_rows(), start=1):
        done = orjson.loads(row["outcome"])
        if "error" in done:
            raise (ConfigError if done["usage"] else JobError)(done["error"])
        summary.rows += done["rows"]
        if done["errors"]:
            summary.errors["error"] += done["errors"]
        summary.resumed_rows += done["resumed_rows"]
        summary.copied_rows += done["copied_rows"]
        summary.computed_prompt_tokens += done["prompt_tokens"]
        summary.computed_output_tokens += done["output_tokens"]
        _check_error_rate(config, summary, at_end=finished == len(missing))
        if config.progress != "none":
            print(
                f"{finished:,}/{len(missing):,} parts, {summary.rows:,} rows, {summary.errors.total():,} errors",
                file=sys.stderr,
                flush=True,
            )


def actor_pool(size: int, calls_at_once: int, in_flight: int) -> dict[str, Any]:
    """Arguments of `map_batches` for so many actors, each with so many calls that run and that are on their way."""
    from ray.data import ActorPoolStrategy

    named = "max_concurrent_calls_per_actor"  # of newer versions, which have no use for the other way
    known = named in inspect.signature(ActorPoolStrategy).parameters
    pool = {"size": size, "max_tasks_in_flight_per_actor": in_flight, **({named: calls_at_once} if known else {})}
    return {"compute": ActorPoolStrategy(**pool), **({} if known else {"max_concurrency": calls_at_once})}


def _check_error_rate(config: RunConfig, summary: JobSummary, at_end: bool) -> None:
    most, rows, errors = config.max_error_rate, summary.rows, summary.errors.total()
    if most is not None and (rows >= TRIAL_ROWS or at_end) and errors > most * rows:
        raise JobError(f"{errors:,} of {rows:,} rows failed, more than max_error_rate {most:g}")


def _actors(nodes: list[dict[str, Any]], config: RunConfig) -> tuple[int, dict[str, float]]:
    """How many engines the cluster has room for, and what each of them takes.

    An engine never spans nodes: an actor's devices lie on one.
    """
    engine = config.engine
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(int(each.get("GPU", 0)) for each in resources)
    if engine.device == "cuda" or (engine.device == "auto" and gpus):
        per_engine = engine.num_devices
        count = sum(int(each.get("GPU", 0)) // per_engine for each in resources)
        if not count:
            raise ConfigError(f"ray: no node of the cluster has the {per_engine} GPUs that an engine needs")
        return count, {"num_gpus": float(per_engine)}
    cpus = [int(each.get("CPU", 0)) for each in resources if each.get("CPU", 0) >= 1]
    if not cpus:
        raise ConfigError("ray: the cluster has no CPU to give")
    if engine.data_parallel_size > 1:
        return engine.data_parallel_size, {"num_cpus": max(1, sum(cpus) // engine.data_parallel_size)}
    per_engine = engine.threads or min(cpus)
    return max(1, sum(each // per_engine for each in cpus)), {"num_cpus": per_engine}


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connected to a Ray cluster, one of this machine alone for `local`. Raises `ConfigError`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"ray={address!r}: Ray is not installed ({error}): pip install 'paged-infer[ray]'") from None

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mine = not ray.is_initialized()
    try:
        if mine:
            ray.init(
                address=None if address == "local" else address, log_to_driver=False, logging_level=logging.WARNING
            )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"ray={address!r}: no such cluster: {error}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray puts its own in their place
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Send this process a SIGTERM after that time."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
