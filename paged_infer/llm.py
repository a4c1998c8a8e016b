"""The Python API: a model and the engine behind two calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from paged_infer.config import DEMO_MODEL, EngineConfig
from paged_infer.engine.build import build_engine
from paged_infer.engine.engine import Engine
from paged_infer.types import Completion, Request, RowError, SamplingParams, noise_key

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


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
        self.engine: Engine = build_engine(config)
        self._run_seed = config.seed if config.seed is not None else secrets.randbits(63)

    def generate(
        self, prompts: Iterable[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete prompts: texts, or token ids that are used as they are.

        Args:
            prompts: one prompt or several.
            params: one for all or one for each; None = the model's own defaults.

        Returns:
            One completion a prompt, in order. A prompt that cannot be answered yields a completion whose
            `finish_reason` is "error".
        """
        given: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = [i for i, prompt in enumerate(given) if isinstance(prompt, str)]
        encoded = self.engine.tokenizer.encode_batch([str(given[i]) for i in texts])
        ids: list[Sequence[int]] = [() if isinstance(prompt, str) else prompt for prompt in given]
        for i, tokens in zip(texts, encoded, strict=True):
            ids[i] = tokens
        return self._run(ids, self._params(params, len(ids)))

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[Completion]:
        """Answer conversations (lists of `{"role": ..., "content": ...}`) through the model's chat template."""
        ids: list[Sequence[int] | RowError] = []
        for messages in conversations:
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
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling params for {count} prompts")
        return list(params)

    def _run(self, prompts: Sequence[Sequence[int] | RowError], params: list[SamplingParams]) -> list[Completion]:
        answers: dict[int, Completion] = {}
        for row, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
            if isinstance(prompt, RowError):
                answers[row] = Completion.failed(row, prompt)
            else:
                self.engine.add(Request(row, prompt, options, noise_key(options.seed, self._run_seed, row)))
        while self.engine.has_unfinished():
            for completion in self.engine.step():
                answers[completion.request_id] = completion
        return [answers[row] for row in range(len(prompts))]

    def close(self) -> None:
        """Free the model and its cache."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
