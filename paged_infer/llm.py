"""The Python API: a model and the engine behind a few calls."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from paged_infer.calls import Call, Calls, Encoded
from paged_infer.config import DEMO_MODEL, EngineConfig
from paged_infer.engine.build import build_engine
from paged_infer.engine.interface import AnyEngine
from paged_infer.text.tokenizer import Tokenizer
from paged_infer.types import Completion, RowError, SamplingParams, Score

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text; token ids, used as they are; or a mapping with one of `prompt`, `prompt_token_ids` and `messages`."""

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": ..., "content": ...}`, as in OpenAI's chat interface."""

_DRAWN_AT_ONCE = 64
"""Prompts taken from an iterator between two steps."""

_FORMS = ("prompt", "prompt_token_ids", "messages")


class LLM:
    """A loaded model. Not for several threads at once; `AsyncLLM` is.

    ```python
    with LLM("path/to/model") as llm:
        for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(answer.text)
    ```

    Args:
        model: Hugging Face folder or id, `.gguf` file or short name, as `paged-infer run -m`.
        **options: the fields of `paged_infer.config.EngineConfig`.

    Raises:
        ConfigError: unknown or impossible settings.

    Attributes:
        config: the settings.
        engine: the engine; its counters are `engine.stats` and `engine.scheduler.stats`.
        calls: what steps the engine, and sends answers to the call they belong to.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **options})
        self.config = config
        self.engine: AnyEngine = build_engine(config)
        self.calls = Calls(self.engine, config.seed if config.seed is not None else secrets.randbits(63))
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output."""
        return self.engine.memory.max_model_len

    def generate(
        self,
        prompts: Iterable[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts: texts, or token ids that are used as they are.

        Args:
            prompts: one prompt or several; also as `{"prompt": text}`, `{"prompt_token_ids": ids}` or
                `{"messages": [...]}`.
            params: one for all or one for each; None = the model's own defaults.

        Returns:
            The completions in order, `params.n` a prompt. A prompt that cannot be answered yields a single one, whose
            `finish_reason` is "error".
        """
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._run(self.encode(given), params)

    def chat(
        self,
        conversations: Sequence[Sequence[Message]] | Sequence[Message],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[Completion]:
        """Answer one conversation (a list of `{"role": ..., "content": ...}`) or several through the chat template.

        Args:
            template_options: names the template may use, such as `tools` or `enable_thinking`; and
                `continue_final_message=True` to go on with a last message instead of answering it.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        chats = [conversations] if single else conversations
        return self._run([self.encode_chat(messages, **template_options) for messages in chats], params)

    def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        lookahead: int = 1024,
    ) -> Iterator[Completion]:
        """Complete prompts and yield each completion as soon as it is there.

        Args:
            prompts: drawn as they are needed, so that they may be more than memory holds; see `generate`.
            params: one for all, or as many as there are prompts, drawn with them.
            lookahead: prompts that wait at a time. The engine orders them, so that shared prefixes are computed once.

        Yields:
            Completions in the order in which they are finished, the samples of a prompt together; `request_id` is the
            prompt's position. Leaving the loop gives up what is unfinished.
        """
        self._check_open()
        pairs: Iterator[tuple[Prompt, SamplingParams]]
        if params is None or isinstance(params, SamplingParams):
            pairs = zip(prompts, itertools.repeat(self.default_params(params)), strict=False)
        else:
            pairs = zip(prompts, params, strict=True)
        rows = itertools.count()
        call = self.calls.open()
        try:
            more = True
            while more or call.num_unfinished or call.ready:
                if more and self.engine.num_waiting < lookahead:
                    drawn = list(itertools.islice(pairs, min(_DRAWN_AT_ONCE, lookahead)))
                    more = bool(drawn)
                    encoded = self.encode([prompt for prompt, _ in drawn])
                    for ids, (_, chosen) in zip(encoded, drawn, strict=True):
                        call.add(next(rows), ids, chosen)
                if not call.ready and call.num_unfinished:
                    self.calls.step()
                while call.ready:
                    yield call.ready.popleft()
        finally:
            if not self._closed:
                call.abandon_all()

    def beam_search(
        self,
        prompts: Iterable[Prompt] | str,
        *,
        beam_width: int = 4,
        max_tokens: int = 256,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        **options: Any,
    ) -> list[list[Completion]]:
        """The likeliest outputs of each prompt, as Hugging Face's beam search finds them.

        Args:
            beam_width, length_penalty, early_stopping: as in `SamplingParams`.
            options: its other fields; `n` of the `beam_width` outputs are returned, by default all.

        Returns:
            For each prompt its outputs, the best `score` first; a single failed one where it cannot be answered.

        Raises:
            RowError: options that do not fit.
        """
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = SamplingParams.resolve(
            self.engine.sampling_defaults,
            {"n": beam_width},
            options,
            {
                "beam_width": beam_width,
                "max_tokens": max_tokens,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
            },
        )
        found: list[list[Completion]] = [[] for _ in given]
        for completion in self._run(self.encode(given), params):
            found[completion.request_id].append(completion)
        return found

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[str | Sequence[int]],
        *,
        top_logprobs: int = 0,
    ) -> list[Score]:
        """How likely each continuation is after its context; nothing is generated.

        All pairs are in the engine at once, and what contexts share is computed once. The last token is not run, so
        context and continuation may have one token more than the model's context length. Where both are texts, they are
        tokenised as one, and spaces at the end of the context count to the continuation.

        Args:
            top_logprobs: how many of the likeliest tokens to report at each position.

        Raises:
            ValueError: not as many contexts as continuations, an empty continuation, or one without a token before it.
            RowError: a row that the model cannot run, such as one longer than its context length.
        """
        scores = dict(self.stream_scores(contexts, continuations, top_logprobs=top_logprobs))
        return [scores[row] for row in range(len(scores))]

    def stream_scores(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[str | Sequence[int]],
        *,
        top_logprobs: int = 0,
    ) -> Iterator[tuple[int, Score]]:
        """`score`, yielding (row, score) as soon as it is there."""
        self._check_open()
        params = SamplingParams(max_tokens=0, prompt_logprobs=max(1, top_logprobs))
        call = self.calls.open()
        for row, (context, continuation) in enumerate(self.encode_pairs(contexts, continuations)):
            call.add(row, [*context, *continuation], params, score_from=len(context))
        for answer in self._finished(call):
            yield answer.request_id, Score.of_completion(answer)

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        """Token ids of prompts as `generate` reads them; a `RowError` in place of those that have none.

        Raises:
            TypeError: something that is no prompt.
        """
        encoded: list[Encoded] = []
        texts: list[tuple[int, str]] = []
        for i, prompt in enumerate(prompts):
            given: object = prompt
            if isinstance(prompt, Mapping):
                forms = [name for name in _FORMS if prompt.get(name) is not None]
                given = prompt[forms[0]] if len(forms) == 1 else None
                if forms == ["messages"]:
                    encoded.append(self.encode_chat(given))
                    continue
            if isinstance(given, str):
                texts.append((i, given))
                given = ()
            if not isinstance(given, Sequence):
                raise TypeError(f"{prompt!r}: expected a text, token ids, or a dict with one of {', '.join(_FORMS)}")
            encoded.append(given)
        for (i, _), ids in zip(texts, self.tokenizer.encode_batch([text for _, text in texts]), strict=True):
            encoded[i] = ids
        return encoded

    def encode_pairs(
        self, contexts: Sequence[Prompt], continuations: Sequence[str | Sequence[int]]
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Token ids of contexts and continuations as `score` reads them, whose errors it raises."""
        if len(contexts) != len(continuations):
            raise ValueError(f"{len(contexts)} contexts for {len(continuations)} continuations")
        texts = {
            row: (context.rstrip(), context + continuation)
            for row, (context, continuation) in enumerate(zip(contexts, continuations, strict=True))
            if isinstance(context, str) and isinstance(continuation, str)
        }
        starts = list(dict.fromkeys(start for start, _ in texts.values()))
        start_ids = dict(zip(starts, self.tokenizer.encode_batch(starts), strict=True))
        whole_ids = dict(zip(texts, self.tokenizer.encode_batch([whole for _, whole in texts.values()]), strict=True))
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        for row, (context, continuation) in enumerate(zip(contexts, continuations, strict=True)):
            pair: tuple[Sequence[int], Sequence[int]]
            if row in texts:
                ids = start_ids[texts[row][0]]
                pair = ids, whole_ids[row][len(ids) :]
            else:
                (encoded,) = self.encode([context])
                if isinstance(encoded, RowError):
                    raise encoded
                if isinstance(continuation, str):
                    continuation = self.tokenizer.encode_plain(continuation)
                pair = encoded, continuation
            if not all(pair):
                raise ValueError("a continuation and at least one token before it are needed for a score")
            pairs.append(pair)
        return pairs

    def encode_chat(self, messages: object, **options: Any) -> Encoded:
        """Token ids of a conversation as `chat` reads it; a `RowError` where the template refuses it."""
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except RowError as error:
            return error

    def default_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """The options, or the model's own defaults where there are none."""
        return SamplingParams.resolve(self.engine.sampling_defaults) if params is None else params

    def _run(
        self,
        prompts: Sequence[Encoded],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Completion]:
        self._check_open()
        if isinstance(params, Mapping):
            raise TypeError(f"params: expected SamplingParams(**{dict(params)!r}), or a list of them")
        if params is None or isinstance(params, SamplingParams):
            options: Sequence[SamplingParams] = [self.default_params(params)] * len(prompts)
        else:
            options = params
        if len(options) != len(prompts):
            raise ValueError(f"{len(options)} sampling params for {len(prompts)} prompts")
        call = self.calls.open()
        for row, (ids, chosen) in enumerate(zip(prompts, options, strict=True)):
            call.add(row, ids, chosen)
        return sorted(self._finished(call), key=lambda answer: answer.request_id)

    def _finished(self, call: Call) -> Iterator[Completion]:
        """Run until all of a call has come back, and yield it as it comes."""
        try:
            while call.num_unfinished or call.ready:
                if not call.ready:
                    self.calls.step()
                while call.ready:
                    yield call.ready.popleft()
        finally:
            if not self._closed:
                call.abandon_all()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def close(self) -> None:
        """Free the model and its cache."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
