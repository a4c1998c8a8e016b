"""Inspect: the engine as its model provider `paged-infer`, found through the entry-point group `inspect_ai`.

    inspect eval task.py --model paged-infer/PATH -M dtype=float32 -M max_num_seqs=64

Samples run as coroutines; whatever they ask joins the batch that is running. Importing this module is cheap, and so is
making a model: Inspect makes further ones only to ask for their names. The engine is loaded by the first question.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo

if TYPE_CHECKING:
    from paged_infer.async_llm import AsyncLLM
    from paged_infer.types import Completion, SamplingParams
    from paged_infer.types import Logprobs as Columns

MAX_TOKENS = 2048
"""Most tokens of an answer where neither task nor command line says otherwise."""

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_STOP_REASONS = {"stop": "stop", "length": "max_tokens"}

_SAME_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "logit_bias"),
    "prompt_logprobs",
)
_OUR_NAMES = {"stop_seqs": "stop", "num_choices": "n"}


@modelapi(name="paged-infer")
class PagedInferAPI(ModelAPI):
    """A model for `--model paged-infer/MODEL`.

    Args:
        model_name: Hugging Face folder or id, `.gguf` file or short name.
        base_url, api_key: unused; every provider is given them.
        config: generation settings of the whole run; `extra_body` may hold any other field of `SamplingParams`.
        enable_thinking: for chat templates that know the name.
        **model_args: fields of `paged_infer.config.EngineConfig` (`-M NAME=VALUE`).

    Raises:
        ConfigError: unknown or impossible settings.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        *,
        enable_thinking: bool | None = None,
        **model_args: Any,
    ) -> None:
        from paged_infer.config import EngineConfig

        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        self._template_args = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._max_num_seqs = EngineConfig.from_mapping({"model": model_name, **model_args}).max_num_seqs
        self._model_args = model_args
        self._loading = threading.Lock()
        self._loaded: AsyncLLM | None = None

    @property
    def _llm(self) -> AsyncLLM:
        from paged_infer.async_llm import AsyncLLM

        with self._loading:
            if self._loaded is None:
                self._loaded = AsyncLLM(self.model_name, **self._model_args)
            return self._loaded

    async def _load(self) -> None:
        """Have the engine ready without holding up the event loop."""
        if self._loaded is None:
            await asyncio.to_thread(lambda: self._llm)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a conversation. One that is too long comes back empty, with the stop reason `model_length`.

        Raises:
            RowError: anything else that cannot be answered.
        """
        from paged_infer.types import RowError

        await self._load()
        began = time.perf_counter()
        offered = [] if tool_choice == "none" else tools
        completions = await self._ask(input, offered, self._params(config))
        first = completions[0]
        if first.error_type == "prompt_too_long":
            return ModelOutput.from_content(self.model_name, "", stop_reason="model_length", error=first.error)
        if first.error is not None:
            raise RowError(first.error_type or "error", first.error)
        produced = sum(len(completion.token_ids) for completion in completions)
        usage = ModelUsage(
            input_tokens=first.prompt_tokens - first.cached_tokens,
            input_tokens_cache_read=first.cached_tokens,
            output_tokens=produced,
            total_tokens=first.prompt_tokens + produced,
        )
        choices = [self._choice(completion, offered) for completion in completions]
        return ModelOutput(model=self.model_name, choices=choices, usage=usage, time=time.perf_counter() - began)

    async def _ask(
        self, messages: list[ChatMessage], tools: Sequence[ToolInfo], params: SamplingParams
    ) -> list[Completion]:
        if not self._llm.tokenizer.has_chat_template and len(messages) == 1:
            return await self._llm.generate(messages[0].text, params)
        options: dict[str, Any] = dict(self._template_args)
        if tools:
            options["tools"] = [
                {"type": "function", "function": tool.model_dump(include=_TOOL_FIELDS, exclude_none=True)}
                for tool in tools
            ]
        return await self._llm.chat([_plain(message) for message in messages], params, **options)

    def _params(self, config: GenerateConfig) -> SamplingParams:
        from paged_infer.types import SamplingParams

        named = {name: getattr(config, name) for name in _SAME_NAMES}
        named |= {ours: getattr(config, theirs) for theirs, ours in _OUR_NAMES.items()}
        if config.logprobs:
            named["logprobs"] = config.top_logprobs or 0
        if config.response_schema is not None:
            named["json_schema"] = config.response_schema.json_schema.model_dump(exclude_none=True)
        extra = config.extra_body or {}
        return SamplingParams.resolve({"max_tokens": MAX_TOKENS}, self._llm.sampling_defaults, named, extra)

    def _choice(self, completion: Completion, tools: Sequence[ToolInfo]) -> ChatCompletionChoice:
        text, calls = (completion.text, []) if not tools else split_tool_calls(completion.text, tools)
        message = ChatMessageAssistant(content=text, tool_calls=calls or None, model=self.model_name, source="generate")
        used = completion.prompt_tokens + len(completion.token_ids)
        reason = _STOP_REASONS[completion.finish_reason]
        if reason == "max_tokens" and used >= self._llm.max_model_len:
            reason = "model_length"
        return ChatCompletionChoice(
            message=message,
            stop_reason="tool_calls" if calls else reason,
            logprobs=self._logprobs(completion.logprobs),
            prompt_logprobs=self._logprobs(completion.prompt_logprobs),
        )

    def _logprobs(self, columns: Columns | None) -> Logprobs | None:
        if columns is None:
            return None

        def text(token: int) -> str:
            return self._llm.tokenizer.decode([token], skip_special_tokens=False)

        return Logprobs(
            content=[
                Logprob(
                    token=text(token),
                    logprob=logprob,
                    top_logprobs=[
                        TopLogprob(token=text(likely), logprob=value)
                        for likely, value in zip(likely_ids, values, strict=True)
                    ],
                )
                for token, logprob, likely_ids, values in zip(
                    columns.token_ids, columns.logprobs, columns.top_token_ids, columns.top_logprobs, strict=True
                )
                if logprob == logprob  # the first token of a prompt has none
            ]
        )

    async def count_text_tokens(self, text: str) -> int:
        return len(await self.tokenize(text))

    async def tokenize(self, text: str) -> list[int]:
        await self._load()
        return self._llm.tokenizer.encode_plain(text)

    def max_connections(self) -> int:
        """Enough samples at a time to fill the engine's batch."""
        return self._max_num_seqs

    def connection_key(self) -> str:
        return self.model_name

    def collapse_user_messages(self) -> bool:
        return True

    async def aclose(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await asyncio.to_thread(loaded.close)


_TOOL_FIELDS = {"name", "description", "parameters"}


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates expect it."""
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if isinstance(message, ChatMessageTool):
        plain |= {"tool_call_id": message.tool_call_id, "name": message.function}
        if message.error is not None:
            plain["content"] = message.error.message
    return plain


def split_tool_calls(text: str, tools: Sequence[ToolInfo]) -> tuple[str, list[ToolCall]]:
    """What an answer says, and the tools it calls.

    A call is written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or the answer is nothing but such
    an object. A call that cannot be read has a `parse_error`, which Inspect tells the model.
    """
    calls = [_tool_call(found[1]) for found in _TOOL_CALL.finditer(text)]
    if calls:
        return _TOOL_CALL.sub("", text).strip(), calls
    whole = _tool_call(text.strip())
    if whole.parse_error is None and whole.function in {tool.name for tool in tools}:
        return "", [whole]
    return text, []


def _tool_call(text: str) -> ToolCall:
    name, arguments, problem = "unknown", {}, None
    try:
        given = json.loads(text)
        name = given["name"]
        arguments = given.get("arguments", given.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("expected a name and an object of arguments")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"not a tool call ({type(error).__name__}: {error}): {text}"
        name, arguments = "unknown", {}
    return ToolCall(id=uuid4().hex[:9], function=name, arguments=arguments, parse_error=problem)
