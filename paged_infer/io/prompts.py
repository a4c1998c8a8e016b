"""From an input row to what must be tokenised and how it wants to be sampled. Knows no tokenizer and no engine."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from paged_infer.io.openai_requests import BatchRequest, is_batch_line, read_batch_line
from paged_infer.io.readers import Row, json_text
from paged_infer.io.templates import Examples, RowTemplate
from paged_infer.types import RowError, SamplingParams

logger = logging.getLogger(__name__)

TOKEN_IDS_COLUMN = "prompt_token_ids"
MESSAGES_COLUMN = "messages"

CHAT_VARIABLES = ("tools", "chat_template_kwargs")
"""Columns that go to the chat template where a row's own options count."""

_MAX_NAMES_CHECKED = 10_000


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Which columns hold what.

    Naming `prompt` or `messages` makes that column the only place prompts come from; without either, `prompt`,
    `prompt_token_ids` and `messages` are looked at and a row must have exactly one of them.
    """

    prompt: str | None = None
    messages: str | None = None
    id: str = "id"

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns a prompt may stand in."""
        named = tuple(name for name in (self.prompt, self.messages) if name is not None)
        return named or ("prompt", TOKEN_IDS_COLUMN, MESSAGES_COLUMN)


@dataclass(slots=True)
class Prompt:
    """What a row asks for: exactly one of `text`, `token_ids` and `messages`, and its own sampling options.

    Token ids and messages are as the row has them: whether they are any good is for those who know the model to say.
    `variables` are further names for the chat template.
    """

    text: str | None = None
    token_ids: Any = None
    messages: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """The pieces of text in it."""
        if self.text is not None:
            return [self.text]
        messages = self.messages if isinstance(self.messages, list) else ()
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        parts = [part for content in contents for part in (content if isinstance(content, list) else (content,))]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        return [text for text in texts if isinstance(text, str)]


class PromptReader:
    """Turns rows into prompts.

    Args:
        columns: where things stand.
        chat: wrap a `prompt` text as a user message.
        template: makes the prompt text out of a row's columns, whatever they are.
        system: system message in front of conversations that bring none; implies `chat`.
        few_shot: a file of solved examples that go before every prompt, see `templates.Examples`.
        row_options: whether a row's own sampling options count; None = yes except in tables.

    Raises:
        ConfigError: the examples cannot be used.
    """

    def __init__(
        self,
        columns: PromptColumns,
        *,
        chat: bool = False,
        template: RowTemplate | None = None,
        system: RowTemplate | None = None,
        few_shot: str | None = None,
        row_options: bool | None = None,
    ) -> None:
        self.columns = columns
        self._template = template
        self._sources = columns.sources
        self._batch_lines = template is None and columns.prompt is None and columns.messages is None
        self._messages_column = columns.messages if columns.messages is not None else MESSAGES_COLUMN
        self._chat = chat or system is not None
        self._system = system
        examples = None if few_shot is None else Examples(few_shot, template, columns.prompt or "prompt")
        self._shots = [] if examples is None else examples.messages()
        self._shots_text = "" if examples is None else examples.text()
        self._row_options = row_options
        self._data_columns = {*self._sources, columns.id, *(self.prompt_columns or ())}
        self._names_seen = {*self._data_columns, *CHAT_VARIABLES, *SamplingParams.names()}

    @property
    def prompt_columns(self) -> Sequence[str] | None:
        """The columns prompts are made of; None = any."""
        if self._template is None:
            return self._sources
        return None if self._template.variables is None else sorted(self._template.variables)

    def used_columns(self) -> frozenset[str] | None:
        """Every column of a table that is read; None = any."""
        own = self.prompt_columns
        system = frozenset() if self._system is None else self._system.variables
        if own is None or system is None:
            return None
        options: set[str] = set()
        if self._row_options:
            options = {*SamplingParams.names(), *CHAT_VARIABLES}
        return frozenset({*own, *system, *options, self.columns.id})

    def id_text(self, row: Row) -> str | None:
        """The row's id as text: a string as it stands, any other value as JSON."""
        value = row.data.get(self.columns.id)
        if value is None and self._is_batch_line(row):
            value = row.data["custom_id"]
        if value is None or isinstance(value, str):
            return value
        try:
            return json_text(value)
        except (TypeError, ValueError):
            return str(value)

    def read(self, row: Row) -> Prompt:
        """Raises `RowError` when the row has no prompt, several, or one of the wrong shape."""
        if row.error is not None:
            raise row.error
        data = row.data
        if self._template is not None:
            prompt = self._from_text(self._template.render(data), data)
        elif self._is_batch_line(row):
            return self._from_batch(read_batch_line(data), row)
        else:
            prompt = self._from_column(data)
        if not row.is_table if self._row_options is None else self._row_options:
            self._add_options(prompt, row)
        return prompt

    def _is_batch_line(self, row: Row) -> bool:
        return self._batch_lines and not row.is_table and is_batch_line(row.data)

    def _from_batch(self, request: BatchRequest, row: Row) -> Prompt:
        if request.messages is not None:
            prompt = self._from_messages(request.messages, row.data)
        elif isinstance(request.prompt, str):
            prompt = self._from_text(request.prompt, row.data)
        else:
            prompt = self._from_ids(request.prompt)
        if self._row_options is not False:
            prompt.options = {name: value for name, value in request.options.items() if value is not None}
            prompt.variables = request.variables
        return prompt

    def _from_column(self, data: dict[str, Any]) -> Prompt:
        given = [name for name in self._sources if data.get(name) is not None]
        if len(given) != 1:
            raise self._not_one(given, data)
        name = given[0]
        value = data[name]
        if name == self._messages_column:
            return self._from_messages(_conversation(value, name), data)
        if name == TOKEN_IDS_COLUMN:
            return self._from_ids(value)
        if not isinstance(value, str):
            raise RowError("invalid_prompt", f"{name}={_shown(value)}: expected text", name)
        return self._from_text(value, data)

    def _from_text(self, text: str, data: dict[str, Any]) -> Prompt:
        if self._chat:
            return self._from_messages([{"role": "user", "content": text}], data)
        if self._shots_text is None:
            raise RowError("few_shot", "the few-shot file holds messages, which need --chat or --system")
        return Prompt(text=self._shots_text + text)

    def _from_ids(self, ids: Any) -> Prompt:
        if self._shots:
            raise RowError("invalid_prompt", "few-shot examples cannot be put before token ids", TOKEN_IDS_COLUMN)
        return Prompt(token_ids=ids)

    def _from_messages(self, messages: Any, data: dict[str, Any]) -> Prompt:
        """The conversation behind its system message and the examples; what is no conversation stays as it is."""
        if not isinstance(messages, list) or not messages:
            return Prompt(messages=messages)
        first = messages[0]
        if isinstance(first, dict) and first.get("role") == "system":
            opening, messages = [first], messages[1:]
        elif self._system is not None:
            opening = [{"role": "system", "content": self._system.render(data)}]
        else:
            opening = []
        return Prompt(messages=[*opening, *self._shots, *messages])

    def _not_one(self, given: list[str], data: dict[str, Any]) -> RowError:
        if given:
            return RowError(
                "ambiguous_prompt",
                f"the row has {' and '.join(given)}; give one, or choose with --prompt-column or --messages-column",
                given[-1],
            )
        empty = [name for name in self._sources if name in data]
        if empty:
            return RowError("missing_prompt", f"the row has no prompt: {' and '.join(empty)} is null", empty[0])
        present = ", ".join(sorted(data)[:12]) or "no columns"
        near = difflib.get_close_matches(self._sources[0], [name for name in data if isinstance(name, str)], n=1)
        hint = f"; to take {near[0]}, give --prompt-column {near[0]}" if near else ""
        return RowError(
            "missing_prompt",
            f"the row has none of {', '.join(self._sources)}; it has {present}{hint}",
            self._sources[0],
        )

    def _add_options(self, prompt: Prompt, row: Row) -> None:
        for name, value in row.data.items():
            if name not in self._names_seen:
                self._warn_of_near_miss(name, row)
            elif value is None or name in self._data_columns:
                continue
            elif name in CHAT_VARIABLES:
                _add_variables(prompt, name, value)
            elif name in SamplingParams.names():
                option = _typed(name, value) if row.is_table and isinstance(value, str) else value
                if option is not None:
                    prompt.options[name] = option

    def _warn_of_near_miss(self, name: str, row: Row) -> None:
        """Each unknown column once; it stays data."""
        if len(self._names_seen) > _MAX_NAMES_CHECKED:
            return
        self._names_seen.add(name)
        near = _nearest_option(name)
        if near is not None:
            logger.warning("%s: %r is no option and is ignored; did you mean %r?", row.where, name, near)


def _nearest_option(name: str) -> str | None:
    """The sampling option that a name is close to, be it by letters, by case (`topP`) or by dashes."""
    names = SamplingParams.names()
    plain = re.sub(r"[-_ ]", "", name.lower())
    for option in sorted(names):
        if plain == option.replace("_", ""):
            return option
    near = difflib.get_close_matches(name.lower(), sorted(names), n=1, cutoff=0.8)
    return near[0] if near else None


_TEXT_OPTIONS = frozenset({"adapter", "grammar", "json_schema", "regex"})


def _typed(name: str, value: str) -> Any:
    """An option out of a table of text, as CSV is: numbers and lists as JSON writes them; an empty one is unset."""
    if not value:
        return None
    if name in _TEXT_OPTIONS or (name == "stop" and not value.startswith("[")):
        return value
    try:
        return orjson.loads(value.lower() if value in ("True", "False") else value)
    except orjson.JSONDecodeError:
        return value


def _add_variables(prompt: Prompt, name: str, value: Any) -> None:
    """What a chat template sees beside the messages; a table or a careful writer may hold it as JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    if name == "tools" and isinstance(value, list):
        prompt.variables[name] = value
    elif name != "tools" and isinstance(value, dict):
        prompt.variables.update(value)
    else:
        kind = "a list" if name == "tools" else "an object"
        raise RowError("invalid_parameter", f"{name}={_shown(value)}: expected {kind}", name)


def _conversation(value: Any, name: str) -> Any:
    """The messages as they stand, or parsed where a table holds them as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise RowError(
            "invalid_prompt", f"{name}={_shown(value)}: expected messages or JSON text of them", name
        ) from None


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
