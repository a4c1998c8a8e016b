"""Outputs that follow a structure: JSON schema, regular expression or grammar, by llguidance.

A `Grammars` is made once per model and may be asked by several threads; it compiles each structure once and hands out
matchers, one for each output that follows it. llguidance is imported with the first structure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from paged_infer.text.tokenizer import Tokenizer
from paged_infer.types import RowError, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_COMPILED_KEPT = 256
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the parts of JSON; bounded, or a model that likes whitespace would never come to an end."""


class Grammars:
    """The structures that outputs of one model follow.

    Args:
        vocab_size: width of the masks, in tokens.
        eos_token_ids: what ends an output where its structure is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._library: tuple[LLTokenizer, LLExecutor] | None = None

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return -(-self._vocab_size // 32)

    def matcher(self, params: SamplingParams) -> LLMatcher | None:
        """A new matcher at the start of the output; None where it may be anything.

        Raises `RowError("invalid_parameter")` naming the field when the structure cannot be compiled.
        """
        kind = next((name for name in _KINDS if getattr(params, name) is not None), None)
        if kind is None:
            return None
        key = kind, str(getattr(params, kind))
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            else:
                self._compiled[key] = self._compile(*key)
                if len(self._compiled) > _COMPILED_KEPT:
                    self._compiled.popitem(last=False)
            return self._compiled[key].deep_copy()

    def is_complete(self, params: SamplingParams, token_ids: Sequence[int]) -> bool | None:
        """Whether an output is all that its structure asks for; None where it has none."""
        matcher = self.matcher(params)
        if matcher is None:
            return None
        return bool(matcher.consume_tokens(list(token_ids)) and matcher.is_accepting())

    def masks(self, wanted: Sequence[tuple[LLMatcher, int, list[int]]], num_rows: int) -> np.ndarray:
        """Which tokens may come next: [num_rows, num_words] int32, a bit for each token.

        Args:
            wanted: (matcher, first row, draft): the row of the matcher's own position, and one after each draft token.
                Rows behind a token that does not fit are left open: nobody gets there.
        """
        masks = np.full((num_rows, self.num_words), -1, np.int32)
        _, executor = self._loaded()
        place = masks.ctypes.data, masks.shape[1] * 4, num_rows
        alone = [(matcher, row) for matcher, row, draft in wanted if not draft]
        if alone:
            executor.unsafe_compute_mask_ptr(alone, *place)
        drafted = [item for item in wanted if item[2]]
        if drafted:
            executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        return masks

    def _compile(self, kind: str, text: str) -> LLMatcher:
        matchers = _matchers()
        tokenizer, _ = self._loaded()
        try:
            grammar = _grammar(kind, text)
        except ValueError as error:
            raise _refused(kind, error) from None
        matcher = matchers(tokenizer, grammar)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return matcher

    def _loaded(self) -> tuple[LLTokenizer, LLExecutor]:
        if self._library is None:
            from llguidance import LLExecutor, LLTokenizer

            if not self._eos:
                raise RowError("unsupported_option", "structured output needs a model that has an end token")
            tokenizer = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos)
            self._library = tokenizer, LLExecutor()
        return self._library


_KINDS = ("json_schema", "regex", "grammar")


def check_structure(params: SamplingParams) -> None:
    """Raise `RowError` when the structure is none, as far as that can be said without a model."""
    for kind in _KINDS:
        text = getattr(params, kind)
        if text is not None:
            matchers = _matchers()
            try:
                if problem := matchers.validate_grammar(_grammar(kind, text)):
                    raise _refused(kind, problem)
            except ValueError as error:
                raise _refused(kind, error) from None


def _matchers() -> type[LLMatcher]:
    """llguidance's own. Raises `RowError` where it is not installed."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        message = "structured output needs llguidance: pip install llguidance"
        raise RowError("unsupported_option", message) from None
    return LLMatcher


def _grammar(kind: str, text: str) -> str:
    """In llguidance's own form. Raises ValueError."""
    matchers = _matchers()
    if kind == "json_schema":
        return matchers.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
    return matchers.grammar_from_regex(text) if kind == "regex" else matchers.grammar_from_lark(text)


def _refused(kind: str, reason: object) -> RowError:
    return RowError("invalid_parameter", f"{kind}: {' '.join(str(reason).split())}", kind)
