"""The settings of a job: what to read, how to ask, where to write. Resolved once, frozen afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from paged_infer.config import ConfigError, EngineConfig, check_keys
from paged_infer.io.readers import is_pattern, is_url
from paged_infer.io.templates import text_or_file
from paged_infer.types import RowError, SamplingParams

OnError = Literal["row", "fail"]
ProgressKind = Literal["auto", "bar", "plain", "none"]
TooLong = Literal["error", "truncate-left"]

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
        overwrite: replace results that exist.
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
    overwrite: bool = False
    progress: ProgressKind = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name in ("inputs", "keep"):
            value = getattr(self, name)
            given = (value,) if isinstance(value, str) else value
            if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
                raise ConfigError(f"{name}={value!r}: expected names")
            object.__setattr__(self, name, tuple(given))
        if not self.inputs:
            raise ConfigError("no input: name a file of prompts, or - for standard input")
        for name in ("output", "prompt_column", "messages_column", "id_column", "template", "system", "few_shot"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "id_column")):
                raise ConfigError(f"{name}={value!r}: expected text")
        for name in ("chat", "row_options", "overwrite", "split_special_tokens"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name in ("chat", "row_options"))):
                raise ConfigError(f"{name}={value!r}: expected true or false")
        for name, kind in (("on_error", OnError), ("progress", ProgressKind), ("too_long", TooLong)):
            allowed = get_args(kind)
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
        try:
            SamplingParams.resolve(self.sampling)
        except RowError as error:
            raise ConfigError(str(error)) from None
        if self.output is None and (len(self.inputs) != 1 or self.inputs[0] == "-" or is_pattern(self.inputs[0])):
            raise ConfigError(
                "name the results file with -o: standard input and several inputs have no name to derive it from"
            )

    @property
    def output_path(self) -> Path:
        """The results file: where it was asked for, else beside a local input, else in the current folder."""
        if self.output is not None:
            return Path(self.output)
        source = Path(self.inputs[0].split("?", 1)[0])
        stem = source.name.split(".", 1)[0].replace(":", "-")
        name = f"{stem}.out.arrow" if stem else "out.arrow"
        return source.with_name(name) if source.name and not is_url(self.inputs[0]) else Path(name)

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

        if isinstance(merged.get("kv_cache_memory"), str):
            merged["kv_cache_memory"] = parse_bytes(merged["kv_cache_memory"])
        return cls(
            **{"inputs": (), **part(own)},
            sampling=part(SAMPLING_OPTIONS),
            engine=EngineConfig.from_mapping(part(engine)),
        )


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


def load_settings(path: str) -> dict[str, Any]:
    """The settings of a YAML file. Raises `ConfigError` for a file that is missing or not a flat mapping."""
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is not YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"config {path}: expected `setting: value` lines")
    return loaded
