"""lighteval: the engine as its custom model.

    paged-infer eval lighteval -- MODEL[,NAME=VALUE...] TASKS [OPTIONS]

which is `lighteval custom MODEL,... THIS_FILE TASKS`. `NAME=VALUE` are fields of `paged_infer.config.EngineConfig`.
lighteval takes the first model class it finds in the file, so there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from lighteval.models.abstract_model import LightevalModel
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc, SamplingMethod
from lighteval.utils.cache_management import SampleCache, cached
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paged_infer.config import ConfigError
from paged_infer.llm import LLM
from paged_infer.models.source import resolve_model
from paged_infer.types import RowError, SamplingParams

DEFAULT_MAX_TOKENS = 256

_GENERATION_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_tokens": "stop",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
    **{name: name for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")},
}


class PagedInferModel(LightevalModel):
    """A model for `lighteval custom`.

    Args:
        config: its `model_name` is `MODEL[,NAME=VALUE...]`; `generation_parameters` win over what tasks say.

    Raises:
        ConfigError: unknown or impossible settings.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        model, settings = parse_name(config.model_name)
        self.llm = LLM(model, **settings)
        folder = self.llm.config.tokenizer or resolve_model(model).tokenizer_folder()
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.use_chat_template = self._tokenizer.chat_template is not None
        self.prompt_manager = PromptManager(self.use_chat_template, self._tokenizer, config.system_prompt)
        # The cache appends the name to a path, which an absolute one would replace.
        self._cache = SampleCache(config.model_copy(update={"model_name": config.model_name.lstrip("/")}))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        """A rendered chat brings its own."""
        return not self.use_chat_template

    @property
    def max_length(self) -> int:
        return self.llm.max_model_len

    def cleanup(self) -> None:
        self.llm.close()

    @cached(SamplingMethod.GENERATIVE)
    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Answers, `num_samples` for each document; contexts lose their beginning where they are too long."""
        prompts = [self.prompt_manager.prepare_prompt(doc) for doc in docs]
        options = [self._params(doc) for doc in docs]
        ids = []
        for prompt, params in zip(prompts, options, strict=True):
            room = self.max_length - params.max_tokens
            if room < 1:
                raise ValueError(f"{params.max_tokens} tokens to generate leave no room in {self.max_length}")
            ids.append(self.tok_encode(prompt)[-room:])
        answers: list[ModelResponse] = [
            ModelResponse(input=prompt, input_tokens=tokens) for prompt, tokens in zip(prompts, ids, strict=True)
        ]
        stream = self.llm.stream(ids, options, lookahead=max(1, len(ids)))
        for done in tqdm(stream, total=sum(params.n for params in options), disable=self.disable_tqdm):
            if done.error is not None:
                raise RowError(done.error_type or "error", f"document {done.request_id}: {done.error}")
            answers[done.request_id].text.append(done.text)
            answers[done.request_id].output_tokens.append(done.token_ids)
        return answers

    def _params(self, doc: Doc) -> SamplingParams:
        given = self.config.generation_parameters.model_dump(exclude_none=True)
        named = {ours: given[theirs] for theirs, ours in _GENERATION_NAMES.items() if theirs in given}
        asked = {
            "max_tokens": doc.generation_size or DEFAULT_MAX_TOKENS,
            "stop": [] if self.use_chat_template else [text for text in doc.stop_sequences or [] if text],
            "n": doc.num_samples,
        }
        return SamplingParams.resolve(self.llm.engine.sampling_defaults, asked, named)

    @cached(SamplingMethod.LOGPROBS)
    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-likelihood of every choice after its context, and after the unconditioned query where there is one."""
        prompts = [self.prompt_manager.prepare_prompt(doc) for doc in docs]
        pairs: list[tuple[list[int], list[int]]] = []
        for doc, prompt in zip(docs, prompts, strict=True):
            for context in [prompt] if doc.unconditioned_query is None else [prompt, doc.unconditioned_query]:
                contexts, choices = self.tok_encode_pair(context, doc.choices, pairwise=True)
                pairs += zip(contexts, choices, strict=True)
        scores = self._scores(pairs)
        found, given = iter(scores), iter(pairs)
        answers = []
        for doc, prompt in zip(docs, prompts, strict=True):
            own = [(next(given), *next(found)) for _ in doc.choices]
            bare = [] if doc.unconditioned_query is None else [(next(given), next(found)[0]) for _ in doc.choices]
            answers.append(
                ModelResponse(
                    input=prompt,
                    input_tokens=own[0][0][0],
                    output_tokens=[choice for (_, choice), _, _ in own],
                    logprobs=[logprob for _, logprob, _ in own] + [logprob for _, logprob in bare],
                    argmax_logits_eq_gold=[greedy for _, _, greedy in own],
                    unconditioned_logprobs=[logprob for _, logprob in bare] or None,
                )
            )
        return answers

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-likelihood of whole texts, in windows of the context length.

        Not cached: lighteval's cache takes such answers for those of `loglikelihood`, and returns none of them.
        """
        texts = [self.prompt_manager.prepare_prompt(doc) + "".join(doc.choices[:1]) for doc in docs]
        ids = [self.tok_encode(text, add_special_tokens=False) for text in texts]
        windows = [list(rolling_windows(tokens, self._prefix_token_id, self.max_length)) for tokens in ids]
        scores = iter(self._scores([pair for pairs in windows for pair in pairs]))
        return [
            ModelResponse(
                input=text,
                input_tokens=tokens[:1],
                output_tokens=[tokens],
                logprobs=[sum(next(scores)[0] for _ in pairs)],
            )
            for text, tokens, pairs in zip(texts, ids, windows, strict=True)
        ]

    @property
    def _prefix_token_id(self) -> int:
        tokenizer = self._tokenizer
        return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def _scores(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        room = self.max_length + 1
        continuations = [continuation for _, continuation in pairs]
        contexts = [
            ([*context] or [self._prefix_token_id])[-max(1, room - len(continuation)) :]
            for context, continuation in pairs
        ]
        order = sorted(range(len(pairs)), key=lambda i: contexts[i] + continuations[i])
        scores = self.llm.stream_scores([contexts[i] for i in order], [continuations[i] for i in order])
        answers = [(0.0, False)] * len(pairs)
        for row, score in tqdm(scores, total=len(pairs), disable=self.disable_tqdm):
            answers[order[row]] = score.logprob, score.is_greedy
        return answers


def parse_name(name: str) -> tuple[str, dict[str, Any]]:
    """`MODEL,NAME=VALUE,...` → model and settings, whose values are read as in YAML."""
    model, *settings = name.split(",")
    pairs = [setting.partition("=") for setting in settings]
    for key, sign, _ in pairs:
        if not sign:
            raise ConfigError(f"{key!r} in {name!r}: expected NAME=VALUE")
    return model, {key: yaml.safe_load(value) for key, _, value in pairs}


def rolling_windows(tokens: list[int], prefix: int, max_length: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, continuation) pairs that score each token once, the first after `prefix`, and of which each reads at
    most `max_length` tokens; all but the first and last have a single token of context.
    """
    for start in range(0, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        before = [prefix, *tokens[:start]]
        yield before[-max(1, max_length + 1 - (end - start)) :], tokens[start:end]
