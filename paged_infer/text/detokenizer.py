"""The text of an output: decode(prompt + output) less what decode(prompt) already shows.

The difference is taken of whole-sequence decodes, by removing their common start. So a space that belongs to the first
output token stays, a character whose bytes are split between prompt and output appears once, complete, and nothing of
the prompt is repeated.

Neither function decodes the whole prompt. `_tail` keeps its last few tokens, which is enough because every decoder in
use is local, in one of two ways:

- *Byte-level*: the tokens' bytes are joined and read as UTF-8. A byte that does not continue a character always starts
  a new unit, so decoding may begin at any such byte. Before the first one in the tail, stray continuation bytes decode
  to the same replacement characters with and without the output, and fall to the common start. If the tail has no
  other bytes, then no character can be pending at its end, for a pending one has at most two of them.
- *Byte fallback* (SentencePiece): a run of byte tokens is read as a whole, so the tail must not begin inside one;
  `_tail` extends it to the run's start. The leading space that such decoders strip is stripped from both texts.

Special tokens decode to nothing and are left out beforehand, lest a tail consist of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paged_infer.text.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens of context. Each yields a byte or more, and a pending character has three bytes at most."""

_LONGEST_WINDOW = 16
_REPLACEMENT = "\ufffd"


def output_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
    """The text that `output_ids` add after `prompt_ids`, special tokens left out.

    Characters that are still incomplete at the end are U+FFFD, as in any decode of these ids.
    """
    tail = _tail(tokenizer, prompt_ids)
    before = tokenizer.decode(tail)
    after = tokenizer.decode([*tail, *output_ids])
    return after[_common_start(before, after) :]


def output_texts(tokenizer: Tokenizer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[str]:
    """`output_text` of many (prompt ids, output ids), decoded on the tokenizer library's threads."""
    tails = [_tail(tokenizer, prompt) for prompt, _ in pairs]
    befores = tokenizer.decode_batch(tails)
    afters = tokenizer.decode_batch([[*tail, *output] for tail, (_, output) in zip(tails, pairs, strict=True)])
    return [after[_common_start(before, after) :] for before, after in zip(befores, afters, strict=True)]


class IncrementalDetokenizer:
    """Gives out text as tokens arrive, each character as soon as no later token can change it.

    What `add` and finally `flush` return, joined, is `output_text` of all the tokens; the cost is linear in their
    number.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_settled = 0
        self._run = bytearray()
        self._take(_tail(tokenizer, prompt_ids))
        text = tokenizer.decode(self._window)
        self._shown = len(self._settled_text())
        self._prompt_rest = text[self._shown :]

    @property
    def pending(self) -> str:
        """Whole characters at the end that a later token might still change: those of an open run of byte tokens."""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[_common_start(text, self._prompt_rest) :]

    def add(self, output_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become certain, maybe none."""
        before = self._num_settled
        self._take(output_ids)
        if self._num_settled == before:
            return ""
        text = self._settled_text()
        new = text[self._shown :]
        self._shown = len(text)
        if self._num_settled > _LONGEST_WINDOW:
            kept = _tail(self._tokenizer, self._window[: self._num_settled])
            self._window[: self._num_settled] = kept
            self._num_settled = len(kept)
            self._shown = len(self._settled_text())
        return self._after_prompt(new)

    def flush(self) -> str:
        """The rest of the text, now that no token follows. Nothing may be added afterwards."""
        return self._after_prompt(self._tokenizer.decode(self._window)[self._shown :])

    def _take(self, ids: Sequence[int]) -> None:
        """Put tokens into the window; those before a run of byte tokens at its end are settled."""
        for token in ids:
            if token in self._tokenizer.special_ids:
                continue
            self._window.append(token)
            byte = self._tokenizer.fallback_bytes.get(token)
            if byte is None:
                self._num_settled = len(self._window)
                self._run.clear()
            else:
                self._run.append(byte)

    def _settled_text(self) -> str:
        """Text of the settled tokens without a character at its end that may be incomplete."""
        text = self._tokenizer.decode(self._window[: self._num_settled])
        return text if self._tokenizer.fallback_bytes else text.removesuffix(_REPLACEMENT)

    def _after_prompt(self, new: str) -> str:
        """Drop what the prompt's own decode already showed of the first characters."""
        same = _common_start(new, self._prompt_rest)
        self._prompt_rest = self._prompt_rest[same:] if same == len(new) else ""
        return new[same:]


def _tail(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The last tokens of a sequence, enough for the text of what follows; special ones left out."""
    tail: list[int] = []
    for token in reversed(ids):
        if token in tokenizer.special_ids:
            continue
        tail.append(token)
        if len(tail) >= _CONTEXT and token not in tokenizer.fallback_bytes:
            break
    tail.reverse()
    return tail


def _common_start(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
