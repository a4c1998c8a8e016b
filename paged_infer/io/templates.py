"""Prompts made of a row's columns: Jinja templates and examples to put in front.

A template is the user's own, a row is not: templates run in Jinja's sandbox, a column that a row lacks is an error and
not an empty text, and so is printing a null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import SandboxedEnvironment

from paged_infer.config import ConfigError
from paged_infer.io.readers import parse_json_line
from paged_infer.types import RowError

WHOLE_ROW = "row"
"""The name under which a template sees all columns, whatever they are called."""

_TAGS = ("{{", "{%", "{#")


def _printable(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateRuntimeError("it prints a null; write {{ name or '' }} where a column may be null")
    return value


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    return environment


class RowTemplate:
    """A Jinja template over the columns of a row; text without any tag stands for itself.

    Args:
        source: the template.
        setting: the setting it comes from, for messages.

    Attributes:
        variables: the columns it reads; None when it may read any.

    Raises:
        ConfigError: the template is not valid Jinja.
    """

    def __init__(self, source: str, setting: str) -> None:
        self._setting = setting
        self._constant = None if any(tag in source for tag in _TAGS) else source
        try:
            self._template = _environment().from_string(source)
            names = jinja2.meta.find_undeclared_variables(_environment().parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{setting}: not a valid template: {error.message} (line {error.lineno})") from None
        self._template.globals = dict(self._template.globals)  # copied for each row: a ChainMap would cost 3 times more
        self.variables = None if WHOLE_ROW in names else frozenset(names)

    def render(self, data: Mapping[str, Any]) -> str:
        """Raises `RowError` when the row lacks a column or the template fails on it."""
        if self._constant is not None:
            return self._constant
        try:
            return self._template.render(data if self.variables is not None else {WHOLE_ROW: data, **data})
        except jinja2.UndefinedError as error:
            present = ", ".join(sorted(data)[:12]) or "no columns"
            raise RowError("template", f"{self._setting}: {error.message}; the row has {present}", None) from None
        except Exception as error:  # templates compute, so anything can happen
            raise RowError("template", f"{self._setting}: the template fails on this row: {error}", None) from error


def text_or_file(value: str, setting: str) -> str:
    """The value itself, or after `@` the content of the file it names. Raises `ConfigError`."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={value!r} cannot be read: {error}") from None


ANSWER_COLUMNS = ("answer", "completion", "response")


class Examples:
    """Solved rows that stand in front of every prompt.

    Each is `messages`, or the columns a prompt is made of together with an `answer` (or `completion`, or `response`).

    Args:
        path: a JSONL file.
        template: makes a prompt of an example's columns; None = take the column `prompt_column`.

    Raises:
        ConfigError: naming the line of an example that is none.
    """

    def __init__(self, path: str, template: RowTemplate | None, prompt_column: str) -> None:
        self._path = path
        self._examples: list[list[dict[str, Any]]] = []
        self._all_pairs = True
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"few_shot={path!r} cannot be read: {error.strerror}") from None
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            if line.strip():
                try:
                    self._examples.append(self._messages(parse_json_line(line), template, prompt_column))
                except RowError as error:
                    raise ConfigError(f"few_shot {path} line {number}: {error}") from None
        if not self._examples:
            raise ConfigError(f"few_shot {path} has no examples")

    def _messages(self, row: dict[str, Any], template: RowTemplate | None, prompt_column: str) -> list[dict[str, Any]]:
        if isinstance(row.get("messages"), list):
            if any(isinstance(message, dict) and message.get("role") == "system" for message in row["messages"]):
                raise RowError("few_shot", "give the system message with --system, not in an example")
            self._all_pairs = False
            return row["messages"]
        answer = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
        if not isinstance(answer, str):
            raise RowError("few_shot", f"expected messages, or a prompt with {' or '.join(ANSWER_COLUMNS)} as text")
        prompt = row.get(prompt_column) if template is None else template.render(row)
        if not isinstance(prompt, str):
            raise RowError("few_shot", f"expected the text column {prompt_column!r} beside the answer")
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def messages(self) -> list[dict[str, Any]]:
        """The examples as turns of a conversation."""
        return [message for example in self._examples for message in example]

    def text(self) -> str | None:
        """The examples as text: a prompt, a space unless it ends in one, the answer, an empty line.

        None when one of them is a conversation.
        """
        if not self._all_pairs:
            return None
        pairs = [(example[0]["content"], example[1]["content"]) for example in self._examples]
        return "".join(f"{prompt}{'' if prompt[-1:].isspace() else ' '}{answer}\n\n" for prompt, answer in pairs)
