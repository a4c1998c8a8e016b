"""What is there already of a job's results, and what that means for a run that wants to write them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from paged_infer.config import ConfigError
from paged_infer.io.arrays import numbers
from paged_infer.io.counts import ResultCounts, is_failed
from paged_infer.io.ledger import Ledger, State
from paged_infer.io.readers import STDIN, Inputs
from paged_infer.io.targets import Target
from paged_infer.io.writers import discard, journal_path, ledger_path, read_unfinished, reopen
from paged_infer.job.config import RunConfig
from paged_infer.job.fingerprint import difference, fingerprint

logger = logging.getLogger(__name__)

_START_AGAIN = "choose another -o, or --overwrite to start again"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run finds.

    Attributes:
        ledger: of the job to start or to go on with.
        is_complete: nothing is left to be answered.
        reopens: existing results are taken apart first, because their input has grown or rows of them failed.
        discards: files of an unfinished job that is not gone on with are in the way.
    """

    ledger: Ledger
    is_complete: bool = False
    reopens: bool = False
    discards: bool = False


def look(config: RunConfig, inputs: Inputs, target: Target, first_row: int = 0, run_seed: int | None = None) -> Outcome:
    """Decide without changing anything. Raises `ConfigError` when the run must not write there.

    Args:
        run_seed: of a new job whose settings name none; None = drawn.
    """
    seed = run_seed if config.engine.seed is None else config.engine.seed
    fresh = Ledger(
        fingerprint(config, inputs), secrets.randbits(63) if seed is None else seed, State(open_row=first_row)
    )
    if config.overwrite:
        return Outcome(fresh, discards=True)
    ledger = Ledger.load(ledger_path(target))
    if ledger is not None and ledger.finished and target.is_lost():
        ledger = None
    finished = ledger is not None and ledger.finished and target.is_presented()
    if ledger is None and journal_path(target).exists() and not target.is_complete():
        raise ConfigError(
            f"{journal_path(target)} holds rows of an unknown job: move it away, or --overwrite to drop it"
        )
    if ledger is not None and not finished:
        if config.resume is False:
            if target.is_complete():
                raise ConfigError(f"{target.path} exists already: {_START_AGAIN}")
            return Outcome(fresh, discards=True)
        _refuse(
            difference(ledger.fingerprint, config, inputs), f"{journal_path(target)} holds rows of a job with other"
        )
        if STDIN in inputs.paths and config.resume is None and not is_untouched(ledger):
            raise ConfigError(
                f"{journal_path(target)} holds rows of an unfinished job, and standard input cannot be checked to be "
                f"the same again: --resume if it is, --no-resume to start again"
            )
        retry = config.retry_errors and any(_failed_rows(read_unfinished(target, ledger)))
        grew = _grew(ledger.fingerprint, fresh.fingerprint)
        return Outcome(replace(ledger, fingerprint=fresh.fingerprint), reopens=retry or grew)
    if not target.is_complete():
        return Outcome(fresh)
    recorded, run_seed = _recorded(target, ledger)
    if recorded is None or config.resume is False or STDIN in inputs.paths:
        raise ConfigError(f"{target.path} exists already: {_START_AGAIN}")
    _refuse(difference(recorded, config, inputs), f"{target.path} exists already, made with other")
    complete = replace(fresh, run_seed=run_seed)
    retry = config.retry_errors and any(_failed_rows(target.read()))
    if retry or _grew(recorded, fresh.fingerprint):
        return Outcome(complete, reopens=True)
    return Outcome(complete, is_complete=True)


def prepare(outcome: Outcome, config: RunConfig, target: Target, schema: pa.Schema, first_row: int = 0) -> Ledger:
    """Do what `look` found to be necessary; the ledger to write with."""
    ledger = outcome.ledger
    if outcome.discards:
        discard(target)
        target.clear()
    if outcome.reopens:
        unfinished = Ledger.load(ledger_path(target))
        if unfinished is not None and unfinished.finished and target.is_presented():
            unfinished = None

        def batches() -> Iterator[pa.RecordBatch]:
            return target.read() if unfinished is None else read_unfinished(target, unfinished)

        failed = numbers([*_failed_rows(batches())] if config.retry_errors else [], pa.int64())
        good = (batch.filter(pc.invert(pc.is_in(batch["row"], failed))) for batch in batches())
        ledger = reopen(target, ledger, schema, good, first_row)
        logger.info("%d rows that failed are answered again", len(failed))
    return ledger


def tidy(target: Target) -> ResultCounts:
    """Remove what a kill at the very end may have left beside complete results; their figures."""
    journal_path(target).unlink(missing_ok=True)
    ledger = Ledger.load(ledger_path(target))
    if ledger is not None and not target.keeps_settings:
        return ResultCounts() if ledger.state.counts is None else ResultCounts.from_json(ledger.state.counts)
    ledger_path(target).unlink(missing_ok=True)
    counts = ResultCounts()
    for batch in target.read():
        counts.count_batch(batch)
    return counts


def is_untouched(ledger: Ledger) -> bool:
    """Whether nothing was answered yet as far as the ledger knows."""
    return ledger.state.sealed is None and ledger.state.journal_bytes == 0


def _refuse(difference: str | None, why: str) -> None:
    if difference is not None:
        raise ConfigError(f"{why} settings or input ({difference}): {_START_AGAIN}")


def _recorded(target: Target, ledger: Ledger | None) -> tuple[Any, int]:
    """Fingerprint and seed of complete results; (None, 0) where they do not say."""
    if ledger is not None:
        return ledger.fingerprint, ledger.run_seed
    settings = target.settings()
    return settings.get("fingerprint"), settings.get("run_seed", 0)


def _grew(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether inputs that are the same as far as they went have changed: the results then say so, too."""
    contents = [[{**file, "name": None} for file in each["input"]] for each in (before, now)]
    return contents[0] != contents[1]


def _failed_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch["row"].filter(is_failed(batch)).unique().to_pylist()
