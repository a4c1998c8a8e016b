"""From an input row to what must be tokenised and how it wants to be sampled. Knows no tokenizer and no engine."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from paged_infer.io.readers import Row, json_text
from paged_infer.types import RowError, SamplingParams

logger = logging.getLogger(__name__)

TOKEN_IDS_COLUMN = "prompt_token_ids"

UNSUPPORTED_OPTIONS: Mapping[str, Any] = {
    "adapter": None,
}
"""Options of other engines that are refused rather than ignored → the value that changes nothing."""

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
        return named or ("prompt", TOKEN_IDS_COLUMN, "messages")

    def used(self, row_options: bool) -> frozenset[str]:
        """Every column that is read."""
        options = SamplingParams.names() | UNSUPPORTED_OPTIONS.keys() if row_options else frozenset()
        return frozenset({*self.sources, self.id, *options})


@dataclass(slots=True)
class Prompt:
    """What a row asks for: exactly one of `text`, `token_ids` and `messages`, and its own sampling options.

    Token ids and messages are as the row has them: whether they are any good is for those who know the model to say.
    """

    text: str | None = None
    token_ids: Any = None
    messages: Any = None
    options: dict[str, Any] = field(default_factory=dict)

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
        system: system message in front of conversations that bring none; implies `chat`.
        row_options: whether a row's own sampling options count; None = yes except in tables.
    """

    def __init__(
        self, columns: PromptColumns, *, chat: bool = False, system: str | None = None, row_options: bool | None = None
    ) -> None:
        self.columns = columns
        self._sources = columns.sources
        self._messages_column = columns.messages if columns.messages is not None else "messages"
        self._chat = chat or system is not None
        self._system = system
        self._row_options = row_options
        self._names_seen: set[str] = {*self._sources, columns.id, *SamplingParams.names(), *UNSUPPORTED_OPTIONS}

    def id_text(self, row: Row) -> str | None:
        """The row's id as text: a string as it stands, any other value as JSON."""
        value = row.data.get(self.columns.id)
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
        given = [name for name in self._sources if data.get(name) is not None]
        if len(given) != 1:
            raise self._not_one(given, data)
        name = given[0]
        value = data[name]
        prompt = Prompt(options=self._options(row))
        if name == self._messages_column:
            prompt.messages = self._with_system(_conversation(value, name))
        elif name == TOKEN_IDS_COLUMN:
            prompt.token_ids = value
        elif not isinstance(value, str):
            raise RowError("invalid_prompt", f"{name}={_shown(value)}: expected text", name)
        elif self._chat:
            prompt.messages = self._with_system([{"role": "user", "content": value}])
        else:
            prompt.text = value
        return prompt

    def _not_one(self, given: list[str], data: dict[str, Any]) -> RowError:
        if given:
            return RowError(
                "ambiguous_prompt",
                f"the row has {' and '.join(given)}; give one, or choose with --prompt-column or --messages-column",
                given[-1],
            )
        present = ", ".join(sorted(data)[:12]) or "no columns"
        return RowError(
            "missing_prompt", f"the row has none of {', '.join(self._sources)}; it has {present}", self._sources[0]
        )

    def _with_system(self, messages: Any) -> Any:
        if self._system is None or not isinstance(messages, list) or not messages:
            return messages
        first = messages[0]
        if isinstance(first, dict) and first.get("role") == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _options(self, row: Row) -> dict[str, Any]:
        if not (not row.is_table if self._row_options is None else self._row_options):
            return {}
        options = {}
        for name, value in row.data.items():
            if name not in self._names_seen:
                self._warn_of_near_miss(name, row)
            elif value is None or name in self._sources or name == self.columns.id:
                continue
            elif name in SamplingParams.names():
                options[name] = value
            elif name in UNSUPPORTED_OPTIONS and value != UNSUPPORTED_OPTIONS[name]:
                raise RowError("unsupported_option", f"{name}={_shown(value)}: this option is not supported", name)
        return options

    def _warn_of_near_miss(self, name: str, row: Row) -> None:
        """Each unknown column once; it stays data."""
        if len(self._names_seen) > _MAX_NAMES_CHECKED:
            return
        self._names_seen.add(name)
        near = difflib.get_close_matches(name, SamplingParams.names(), n=1, cutoff=0.8)
        if near:
            logger.warning("%s: %r is no option and is ignored; did you mean %r?", row.where, name, near[0])


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
