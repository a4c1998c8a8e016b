"""The Python API: a model and the engine behind two calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from paged_infer.config import DEMO_MODEL, EngineConfig
from paged_infer.engine.build import build_engine
from paged_infer.engine.interface import AnyEngine
from paged_infer.types import Completion, Request, RowError, SamplingParams, Score, noise_key

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def _plain(prompt: Prompt) -> str | Sequence[int]:
    """The text or ids of a prompt. Raises TypeError for anything else."""
    given = prompt
    if isinstance(prompt, Mapping):
        values = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        given = values[0] if len(values) == 1 else prompt
    if not isinstance(given, str | Sequence):
        raise TypeError(f"{prompt!r}: expected a text, token ids, or a dict with a prompt or prompt_token_ids")
    return given


class LLM:
    """A loaded model.

    ```python
    with LLM("path/to/model") as llm:
        for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(answer.text)
    ```

    Args:
        model: Hugging Face folder, `.gguf` file or short name, as `paged-infer run -m`.
        **options: the fields of `paged_infer.config.EngineConfig`.

    Raises:
        ConfigError: unknown or impossible settings.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **options})
        self.config = config
        self.engine: AnyEngine = build_engine(config)
        self._closed = False
        self._run_seed = config.seed if config.seed is not None else secrets.randbits(63)

    def generate(
        self, prompts: Iterable[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete prompts: texts, or token ids that are used as they are.

        Args:
            prompts: one prompt or several; also as `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            params: one for all or one for each; None = the model's own defaults.

        Returns:
            The completions in order, `params.n` a prompt. A prompt that cannot be answered yields a single one, whose
            `finish_reason` is "error".
        """
        given = [_plain(prompt) for prompt in ([prompts] if isinstance(prompts, str | Mapping) else prompts)]
        texts = [i for i, prompt in enumerate(given) if isinstance(prompt, str)]
        encoded = self.engine.tokenizer.encode_batch([str(given[i]) for i in texts])
        ids: list[Sequence[int]] = [() if isinstance(prompt, str) else prompt for prompt in given]
        for i, tokens in zip(texts, encoded, strict=True):
            ids[i] = tokens
        return self._run(ids, self._params(params, len(ids)))

    def chat(
        self,
        conversations: Sequence[Sequence[Message]] | Sequence[Message],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[Completion]:
        """Answer one conversation (a list of `{"role": ..., "content": ...}`) or several through the chat template."""
        ids: list[Sequence[int] | RowError] = []
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        for messages in [conversations] if single else conversations:
            try:
                ids.append(self.engine.tokenizer.apply_chat_template(messages, **template_options))
            except RowError as error:
                ids.append(error)
        return self._run(ids, self._params(params, len(ids)))

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams.resolve(self.engine.sampling_defaults)
        if isinstance(params, SamplingParams):
            return [params] * count
        if isinstance(params, Mapping):
            raise TypeError(f"params: expected SamplingParams(**{dict(params)!r}), or a list of them")
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling params for {count} prompts")
        return list(params)

    def score(
        self, contexts: Sequence[Prompt], continuations: Sequence[Prompt], *, top_logprobs: int = 0
    ) -> list[Score]:
        """How likely each continuation is after its context; nothing is generated.

        Contexts that rows share are computed once. Where both are texts, they are tokenised as one, and spaces at the
        end of the context count to the continuation.

        Args:
            top_logprobs: how many of the likeliest tokens to report at each position.

        Raises:
            ValueError: not as many contexts as continuations, an empty continuation, or one without a token before it.
            RowError: a row that the model cannot run, such as one longer than its context length.
        """
        if len(contexts) != len(continuations):
            raise ValueError(f"{len(contexts)} contexts for {len(continuations)} continuations")
        pairs = [
            self._pair(_plain(context), _plain(continuation))
            for context, continuation in zip(contexts, continuations, strict=True)
        ]
        params = SamplingParams(max_tokens=0, prompt_logprobs=max(1, top_logprobs))
        requests = [
            Request(row, [*context, *continuation], params, score_from=len(context))
            for row, (context, continuation) in enumerate(pairs)
        ]
        scores = []
        for answer in self._answers(requests):
            if answer.error is not None:
                raise RowError(answer.error_type or "error", f"row {answer.request_id}: {answer.error}")
            assert answer.prompt_logprobs is not None
            scores.append(Score.of(answer.prompt_logprobs))
        return scores

    def _pair(self, context: str | Sequence[int], continuation: str | Sequence[int]) -> tuple[list[int], list[int]]:
        tokenizer = self.engine.tokenizer
        if isinstance(context, str) and isinstance(continuation, str):
            kept = context.rstrip()
            whole = tokenizer.encode(context + continuation)
            ids = tokenizer.encode(kept)
            pair = ids, whole[len(ids) :]
        else:
            pair = (
                tokenizer.encode(context) if isinstance(context, str) else list(context),
                tokenizer.encode_plain(continuation) if isinstance(continuation, str) else list(continuation),
            )
        if not all(pair):
            raise ValueError("a continuation and at least one token before it are needed for a score")
        return pair

    def _run(self, prompts: Sequence[Sequence[int] | RowError], params: list[SamplingParams]) -> list[Completion]:
        rows: list[Request | Completion] = [
            Completion.failed(row, prompt)
            if isinstance(prompt, RowError)
            else Request(row, prompt, options, noise_key(options.seed, self._run_seed, row))
            for row, (prompt, options) in enumerate(zip(prompts, params, strict=True))
        ]
        return self._answers(rows)

    def _answers(self, rows: Sequence[Request | Completion]) -> list[Completion]:
        """Run what is a request; the completions in order of their `request_id`."""
        answers = [row for row in rows if isinstance(row, Completion)]
        if self._closed:
            raise RuntimeError("this LLM is closed")
        for row in rows:
            if isinstance(row, Request):
                self.engine.add(row)
        while self.engine.has_unfinished():
            answers += self.engine.step()
        return sorted(answers, key=lambda answer: answer.request_id)

    def close(self) -> None:
        """Free the model and its cache."""
        self._closed = True
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
