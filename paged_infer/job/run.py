"""The job: rows in, requests to the engine, completions out. The only place where files and engine meet."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from paged_infer.config import ConfigError
from paged_infer.io.columns import Sample
from paged_infer.io.ledger import replace_file
from paged_infer.io.lock import OutputLock
from paged_infer.io.openai_batch import URL_COLUMN, OpenAILines
from paged_infer.io.prompts import Prompt, PromptColumns, PromptReader
from paged_infer.io.readers import STDIN, Inputs, Position, Row
from paged_infer.io.schema import read_settings, result_schema
from paged_infer.io.targets import FileTarget, Target, check_writable, make_target
from paged_infer.io.templates import RowTemplate
from paged_infer.io.writers import ResultWriter, journal_path, lock_path
from paged_infer.job.config import RunConfig
from paged_infer.job.dedupe import Dedupe
from paged_infer.job.encode import PromptEncoder
from paged_infer.job.figures import Reservoir, Timeline, report_of
from paged_infer.job.progress import Progress
from paged_infer.job.resume import Outcome, look, prepare, tidy
from paged_infer.job.settings import check_model, settings_of
from paged_infer.job.signals import StopSignals
from paged_infer.job.summary import PREVIEW_CHARS, PREVIEW_ROWS, JobSummary, Preview
from paged_infer.parallel.process import WorkerFailed
from paged_infer.types import Completion, InputFailed, Request, RowError, SamplingParams, noise_key

if TYPE_CHECKING:
    from paged_infer.engine.interface import AnyEngine

WINDOW_ROWS = 4096
"""Rows kept waiting in the engine, so that its admission order can choose among them."""

WINDOW_TOKENS = 2_000_000
"""Prompt tokens of unfinished rows beyond which no more are read."""

CHUNK_ROWS = 256
CHUNK_CHARS = 1 << 20
HEAD_START_SECONDS = 0.5
"""How long rows are read before the first step."""

PARAMS_KEPT = 1024

PREFLIGHT_ROWS = 10_000

TRIAL_ROWS = 1000
"""Rows after which their errors say something about the job."""


class JobError(Exception):
    """The job cannot go on; rows that were finished are safe in the partial file."""


def prompt_reader(config: RunConfig) -> PromptReader:
    """How this job's rows become prompts. Raises `ConfigError` when template, system or examples cannot be used."""
    return PromptReader(
        PromptColumns(config.prompt_column, config.messages_column, config.id_column),
        chat=bool(config.chat),
        template=None if config.template is None else RowTemplate(config.template, "template"),
        system=None if config.system is None else RowTemplate(config.system, "system"),
        few_shot=config.few_shot,
        row_options=config.row_options,
    )


def open_inputs(config: RunConfig, reader: PromptReader) -> Inputs:
    """This job's input files. Raises `ConfigError` when one is missing or its columns hold no prompts."""
    extra = [URL_COLUMN] if config.output_format == "openai" else []
    inputs = Inputs(config.inputs, [*dict.fromkeys([*config.keep, *extra])], reader.used_columns())
    present, wanted = inputs.columns(), reader.prompt_columns
    if present and wanted and not set(wanted) & set(present):
        remedy = "with --prompt-column or --messages-column" if config.template is None else "in the template"
        raise ConfigError(
            f"{inputs.paths[0]} has no column {' or '.join(wanted)}; choose one of {', '.join(present)} {remedy}"
        )
    return inputs


def open_target(config: RunConfig, inputs: Inputs) -> Target:
    """Where this job's results go. Raises `ConfigError` when nothing can be written there, or an input stands there."""
    target = make_target(config.output_path, shard_name(config))
    check_writable(target)
    results = target.path.resolve()
    taken = {Path(path).resolve() for path in (*config.inputs, *inputs.paths) if path != STDIN}
    if results in taken:
        raise ConfigError(f"output {target.path} is one of the inputs: choose another -o")
    if config.report is not None:
        report = Path(config.report).resolve()
        if report in {*taken, results}:
            raise ConfigError(f"report={config.report!r} is one of the inputs, or the output: choose another --report")
        if report.is_dir() or not os.access(report.parent, os.W_OK):
            raise ConfigError(f"report={config.report!r}: expected a file in a folder that is there and writable")
    return target


def preflight(config: RunConfig) -> None:
    """Find what can be found wrong before a model is loaded.

    Raises:
        ConfigError: inputs or output cannot be used.
        InputFailed: an input cannot be read for now.
        JobError: `on_error` is `fail` and one of the first rows is bad.
    """
    try:
        _preflight(config)
    except InputFailed:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None


def _preflight(config: RunConfig) -> None:
    reader = prompt_reader(config)
    inputs = open_inputs(config, reader)
    look(config, inputs, open_target(config, inputs))
    _check_sampling(config)
    if config.on_error != "fail" or STDIN in config.inputs:
        return
    limit = PREFLIGHT_ROWS if config.limit is None else min(config.limit, PREFLIGHT_ROWS)
    for row in itertools.islice(inputs.rows(), limit):
        try:
            SamplingParams.resolve(config.likely_sampling, reader.read(row).options)
        except RowError as error:
            raise JobError(f"{row.where}: {error}") from None


def _check_sampling(config: RunConfig) -> None:
    """Raise `ConfigError` for options that would make every row an error."""
    params = SamplingParams.resolve(config.likely_sampling)
    if params.adapter is not None and params.adapter not in config.engine.adapter_folders:
        raise ConfigError(f"adapter={params.adapter!r}: no such adapter; name it with --lora {params.adapter}=PATH")
    if params.is_structured:
        from paged_infer.engine.structured import check_structure

        try:
            check_structure(params)
        except RowError as error:
            raise ConfigError(str(error)) from None


def run_job(
    config: RunConfig,
    engine: AnyEngine | Callable[[], AnyEngine],
    *,
    started: float | None = None,
    signals: StopSignals | None = None,
    run_seed: int | None = None,
) -> JobSummary:
    """Answer every row of the inputs and write the results, or go on with what an earlier run of the same job left.

    Args:
        engine: the engine, or what makes it once it is known to be needed; that one is closed at the end.
        started: `perf_counter()` from which the summary's times count; None = now.
        signals: who catches SIGINT and SIGTERM; None = this call does.
        run_seed: see `job.resume.look`.

    Returns:
        What was done. After SIGINT, SIGTERM or the time limit the finished rows are in the partial file and
        `stopped_by` is set.

    Raises:
        ConfigError: inputs or output cannot be used, or another process writes there.
        JobError: `on_error` is `fail` and a row is bad, too many rows are, the disk refuses, or a process that the job
            cannot do without has died.
        Stopped: a signal came while the engine was made; only where the caller catches them.
    """
    started = perf_counter() if started is None else started
    reader = prompt_reader(config)
    inputs = open_inputs(config, reader)
    target = open_target(config, inputs)
    numbers = config.shard_numbers
    begin, end = inputs.shard(*numbers) if numbers is not None else (Position(), None)
    if config.limit is not None:
        end = begin.index + config.limit if end is None else min(end, begin.index + config.limit)
    try:
        with OutputLock(lock_path(target)), signals or StopSignals() as signals:
            outcome = look(config, inputs, target, begin.index, run_seed)
            if outcome.is_complete:
                summary = JobSummary(output=target.path, run_seed=outcome.ledger.run_seed)
                summary.add(tidy(target))
                summary.resumed_rows = summary.rows
                summary.wall_seconds = perf_counter() - started
                return summary
            with contextlib.ExitStack() as stack:
                made = engine() if callable(engine) else engine
                if made is not engine:
                    stack.callback(made.close)
                return _Job(config, made, inputs, reader, target, outcome, begin, end, started, signals).run()
    except (WorkerFailed, InputFailed) as error:
        raise JobError(str(error)) from error
    except OSError as error:
        raise JobError(f"{error.filename or target.path}: {error.strerror or error}") from error


def shard_name(config: RunConfig) -> str | None:
    """`I-of-N`; None for a whole job."""
    return config.shard.replace("/", "-of-") if config.shard else None


def partial_file(config: RunConfig) -> Path:
    """Where the rows of an unfinished job stand."""
    return journal_path(make_target(config.output_path, shard_name(config)))


class _Job:
    """One run of `run_job`: owns the rows between reader and writer.

    A row is known by its `index` from reading to writing. It is in `_pending` exactly while the engine has its request,
    or that of a row it follows.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: AnyEngine,
        inputs: Inputs,
        reader: PromptReader,
        target: Target,
        outcome: Outcome,
        begin: Position,
        end: int | None,
        started: float,
        signals: StopSignals,
    ) -> None:
        self._config = config
        self._engine = engine
        self._inputs = inputs
        self._reader = reader
        self._target = target
        self._started = started
        self._signals = signals
        self._encoder = PromptEncoder.of_job(config, engine.tokenizer, engine.memory.max_model_len)
        self._run_seed = outcome.ledger.run_seed
        self._defaults = {**engine.sampling_defaults, **config.sampling}
        try:
            self._plain = SamplingParams.resolve(self._defaults)
        except RowError as error:
            raise ConfigError(f"the model's own settings and yours do not fit together: {error}") from None
        self._resolved: dict[bytes, SamplingParams] = {}
        self._dedupe: Dedupe | None = None
        self._exhausted = False
        self._pending: dict[int, _Pending] = {}
        self._pending_tokens = 0
        self._previews: dict[int, str] = {}
        self._summary = JobSummary(output=target.path, run_seed=self._run_seed)
        self._begin = begin
        self._end = end
        self._outcome = outcome
        self._latencies = Reservoir()
        self._timeline = Timeline()
        self._writer: ResultWriter
        self._rows: Iterator[Row]
        self._next_row = 0
        self._num_taken = 0
        self._num_failed = 0

    def run(self) -> JobSummary:
        summary, engine, signals = self._summary, self._engine, self._signals
        self._began = began = perf_counter()
        limit = self._config.time_limit
        deadline = math.inf if limit is None else self._started + limit
        settings = settings_of(self._config, engine, self._plain, self._outcome.ledger)
        schema = result_schema(self._inputs.kept_fields, settings)
        signals.defer()
        if self._config.output_format == "openai" and isinstance(self._target, FileTarget):
            self._target.make_sink = partial(OpenAILines, token_text=lambda token: engine.tokenizer.decode([token]))
        ledger = prepare(self._outcome, self._config, self._target, schema, self._begin.index)
        with (
            _rare_collections(),
            ResultWriter(self._target, schema, ledger) as self._writer,
            Progress(self._config.progress, summary, engine, self._num_rows) as progress,
        ):
            check_model(read_settings(self._writer.schema), settings)
            if self._config.dedupe:
                self._dedupe = Dedupe(self._writer.answers, self._writer.recall)
                self._writer.answers = self._dedupe.rows
            summary.add(self._writer.counts)
            summary.resumed_rows = summary.rows
            self._rows = self._open_rows()
            while self._wants_rows() and perf_counter() - began < HEAD_START_SECONDS and signals.received is None:
                self._admit()
            while signals.received is None and perf_counter() < deadline:
                if self._wants_rows():
                    self._admit()
                if engine.has_unfinished():
                    self._finish(engine.step())
                elif self._exhausted:
                    break
                self._writer.flush_if_due()
                progress.update()
                self._timeline.add(
                    perf_counter() - began, summary.rows, engine.stats.prompt_tokens, engine.stats.output_tokens
                )
            else:
                summary.stopped_by = signals.received or signal.SIGTERM
            if summary.stopped_by is None:
                self._check_error_rate(at_end=True)
                finishing = perf_counter()
                self._writer.finish()
                summary.output_seconds += perf_counter() - finishing
        summary.previews.sort(key=lambda preview: preview.row)
        summary.copied_rows = self._dedupe.num_copied if self._dedupe is not None else 0
        summary.run_seconds = perf_counter() - began
        summary.wall_seconds = perf_counter() - self._started
        if self._config.report is not None:
            report = report_of(summary, settings, engine, self._latencies, self._timeline, self._config.cost_per_hour)
            replace_file(Path(self._config.report), orjson.dumps(report, option=orjson.OPT_INDENT_2))
        return summary

    def _open_rows(self) -> Iterator[Row]:
        """The rows that are not sealed yet."""
        resumed = None if STDIN in self._inputs.paths else self._writer.resume_position
        start = self._begin if resumed is None else resumed
        self._next_row = start.index
        return itertools.islice(
            self._inputs.rows(start), None if self._end is None else max(0, self._end - start.index)
        )

    def _num_rows(self) -> float | None:
        """How many rows the job has: exactly where known, else estimated from how far the inputs are read."""
        first = self._begin.index
        if self._exhausted:
            return self._next_row - first
        known = self._inputs.num_rows()
        fraction = self._inputs.fraction_read()
        total = known if known is not None else self._next_row / fraction if fraction else None
        if self._end is None:
            return total
        return (self._end if total is None else min(total, self._end)) - first

    def _wants_rows(self) -> bool:
        following = 0 if self._dedupe is None else self._dedupe.num_following
        return (
            not self._exhausted
            and self._engine.num_waiting + following < WINDOW_ROWS
            and self._pending_tokens < WINDOW_TOKENS
            and self._next_row < self._writer.horizon
        )

    def _admit(self) -> None:
        """Read, tokenise and hand over the next chunk of rows."""
        began = perf_counter()
        writer, read = self._writer, self._reader.read
        horizon = writer.horizon
        rows: list[Row] = []
        prompts: list[Prompt] = []
        chars = 0
        for taken, row in enumerate(self._rows, start=1):
            index = row.index
            self._next_row = index + 1
            if writer.ends_segment(index):
                writer.reached(index, self._inputs.position)
            if not writer.is_done(index):
                self._num_taken += 1
                try:
                    prompt = read(row)
                except RowError as error:
                    self._fail(row, error)
                else:
                    rows.append(row)
                    prompts.append(prompt)
                    for text in prompt.texts():
                        chars += len(text)
            if taken >= CHUNK_ROWS or chars >= CHUNK_CHARS or self._next_row >= horizon:
                break
        else:
            self._exhausted = True
        for row, prompt, ids in zip(rows, prompts, self._encoder.encode(prompts), strict=True):
            try:
                if isinstance(ids, RowError):
                    raise ids
                params = self._params(prompt.options)
                ids = self._encoder.fit(ids, params)
                noise = noise_key(params.seed, self._run_seed, row.index) if params.temperature else 0
                request = Request(row.index, ids, params, noise)
            except RowError as error:
                self._fail(row, error)
                continue
            if row.index < PREVIEW_ROWS:
                self._previews[row.index] = _beginning(prompt)
            self._submit(row, request)
        self._summary.input_seconds += perf_counter() - began

    def _submit(self, row: Row, request: Request) -> None:
        """Hand a request to the engine, unless its answer is known or on its way."""
        known = self._dedupe.ask(request) if self._dedupe is not None else None
        pending = _Pending(row, self._reader.id_text(row), len(request.prompt_token_ids), perf_counter())
        if known:
            self._write(pending, [replace(sample, request_id=row.index) for sample in known])
            return
        row.data = {}
        self._pending[row.index] = pending
        self._pending_tokens += pending.num_tokens
        if known is None:
            self._engine.add(request)

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        """The row's options over the job's. Rows mostly repeat each other's, so resolved ones are kept."""
        if not options:
            return self._plain
        try:
            key = orjson.dumps(options)
        except TypeError:
            return SamplingParams.resolve(self._defaults, options)
        params = self._resolved.get(key)
        if params is None:
            params = SamplingParams.resolve(self._defaults, options)
            if len(self._resolved) >= PARAMS_KEPT:
                self._resolved.clear()
            self._resolved[key] = params
        return params

    def _fail(self, row: Row, error: RowError) -> None:
        self._write(_Pending(row, self._reader.id_text(row), 0, 0.0), [Completion.failed(row.index, error)])

    def _finish(self, completions: list[Completion]) -> None:
        """Take the answers of rows; each is also that of the rows that follow it."""
        began = perf_counter()
        summary = self._summary
        for row, group in itertools.groupby(completions, key=attrgetter("request_id")):
            samples = [*group]
            self._num_failed += samples[0].error is not None
            summary.computed_prompt_tokens += samples[0].prompt_tokens
            for sample in samples:
                summary.computed_output_tokens += len(sample.token_ids)
            followers = self._dedupe.answered(row, [*samples]) if self._dedupe is not None else ()
            for index in followers:
                self._deliver(index, [replace(sample, request_id=index) for sample in samples], began)
            self._deliver(row, samples, began)
        summary.output_seconds += perf_counter() - began

    def _deliver(self, row: int, samples: list[Completion], now: float) -> None:
        pending = self._pending.pop(row)
        self._pending_tokens -= pending.num_tokens
        self._latencies.add(now - pending.admitted)
        self._write(pending, samples)

    def _write(self, pending: _Pending, samples: list[Completion]) -> None:
        summary, row = self._summary, pending.row
        for i, completion in enumerate(samples):
            if completion.error is not None:
                samples[i] = replace(completion, error=f"{row.where}: {completion.error}")
                if self._config.on_error == "fail":
                    raise JobError(samples[i].error)
            elif summary.first_row_seconds is None:
                summary.first_row_seconds = perf_counter() - self._started
            summary.count(completion)
        if row.index < PREVIEW_ROWS:
            first = samples[0]
            text = first.text if first.error is None else first.error
            prompt = self._previews.pop(row.index, "")
            summary.previews.append(Preview(row.index, prompt, text[:PREVIEW_CHARS], first.finish_reason))
        self._writer.add([Sample(pending.id_text, completion, row.kept) for completion in samples])
        if summary.errors:
            self._check_error_rate()

    def _check_error_rate(self, at_end: bool = False) -> None:
        """Raise `JobError` when rows fail as they should not: all of the first ones, or more than may."""
        summary, most = self._summary, self._config.max_error_rate
        taken = self._num_taken  # not those that are finished: bad lines are found long before good ones are answered
        rows, errors = summary.resumed_rows + taken, summary.errors.total()
        failed = errors - self._writer.counts.errors.total()
        answered_none = failed >= summary.rows - summary.resumed_rows
        if self._config.retry_errors and summary.resumed_rows:
            answered_none = False  # of these rows nothing better is expected
        if answered_none and failed >= TRIAL_ROWS and (failed >= taken or self._num_failed >= TRIAL_ROWS):
            kind, _ = summary.errors.most_common(1)[0]
            raise JobError(f"all of the first {failed:,} rows failed, mostly with {kind}; the rest was not tried")
        if most is not None and (rows >= TRIAL_ROWS or at_end) and errors > most * rows:
            raise JobError(f"{errors:,} of {rows:,} rows failed, more than max_error_rate {most:g}")


class _Pending(NamedTuple):
    """A row on its way: what is written beside its answer, its prompt's length, and when it was handed over."""

    row: Row
    id_text: str | None
    num_tokens: int
    admitted: float


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look for cycles seldom: rows make none, and thousands of them live at any time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _beginning(prompt: Prompt) -> str:
    """What the preview shows of a prompt: its text, or the last message."""
    return (prompt.texts() or [""])[-1][:PREVIEW_CHARS]
