"""The job: rows in, requests to the engine, completions out. The only place where files and engine meet."""

from __future__ import annotations

import itertools
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from paged_infer import __version__
from paged_infer.config import ConfigError
from paged_infer.io.prompts import Prompt, PromptColumns, PromptReader
from paged_infer.io.readers import STDIN, InputFailed, Inputs, Row
from paged_infer.io.schema import result_schema
from paged_infer.io.templates import RowTemplate
from paged_infer.io.writers import ResultWriter, check_output
from paged_infer.job.config import RunConfig
from paged_infer.job.encode import PromptEncoder
from paged_infer.job.progress import Progress
from paged_infer.job.summary import PREVIEW_CHARS, PREVIEW_ROWS, JobSummary, Preview
from paged_infer.types import Completion, Request, RowError, SamplingParams, noise_key

if TYPE_CHECKING:
    from paged_infer.engine.engine import Engine

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
    inputs = Inputs(config.inputs, config.keep, reader.used_columns())
    present, wanted = inputs.columns(), reader.prompt_columns
    if present is not None and wanted and not set(wanted) & set(present):
        remedy = "with --prompt-column or --messages-column" if config.template is None else "in the template"
        raise ConfigError(
            f"{inputs.paths[0]} has no column {' or '.join(wanted)}; choose one of {', '.join(present)} {remedy}"
        )
    return inputs


def preflight(config: RunConfig) -> None:
    """Find what can be found wrong before a model is loaded.

    Raises:
        ConfigError: inputs or output cannot be used.
        JobError: `on_error` is `fail` and one of the first rows is bad.
    """
    check_output(config.output_path, overwrite=config.overwrite)
    reader = prompt_reader(config)
    inputs = open_inputs(config, reader)
    if config.on_error != "fail" or STDIN in config.inputs:
        return
    limit = PREFLIGHT_ROWS if config.limit is None else min(config.limit, PREFLIGHT_ROWS)
    for row in itertools.islice(inputs.rows(), limit):
        try:
            SamplingParams.resolve(config.sampling, reader.read(row).options)
        except RowError as error:
            raise JobError(f"{row.where}: {error}") from None


def run_job(config: RunConfig, engine: Engine, *, started: float | None = None) -> JobSummary:
    """Answer every row of the inputs and write the results.

    Args:
        started: `perf_counter()` from which the summary's times count; None = now.

    Returns:
        What was done. After SIGINT or SIGTERM the finished rows are in the partial file and `stopped_by` is set.

    Raises:
        ConfigError: inputs or output cannot be used.
        JobError: `on_error` is `fail` and a row is bad, or the disk refuses.
    """
    check_output(config.output_path, overwrite=config.overwrite)
    try:
        return _Job(config, engine, perf_counter() if started is None else started).run()
    except InputFailed as error:
        raise JobError(str(error)) from error
    except OSError as error:
        raise JobError(f"{config.output_path}: {error.strerror or error}") from error


class _Job:
    """One run of `run_job`: owns the rows between reader and writer.

    A row is known by its `index` from reading to writing. It is in `_pending` exactly while the engine has its request.
    """

    def __init__(self, config: RunConfig, engine: Engine, started: float) -> None:
        self._config = config
        self._engine = engine
        self._started = started
        self._reader = prompt_reader(config)
        self._inputs = open_inputs(config, self._reader)
        self._encoder = PromptEncoder.of_job(config, engine.tokenizer, engine.memory.max_model_len)
        seed = config.engine.seed
        self._run_seed = secrets.randbits(63) if seed is None else seed
        self._defaults = {**engine.sampling_defaults, **config.sampling}
        try:
            self._plain = SamplingParams.resolve(self._defaults)
        except RowError as error:
            raise ConfigError(f"the model's own settings and yours do not fit together: {error}") from None
        self._resolved: dict[bytes, SamplingParams] = {}
        self._rows: Iterator[Row] = itertools.islice(self._inputs.rows(), config.limit)
        self._exhausted = False
        self._pending: dict[int, tuple[Row, str | None, int]] = {}
        self._pending_tokens = 0
        self._previews: dict[int, str] = {}
        self._summary = JobSummary(config.output_path, self._run_seed)
        self._writer: ResultWriter

    def run(self) -> JobSummary:
        summary = self._summary
        began = perf_counter()
        schema = result_schema(self._inputs.kept_fields, self._settings())
        with (
            StopSignals() as signals,
            ResultWriter(self._config.output_path, schema) as self._writer,
            Progress(self._config.progress, summary, self._engine, self._num_rows) as progress,
        ):
            while self._wants_rows() and perf_counter() - began < HEAD_START_SECONDS and signals.received is None:
                self._admit()
            while signals.received is None:
                if self._wants_rows():
                    self._admit()
                if self._engine.has_unfinished():
                    for completion in self._engine.step():
                        self._finish(completion)
                elif self._exhausted:
                    break
                progress.update()
            summary.stopped_by = signals.received
            if signals.received is None:
                self._writer.finish()
        summary.previews.sort(key=lambda preview: preview.row)
        summary.run_seconds = perf_counter() - began
        summary.wall_seconds = perf_counter() - self._started
        return summary

    def _settings(self) -> dict[str, Any]:
        """What the output's metadata says about how it was made."""
        config = self._config
        columns = {name: getattr(config, name) for name in ("prompt_column", "messages_column", "id_column")}
        return {
            "version": __version__,
            "inputs": list(config.inputs),
            "columns": columns,
            "template": config.template,
            "chat": bool(config.chat) or config.system is not None,
            "system": config.system,
            "few_shot": config.few_shot,
            "chat_template_kwargs": dict(config.chat_template_kwargs),
            "split_special_tokens": config.split_special_tokens,
            "too_long": config.too_long,
            "sampling": asdict(self._plain),
            "engine": asdict(replace(config.engine, seed=self._run_seed)),
        }

    def _num_rows(self) -> float | None:
        """How many rows the job has: exactly where known, else estimated from how far the inputs are read."""
        admitted = self._summary.rows + len(self._pending)
        if self._exhausted:
            return admitted
        known = self._inputs.num_rows()
        fraction = self._inputs.fraction_read()
        total = known if known is not None else admitted / fraction if fraction else None
        return total if self._config.limit is None else min(self._config.limit, total or self._config.limit)

    def _wants_rows(self) -> bool:
        return not self._exhausted and self._engine.num_waiting < WINDOW_ROWS and self._pending_tokens < WINDOW_TOKENS

    def _admit(self) -> None:
        """Read, tokenise and hand over the next chunk of rows."""
        rows: list[Row] = []
        prompts: list[Prompt] = []
        chars = 0
        for taken, row in enumerate(self._rows, start=1):
            try:
                prompt = self._reader.read(row)
            except RowError as error:
                self._fail(row, error)
            else:
                rows.append(row)
                prompts.append(prompt)
                chars += sum(map(len, prompt.texts()))
            if taken == CHUNK_ROWS or chars >= CHUNK_CHARS:
                break
        else:
            self._exhausted = True
        for row, prompt, ids in zip(rows, prompts, self._encoder.encode(prompts), strict=True):
            try:
                if isinstance(ids, RowError):
                    raise ids
                params = self._params(prompt.options)
                ids = self._encoder.fit(ids, params)
                request = Request(row.index, ids, params, noise_key(params.seed, self._run_seed, row.index))
            except RowError as error:
                self._fail(row, error)
                continue
            if row.index < PREVIEW_ROWS:
                self._previews[row.index] = _beginning(prompt)
            self._pending[row.index] = (row, self._reader.id_text(row), len(ids))
            row.data = {}
            self._pending_tokens += len(ids)
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
        self._write(row, self._reader.id_text(row), Completion.failed(row.index, error))

    def _finish(self, completion: Completion) -> None:
        row, id_text, tokens = self._pending.pop(completion.request_id)
        self._pending_tokens -= tokens
        self._write(row, id_text, completion)

    def _write(self, row: Row, id_text: str | None, completion: Completion) -> None:
        summary = self._summary
        if completion.error is not None:
            completion.error = f"{row.where}: {completion.error}"
            if self._config.on_error == "fail":
                raise JobError(completion.error)
        elif summary.first_row_seconds is None:
            summary.first_row_seconds = perf_counter() - self._started
        summary.count(completion)
        if row.index < PREVIEW_ROWS:
            text = completion.text if completion.error is None else completion.error
            prompt = self._previews.pop(row.index, "")
            summary.previews.append(Preview(row.index, prompt, text[:PREVIEW_CHARS], completion.finish_reason))
        self._writer.add(id_text, completion, row.kept)


def _beginning(prompt: Prompt) -> str:
    """What the preview shows of a prompt: its text, or the last message."""
    return (prompt.texts() or [""])[-1][:PREVIEW_CHARS]


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second one ends the process at once.

    Outside the main thread, where Python cannot catch signals, nothing is caught.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for caught in self._before:
            signal.signal(caught, signal.SIG_DFL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
