"""Stop strings: where an output's text ends because the user said so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paged_infer.text.detokenizer import IncrementalDetokenizer
from paged_infer.text.tokenizer import Tokenizer, well_formed


@dataclass(frozen=True, slots=True)
class StopMatch:
    """How an output ended.

    Attributes:
        text: the output's text, up to the stop string, or with it if it is to be included.
        stop: the stop string found.
        num_tokens: output tokens up to and including the one that completed the stop string.
    """

    text: str
    stop: str
    num_tokens: int


class StopChecker:
    """Watches one output for stop strings, token by token, across token borders; the prompt's text never counts.

    The first token whose text completes a stop string ends the output. If it completes several, the one that starts
    earliest wins, and of those with the same start the shortest. `min_tokens` holds stop strings back: one that is
    already complete after `min_tokens - 1` tokens is passed over.

    Each token costs as much as its own text and the longest stop string are long, whatever came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._stops = [well_formed(stop) for stop in stops]
        self._include = include_stop_str
        self._min_tokens = min_tokens
        self._reach = max(map(len, self._stops), default=1) - 1
        self._pieces: list[str] = []
        self._length = 0
        self._recent = ""
        self._passed_over = 0
        self._num_tokens = 0

    def add(self, token: int) -> StopMatch | None:
        """Take the next output token. After a match nothing may be added."""
        new = self._detokenizer.add([token])
        pending = self._detokenizer.pending
        self._num_tokens += 1
        self._pieces.append(new)
        start = self._length - len(self._recent)
        self._length += len(new)
        window = self._recent + new + pending
        if self._num_tokens < self._min_tokens:
            self._passed_over = self._length + len(pending)
        elif new or pending:
            found = self._find(window, self._passed_over - start)
            if found is not None:
                at, stop = found
                text = "".join(self._pieces) + pending
                end = start + at + (len(stop) if self._include else 0)
                return StopMatch(text[:end], stop, self._num_tokens)
        self._recent = (self._recent + new)[-self._reach :] if self._reach else ""
        return None

    def _find(self, window: str, passed_over: int) -> tuple[int, str] | None:
        """Position and string of the match to act on, among those that end after `passed_over` characters."""
        found = [
            (at, len(stop), stop)
            for stop in self._stops
            if (at := window.find(stop, max(0, passed_over - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, _, stop = min(found)
        return at, stop
