"""Chat templates: from messages to the text the model was trained to read.

A template is untrusted code out of a model folder, so it runs in Jinja's immutable sandbox, with the functions and the
whitespace rules Hugging Face gives it. Everything that goes wrong while rendering is the row's fault or the template's
refusal, and comes out as `RowError("chat_template", ..., "messages")`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paged_infer.config import ConfigError
from paged_infer.types import RowError

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names a message's reasoning goes by; templates read the first or the second."""

_PAYLOADS = ("content", "tool_calls", "function_call", *_REASONING)
_PROBE = "text of a part"

_GOES_ON = "\ufdd0the message goes on here "
"""Put behind a message that is to be continued; its last space shows whether the template trims."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what to train on; for inference its body is ordinary text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own `tojson` escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _row_error(message: str) -> RowError:
    return RowError("chat_template", message, "messages")


class ChatTemplate:
    """One Jinja chat template.

    Args:
        source: the template.
        variables: names every rendering sees, such as `bos_token`.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)

    def check(self) -> None:
        """Raises `ConfigError` when the template is not valid Jinja."""
        _ = self._template

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Null keys of a message count as absent. Content given as a list of text parts is passed on where the template
        reads parts, and joined by newlines where it expects a string.

        Args:
            messages: a list of `{"role": ..., "content": ...}` objects.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end within the last message instead, with the end of its content.
            variables: further names the template may use, `tools` and `documents` among them.

        Raises:
            RowError: messages that are malformed, that hold something else than text, or that the template refuses;
                tools that it has no place for.
            ConfigError: the template itself is not valid Jinja.
        """
        if variables.get("tools") and not self._names_tools:
            raise RowError(
                "chat_template",
                "the model's chat template has no place for tools: leave them out, or give another --chat-template",
                "tools",
            )
        cleaned = [self._clean(i, message) for i, message in enumerate(_conversation(messages))]
        if continue_final_message:
            return self._open_ended(cleaned, variables)
        return self._render(cleaned, add_generation_prompt, variables)

    def _open_ended(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        content = messages[-1].get("content", "")
        if isinstance(content, str):
            marked: object = content + _GOES_ON
        else:
            marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _GOES_ON}]
        text = self._render([*messages[:-1], {**messages[-1], "content": marked}], False, variables)
        kept, mark, rest = text.rpartition(_GOES_ON.rstrip())
        if not mark:
            raise _row_error("the chat template leaves out the end of the last message, which was to be continued")
        return kept if rest.startswith(_GOES_ON[len(mark) :]) else kept.rstrip()

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error

    @cached_property
    def _names_tools(self) -> bool:
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(self.source))

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template loops over content parts; found by showing it one."""
        part = {"type": "text", "text": _PROBE}
        try:
            text = self._render([{"role": "user", "content": [part]}], False, {})
        except RowError:
            return False
        return _PROBE in text and not any(written in text for written in ("'type'", '"type"'))

    def _render(self, messages: Sequence[Mapping[str, Any]], generate: bool, variables: Mapping[str, Any]) -> str:
        names = {"tools": None, "documents": None, **self._variables, **variables}
        template = self._template
        try:
            return template.render(messages=messages, add_generation_prompt=generate, **names)
        except Exception as error:
            raise _row_error(f"the chat template refused the messages: {error}") from error

    def _clean(self, position: int, message: object) -> dict[str, Any]:
        where = f"messages[{position}]"
        if not isinstance(message, Mapping):
            raise _row_error(f"{where}: expected an object with role and content, not {type(message).__name__}")
        cleaned = _without_nulls(message)
        if not isinstance(cleaned.get("role"), str):
            raise _row_error(f"{where}: role must be a string")
        if not any(name in cleaned for name in _PAYLOADS):
            raise _row_error(f"{where}: no content")
        content = cleaned.get("content", "")
        if isinstance(content, list | tuple):
            parts = [_text_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
            cleaned["content"] = parts if self._reads_parts else "\n".join(part["text"] for part in parts)
        elif not isinstance(content, str):
            raise _row_error(f"{where}: content must be text, not {type(content).__name__}")
        if isinstance(cleaned.get("tool_calls"), list | tuple):
            cleaned["tool_calls"] = [_clean_call(call) for call in cleaned["tool_calls"]]
        reasoning = next((cleaned[name] for name in _REASONING if name in cleaned), None)
        return cleaned if reasoning is None else {"thinking": reasoning, **cleaned, "reasoning_content": reasoning}


def _conversation(messages: object) -> Sequence[object]:
    if not isinstance(messages, list | tuple):
        raise _row_error(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise _row_error("messages is empty")
    return messages


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _text_part(where: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    cleaned = _without_nulls(part) if isinstance(part, Mapping) else {}
    if cleaned.get("type", "text") != "text" or not isinstance(cleaned.get("text"), str):
        kind = cleaned.get("type", type(part).__name__)
        raise _row_error(f"{where}: only text parts can be read, not {kind!r}")
    return {"type": "text", **cleaned}


def _clean_call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    cleaned = _without_nulls(call)
    if isinstance(cleaned.get("function"), Mapping):
        cleaned["function"] = _without_nulls(cleaned["function"])
    return cleaned
