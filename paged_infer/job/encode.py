"""From prompts to token ids, a chunk at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from paged_infer.io.prompts import Prompt
from paged_infer.job.config import RunConfig
from paged_infer.types import RowError, SamplingParams, token_ids

if TYPE_CHECKING:
    from paged_infer.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PROBE_CHARS_PER_TOKEN = 16
"""Texts longer than this many characters for every token of the context are probed by one end of them first."""


class PromptEncoder:
    """Tokenises prompts. A text that is far too long costs no more than one that just fits.

    Args:
        max_model_len: longest sequence, in tokens; a text whose beginning already has more is refused unread.
        variables: names that every rendering of the chat template sees.
        split_special_tokens: control tokens spelled out in messages are ordinary text.
        truncate: keep the end of a prompt that is too long, instead of refusing it.
        hint: say once, on standard error, that plain prompts go to a model with a chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        *,
        variables: Mapping[str, Any] | None = None,
        split_special_tokens: bool = False,
        truncate: bool = False,
        hint: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._probe_chars = PROBE_CHARS_PER_TOKEN * max_model_len
        self._variables = dict(variables or {})
        self._split_special_tokens = split_special_tokens
        self._truncate = truncate
        self._hint = hint and tokenizer.has_chat_template

    @classmethod
    def of_job(cls, config: RunConfig, tokenizer: Tokenizer, max_model_len: int) -> Self:
        """The encoder that a job's settings ask for."""
        return cls(
            tokenizer,
            max_model_len,
            variables=config.chat_template_kwargs,
            split_special_tokens=config.split_special_tokens,
            truncate=config.too_long == "truncate-left",
            hint=config.chat is None,
        )

    def encode(self, prompts: Sequence[Prompt]) -> list[Sequence[int] | RowError]:
        """Token ids of each prompt, or why it has none. Raises nothing for a bad prompt."""
        encoded: list[Sequence[int] | RowError] = []
        texts: dict[int, str] = {}
        for i, prompt in enumerate(prompts):
            try:
                encoded.append(self._one(prompt, i, texts))
            except RowError as error:
                encoded.append(error)
        if texts and self._hint:
            self._hint = False
            logger.warning(
                "prompts go to the model as plain text, though it has a chat template: --chat sends them as user "
                "messages, --raw says that plain text is meant"
            )
        for i, ids in zip(texts, self._tokenizer.encode_batch(list(texts.values())), strict=True):
            encoded[i] = ids
        return encoded

    def fit(self, ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The prompt, cut at its left where it is too long and that was asked for.

        What is kept leaves room for `max_tokens`, where that leaves room for a prompt; BOS stays in front.
        """
        limit = self._max_model_len
        if not self._truncate or len(ids) + (params.max_tokens != 0) <= limit:
            return ids
        room = params.max_tokens if params.max_tokens >= 0 else 1
        keep = limit - room if room < limit else limit - 1
        if keep < 1:
            return ids
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[0] == bos and keep > 1:
            return [bos, *ids[len(ids) - keep + 1 :]]
        return ids[len(ids) - keep :]

    def _one(self, prompt: Prompt, i: int, texts: dict[int, str]) -> Sequence[int]:
        if prompt.token_ids is not None:
            return token_ids(prompt.token_ids, "prompt_token_ids")
        if not self._truncate:
            for text in prompt.texts():
                self._refuse_hopeless(text)
        if prompt.messages is not None:
            return self._tokenizer.apply_chat_template(
                prompt.messages,
                split_special_tokens=self._split_special_tokens,
                **{**self._variables, **prompt.variables},
            )
        texts[i] = self._end_of(prompt.text or "") if self._truncate else prompt.text or ""
        return ()

    def _end_of(self, text: str) -> str:
        """As much of a text's end as can matter."""
        end = text[-self._probe_chars :]
        if len(end) == len(text) or len(self._tokenizer.encode(end)) < self._max_model_len + 1:
            return text
        return end

    def _refuse_hopeless(self, text: str) -> None:
        if len(text) <= self._probe_chars:
            return
        beginning = len(self._tokenizer.encode(text[: self._probe_chars]))
        if beginning > self._max_model_len:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(text)} characters, and the first {self._probe_chars} of them already make "
                f"{beginning} tokens, more than max_model_len {self._max_model_len}",
                "prompt",
            )
