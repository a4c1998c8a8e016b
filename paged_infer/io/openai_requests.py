"""Lines of an OpenAI batch file: `custom_id`, `method`, `url` and a `body` in the API's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paged_infer.types import RowError, SamplingParams

CHAT = "chat/completions"
TEXT = "completions"

_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Fields that do not change what is generated."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "stream": (False,),
    "suffix": ("",),
}
"""Fields that are accepted with a value that asks for nothing special."""


@dataclass(slots=True)
class BatchRequest:
    """What such a line asks for; exactly one of `prompt` (text or token ids) and `messages` is set.

    Attributes:
        options: by the names that rows use.
        variables: names that the chat template sees.
    """

    prompt: Any = None
    messages: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


def is_batch_line(data: Mapping[str, Any]) -> bool:
    return "custom_id" in data and "url" in data and "body" in data


def endpoint(data: Mapping[str, Any]) -> str:
    """`CHAT` or `TEXT`. Raises `RowError` for any other."""
    url = data["url"]
    path = url.split("?", 1)[0].rstrip("/") if isinstance(url, str) else ""
    for known in (CHAT, TEXT):
        if path == known or path.endswith(f"/{known}"):
            return known
    raise RowError("unsupported_request", f"url={url!r}: only chat/completions and completions can be answered", "url")


def read_batch_line(data: Mapping[str, Any]) -> BatchRequest:
    """Raises `RowError` naming the field of the body that asks for something we cannot do."""
    kind = endpoint(data)
    if str(data.get("method") or "POST").upper() != "POST":
        raise RowError("unsupported_request", f"method={data['method']!r}: expected POST", "method")
    if not isinstance(data["body"], dict):
        raise RowError("invalid_request", f"body={str(data['body'])[:80]!r}: expected an object", "body")
    body = {name: value for name, value in data["body"].items() if value is not None}
    request = BatchRequest()
    if kind == CHAT:
        request.messages = _required(body, "messages")
    else:
        request.prompt = _single(_required(body, "prompt"))
    limit = body.pop("max_completion_tokens", None)
    if limit is not None:
        body["max_tokens"] = limit
    _logprobs(body, kind, request)
    for name, value in body.items():
        if name in _WITHOUT_EFFECT or value in _ONLY.get(name, ()):
            continue
        if name in _TRANSLATED and kind == CHAT:
            _TRANSLATED[name](request, value)
        elif name in SamplingParams.names():
            request.options[name] = value
        else:
            raise _unsupported(name, value)
    if body.get("tool_choice") == "none":
        request.variables.pop("tools", None)
    return request


def _required(body: dict[str, Any], name: str) -> Any:
    if name not in body:
        raise RowError("missing_prompt", f"the body has no {name}", f"body.{name}")
    return body.pop(name)


def _single(prompt: Any) -> Any:
    """The one prompt of a list of one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RowError(
                "unsupported_option", f"body.prompt holds {len(prompt)} prompts: write a line for each", "body.prompt"
            )
        return prompt[0]
    return prompt


def _logprobs(body: dict[str, Any], kind: str, request: BatchRequest) -> None:
    """Chats say whether and then how many, completions how many."""
    if kind == TEXT:
        request.options["logprobs"] = body.pop("logprobs", None)
        return
    asked, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(asked, bool):
        raise RowError("invalid_parameter", f"body.logprobs={asked!r}: expected true or false", "body.logprobs")
    if asked:
        request.options["logprobs"] = 0 if top is None else top
    elif top:
        raise RowError("invalid_parameter", "body.top_logprobs needs logprobs: true", "body.top_logprobs")


def _response_format(request: BatchRequest, value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return
    if kind == "json_object":
        request.options["json_schema"] = {"type": "object"}
    elif kind == "json_schema" and isinstance(value.get("json_schema"), dict) and "schema" in value["json_schema"]:
        request.options["json_schema"] = value["json_schema"]["schema"]
    else:
        raise _unsupported("response_format", value)


def _tools(request: BatchRequest, value: Any) -> None:
    request.variables["tools"] = value


def _tool_choice(request: BatchRequest, value: Any) -> None:
    if value not in ("auto", "none"):
        raise _unsupported("tool_choice", value)


def _chat_template_kwargs(request: BatchRequest, value: Any) -> None:
    if not isinstance(value, dict):
        raise RowError(
            "invalid_parameter", f"body.chat_template_kwargs={value!r}: expected an object", "body.chat_template_kwargs"
        )
    request.variables.update(value)


_TRANSLATED: Mapping[str, Callable[[BatchRequest, Any], None]] = {
    "chat_template_kwargs": _chat_template_kwargs,
    "response_format": _response_format,
    "tool_choice": _tool_choice,
    "tools": _tools,
}


def _unsupported(name: str, value: Any) -> RowError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RowError("unsupported_option", f"body.{name}={shown}: this is not supported", f"body.{name}")
