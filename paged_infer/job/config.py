"""The settings of a job: what to read, how to ask, where to write. Resolved once, frozen afterwards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from paged_infer.config import ConfigError, EngineConfig, check_keys
from paged_infer.io.readers import STDIN, is_pattern, is_url
from paged_infer.io.templates import text_or_file
from paged_infer.types import RowError, SamplingParams

OnError = Literal["row", "fail"]
ProgressKind = Literal["auto", "bar", "plain", "none"]
TooLong = Literal["error", "truncate-left"]
OutputFormat = Literal["rows", "openai"]
LogLevel = Literal["debug", "info", "warning", "error"]

SAMPLING_OPTIONS = SamplingParams.names() - {"seed"}
"""Options a job may set for all rows. A job's `seed` is the run's, from which every row's own noise is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One job. Raises `ConfigError` on values that cannot work.

    Attributes:
        inputs: files in order; `-` is standard input.
        output: results file; None = the input's name with the ending `.out.arrow`.
        prompt_column, messages_column, id_column: see `io.prompts.PromptColumns`.
        template: Jinja template that makes the prompt out of a row's columns, or `@` and a file with it.
        chat: send a `prompt` as a user message through the chat template; None = no, but say so.
        system: system message for rows that bring none, a template like `template`; implies `chat`.
        few_shot: JSONL file of solved examples that go before every prompt.
        chat_template_kwargs: names that the chat template sees; given as an object or as JSON text of one.
        split_special_tokens: control tokens spelled out in messages are ordinary text.
        too_long: `error` makes an over-long prompt an error row, `truncate-left` keeps its end.
        keep: input columns that go along into the output.
        row_options: whether a row's own sampling options count; None = yes except in tables.
        sampling: options for rows that set none of their own.
        limit: stop after that many input rows.
        on_error: `row` writes a bad row as an error row, `fail` ends the job at the first.
        shard: `I/N`, I from 1 to N: only the I-th of N contiguous shares of the rows.
        overwrite: start again, and replace results that exist.
        resume: go on with what an interrupted run of this job left; None = yes where its input can be checked.
        retry_errors: answer the error rows of earlier runs again.
        time_limit: stop after that many seconds, as on SIGTERM.
        max_error_rate: the job fails when, of at least `job.run.TRIAL_ROWS` rows, a larger share are errors.
        dedupe: compute identical rows once, where the same answer is certain.
        output_format: `openai` writes JSON lines as answers of OpenAI's batch interface.
        cost_per_hour: what an hour of this machine costs, for the report.
        report: JSON file for the figures of the run.
        ray: Ray cluster to run on: its address, `auto` for the one this machine is in, `local` for one of this machine.
    """

    inputs: tuple[str, ...]
    output: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str = "id"
    template: str | None = None
    chat: bool | None = None
    system: str | None = None
    few_shot: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    split_special_tokens: bool = False
    too_long: TooLong = "error"
    keep: tuple[str, ...] = ()
    row_options: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    on_error: OnError = "row"
    shard: str | None = None
    overwrite: bool = False
    resume: bool | None = None
    retry_errors: bool = False
    time_limit: float | None = None
    max_error_rate: float | None = None
    dedupe: bool = True
    output_format: OutputFormat = "rows"
    cost_per_hour: float | None = None
    report: str | None = None
    ray: str | None = None
    progress: ProgressKind = "auto"
    log_level: LogLevel = "warning"
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("inputs", "keep"):
            value = getattr(self, name)
            given = (value,) if isinstance(value, str) else value
            if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
                raise ConfigError(f"{name}={value!r}: expected names")
            object.__setattr__(self, name, tuple(given))
        if not all(self.inputs) or not self.inputs:
            raise ConfigError("no input: name a file of prompts, or - for standard input")
        texts = (
            "output",
            "prompt_column",
            "messages_column",
            "id_column",
            "template",
            "system",
            "few_shot",
            "report",
            "shard",
            "ray",
        )
        for name in texts:
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "id_column")):
                raise ConfigError(f"{name}={value!r}: expected text")
        for name in ("chat", "row_options", "overwrite", "resume", "retry_errors", "dedupe", "split_special_tokens"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name in ("chat", "row_options", "resume"))):
                raise ConfigError(f"{name}={value!r}: expected true or false")
        for name, allowed in (
            ("on_error", get_args(OnError)),
            ("progress", get_args(ProgressKind)),
            ("too_long", get_args(TooLong)),
            ("output_format", get_args(OutputFormat)),
            ("log_level", get_args(LogLevel)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        for name in ("template", "system"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else text_or_file(value, name))
        if self.template is not None and (self.prompt_column or self.messages_column):
            raise ConfigError("template makes the prompt itself: leave prompt_column and messages_column out")
        object.__setattr__(
            self, "chat_template_kwargs", _json_object("chat_template_kwargs", self.chat_template_kwargs)
        )
        if self.limit is not None and (
            isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0
        ):
            raise ConfigError(f"limit={self.limit!r}: expected a whole number of at least 0")
        if isinstance(self.time_limit, str):
            object.__setattr__(self, "time_limit", parse_seconds(self.time_limit))
        for name, most in (("time_limit", math.inf), ("cost_per_hour", math.inf), ("max_error_rate", 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value <= most):
                raise ConfigError(f"{name}={value!r}: expected a number from 0{'' if most == math.inf else ' to 1'}")
        if self.retry_errors and (self.overwrite or self.resume is False):
            raise ConfigError("retry_errors needs the results of an earlier run: leave overwrite and no-resume out")
        if self.shard is not None:
            self.shard_numbers  # noqa: B018
        try:
            SamplingParams.resolve(self.likely_sampling)
        except RowError as error:
            raise ConfigError(str(error)) from None
        if self.output in ("", STDIN) or (self.output is not None and is_url(self.output)):
            raise ConfigError(
                f"output={self.output!r}: results are written to a disk, where they survive a kill; name a file or a "
                "folder, and copy it from there"
            )
        if self.output is None and (len(self.inputs) != 1 or self.inputs[0] == STDIN or is_pattern(self.inputs[0])):
            raise ConfigError(
                "name the results file with -o: standard input and several inputs have no name to derive it from"
            )

        if self.ray is not None:
            for name, value in (("shard", self.shard), ("report", self.report), ("retry_errors", self.retry_errors)):
                if value:
                    raise ConfigError(f"{name} cannot be had together with ray")
            if self.output_format != "rows":
                raise ConfigError(f"output_format={self.output_format!r} cannot be had together with ray")
        if self.output_format == "openai" and self.output_path.suffix != ".jsonl":
            raise ConfigError("output_format='openai': the results are JSON lines, so name a .jsonl file with -o")

    @property
    def likely_sampling(self) -> Mapping[str, Any]:
        """`sampling` for checks before the model is known, whose settings may bring the temperature that `n` needs."""
        return self.sampling if self.engine.generation_config == "none" else {"temperature": 1.0, **self.sampling}

    @property
    def shard_numbers(self) -> tuple[int, int] | None:
        """(I, N) of the shard, I from 1 to N. Raises `ConfigError`."""
        if self.shard is None:
            return None
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"shard={self.shard!r}: expected I/N with I from 1 to N, for example 3/8")
        return int(match[1]), int(match[2])

    @property
    def output_path(self) -> Path:
        """The results file or folder: where it was asked for, else beside a local input, else in the current folder.

        The file of a shard is named after it, as `results.3-of-8.arrow`.
        """
        if self.output is not None:
            path = Path(self.output)
        else:
            source = Path(self.inputs[0].split("?", 1)[0])
            stem = source.name.split(".", 1)[0].replace(":", "-")
            name = f"{stem}.out.arrow" if stem else "out.arrow"
            path = source.with_name(name) if source.name and not is_url(self.inputs[0]) else Path(name)
        if self.shard is None or not path.suffix or path.is_dir():
            return path
        return path.with_suffix(f".{self.shard.replace('/', '-of-')}{path.suffix}")

    @classmethod
    def resolve(cls, *layers: Mapping[str, Any]) -> RunConfig:
        """Merge flat layers of settings, later ones winning; None means unset.

        A name is a field of this class, of `EngineConfig`, or a sampling option; any other raises `ConfigError` with
        the nearest known one.
        """
        own = cls.__dataclass_fields__.keys() - {"sampling", "engine"}
        engine = EngineConfig.__dataclass_fields__.keys()
        merged: dict[str, Any] = {}
        for layer in layers:
            check_keys(layer, sorted({*own, *engine, *SAMPLING_OPTIONS}), "setting")
            merged.update({name: value for name, value in layer.items() if value is not None})

        def part(names: Any) -> dict[str, Any]:
            return {name: value for name, value in merged.items() if name in names}

        for name in ("json_schema", "grammar"):
            if isinstance(merged.get(name), str):
                merged[name] = _structure_text(name, merged[name])
        if merged.get("speculative") is False:  # what YAML makes of `off`
            merged["speculative"] = "off"
        if merged.get("early_stopping") in ("true", "false"):
            merged["early_stopping"] = merged["early_stopping"] == "true"
        if isinstance(merged.get("kv_cache_memory"), str):
            merged["kv_cache_memory"] = parse_bytes(merged["kv_cache_memory"])
        return cls(
            **{"inputs": (), **part(own)},
            sampling=part(SAMPLING_OPTIONS),
            engine=EngineConfig.from_mapping(part(engine)),
        )


def _structure_text(name: str, value: str) -> str:
    """The text of a schema or grammar: of the file that is named, or as it stands. Raises `ConfigError`."""
    if value.lstrip().startswith("{") or "\n" in value or (name == "grammar" and ":" in value):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {value} cannot be read: {error}") from None


def _json_object(name: str, value: object) -> dict[str, Any]:
    """An object, given as such or as JSON text. Raises `ConfigError`."""
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: not JSON: {error}") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{name}={value!r}: expected a JSON object")
    return dict(loaded)


_UNITS = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """A size such as `500MB`, `2GiB` or `1.5G`, in bytes. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is no size: expected for example 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """A time such as `90`, `45m`, `1h30m` or `2d`, in seconds. Raises `ConfigError`."""
    try:
        return float(text)
    except ValueError:
        parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ConfigError(f"{text!r} is no time: expected for example 90, 45m or 1h30m") from None
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def load_settings(path: str) -> dict[str, Any]:
    """The settings of a YAML file. Raises `ConfigError` for a file that is missing or not a flat mapping."""
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"config {path}{where}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path}: not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"config {path}: expected `setting: value` lines")
    return loaded
