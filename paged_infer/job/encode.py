"""From prompts to token ids, a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paged_infer.io.prompts import Prompt
from paged_infer.types import RowError, token_ids

if TYPE_CHECKING:
    from paged_infer.text.tokenizer import Tokenizer

PROBE_CHARS_PER_TOKEN = 16
"""Texts longer than this many characters for every token of the context are probed by their beginning first."""


class PromptEncoder:
    """Tokenises prompts. A text that is far too long costs no more than one that just fits.

    Args:
        max_model_len: longest sequence, in tokens; a text whose beginning already has more is refused unread.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._probe_chars = PROBE_CHARS_PER_TOKEN * max_model_len

    def encode(self, prompts: Sequence[Prompt]) -> list[Sequence[int] | RowError]:
        """Token ids of each prompt, or why it has none. Raises nothing for a bad prompt."""
        encoded: list[Sequence[int] | RowError] = []
        texts: dict[int, str] = {}
        for i, prompt in enumerate(prompts):
            try:
                encoded.append(self._one(prompt, i, texts))
            except RowError as error:
                encoded.append(error)
        for i, ids in zip(texts, self._tokenizer.encode_batch(list(texts.values())), strict=True):
            encoded[i] = ids
        return encoded

    def _one(self, prompt: Prompt, i: int, texts: dict[int, str]) -> Sequence[int]:
        if prompt.token_ids is not None:
            return token_ids(prompt.token_ids, "prompt_token_ids")
        for text in prompt.texts():
            self._refuse_hopeless(text)
        if prompt.messages is not None:
            return self._tokenizer.apply_chat_template(prompt.messages)
        texts[i] = prompt.text or ""
        return ()

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
