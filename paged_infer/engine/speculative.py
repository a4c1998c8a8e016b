"""Speculation: guesses at the next tokens of a sequence, made from what it and finished rows already said.

A guess costs a place in the next batch and never changes a result: a draft counts only where the model's own draw, with
that position's noise, is the same token. So what matters here is being right often and cheap always. Pure Python.

A `Proposer` guesses; `Speculator` decides how many guesses are worth their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from paged_infer.engine.sequence import Sequence


class Proposer(Protocol):
    """Guesses how sequences go on."""

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        """For each (sequence, most) up to `most` tokens that may follow its `token_ids`."""
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended; all its tokens are known."""
        ...


def _continued(tokens: list[int], start: int, most: int) -> list[int]:
    """What follows place `start`, and past the end what follows if the text repeats itself from there."""
    found = tokens[start : start + most]
    period = len(tokens) - start
    while len(found) < most:
        found.append(found[len(found) - period])
    return found


class NGramProposer:
    """Prompt lookup: what followed the latest earlier occurrence of the last n tokens, the longest n first."""

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[int, tuple[dict[tuple[int, ...], int], list[int]]] = {}

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._guess(seq, most) for seq, most in wanted]

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        tokens = seq.token_ids
        following, indexed = self._indices.setdefault(seq.seq_id, ({}, [0]))
        for end in range(indexed[0] + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    following[tuple(tokens[end - size : end])] = end
        indexed[0] = len(tokens) - 1
        for size in self._sizes:
            start = following.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                return _continued(tokens, start, most)
        return []

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.seq_id, None)


class SuffixAutomaton:
    """All substrings of a growing collection of texts, after Blumer et al. (1985): two states a token at most.

    A state stands for substrings that end at the same places; `ends` has the first of these places (as an index into
    `tokens` of what follows), `lengths` the length of the longest of these substrings, `links` the state of its longest
    suffix that ends at other places, too.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lengths = [0]
        self.links = [-1]
        self.ends = [0]
        self._next: list[dict[int, int]] = [{}]
        self._last = 0

    def append(self, token: int) -> None:
        """Make the present text one token longer."""
        self.tokens.append(token)
        known = self._next[self._last].get(token)
        if known is not None:  # an earlier text began like this one
            self._last = self._split(self._last, token, known)
            return
        state = self._add(self.lengths[self._last] + 1, {}, len(self.tokens))
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self.links[at]
        self.links[state] = 0 if at < 0 else self._split(at, token, self._next[at][token])
        self._last = state

    def end_text(self) -> None:
        """Begin another text: no substring spans the border."""
        self.tokens.append(_BORDER)
        self._last = 0

    def repeated(self) -> tuple[int, int]:
        """Of a single text: length of its longest suffix that occurs earlier, too, and where that first ended."""
        link = self.links[self._last]
        return (self.lengths[link], self.ends[link]) if link > 0 else (0, 0)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From the longest suffix of a stream that is a substring here, to that of the stream with one more token.

        A suffix is (state, length), at first (0, 0); it stays good while texts are added.
        """
        while token not in self._next[state]:
            state = self.links[state]
            if state < 0:
                return 0, 0
            length = min(length, self.lengths[state])
        state, length = self._next[state][token], length + 1
        while length <= self.lengths[self.links[state]]:
            state = self.links[state]
        return state, length

    def following(self, end: int, most: int) -> list[int]:
        """Up to `most` tokens after a place, within its text."""
        tokens = self.tokens[end : end + most]
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens

    def _split(self, state: int, token: int, target: int) -> int:
        """The state of (longest substring of `state`) + token, which so far may be one of several in `target`."""
        length = self.lengths[state] + 1
        if self.lengths[target] == length:
            return target
        copy = self._add(length, dict(self._next[target]), self.ends[target])
        self.links[copy] = self.links[target]
        self.links[target] = copy
        at = state
        while at >= 0 and self._next[at].get(token) == target:
            self._next[at][token] = copy
            at = self.links[at]
        return copy

    def _add(self, length: int, following: dict[int, int], end: int) -> int:
        self.lengths.append(length)
        self.links.append(-1)
        self.ends.append(end)
        self._next.append(following)
        return len(self.lengths) - 1


@dataclass(slots=True)
class _Reading:
    """How far a sequence was read into its own automaton, and where its end stands in the shared one."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    library: SuffixAutomaton | None = None
    state: int = 0
    length: int = 0


class SuffixProposer:
    """What followed the longest suffix of the row that occurred before: in the row itself, or in the outputs of rows
    that have finished.

    Args:
        shortest: matches of fewer tokens are no reason to guess.
        library_tokens: output tokens of finished rows that are kept; when there are more, keeping starts anew.
    """

    def __init__(self, shortest: int = 2, library_tokens: int = 100_000) -> None:
        self._shortest = shortest
        self._library_tokens = library_tokens
        self._library = SuffixAutomaton()
        self._readings: dict[int, _Reading] = {}

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._guess(seq, most) for seq, most in wanted]

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        reading = self._readings.setdefault(seq.seq_id, _Reading())
        own = reading.own
        if reading.library is not self._library:
            reading.library, reading.state, reading.length = self._library, 0, 0
            for token in seq.token_ids[max(0, len(own.tokens) - _REREAD) : len(own.tokens)]:
                reading.state, reading.length = self._library.advance(reading.state, reading.length, token)
        for token in seq.token_ids[len(own.tokens) :]:
            own.append(token)
            reading.state, reading.length = self._library.advance(reading.state, reading.length, token)
        length, end = own.repeated()
        if max(length, reading.length) < self._shortest:
            return []
        if reading.length > length:
            return self._library.following(self._library.ends[reading.state], most)
        return _continued(own.tokens, end, most)

    def forget(self, seq: Sequence) -> None:
        self._readings.pop(seq.seq_id, None)
        if len(self._library.tokens) > self._library_tokens:
            self._library = SuffixAutomaton()
        for token in seq.output_token_ids:
            self._library.append(token)
        self._library.end_text()


class StepCost:
    """How long a step takes as a function of its tokens: `fixed + per_token * tokens`, by least squares over the recent
    past. Before there is one, a step costs as much as `ratio` tokens do.
    """

    def __init__(self, ratio: float = 16.0, memory: float = 0.99, limit: float = 1000.0) -> None:
        self._ratio = ratio
        self._memory = memory
        self._limit = limit
        self._sums = [0.0] * 5  # of 1, x, y, xx, xy

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took that long."""
        for i, value in enumerate((1.0, tokens, seconds, tokens * tokens, tokens * seconds)):
            self._sums[i] = self._sums[i] * self._memory + value

    @property
    def ratio(self) -> float:
        """fixed / per_token: what a step costs beside its tokens, in tokens."""
        count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        if count < 20 or spread < 0.01 * x * x:  # too few, or too much alike
            return self._ratio
        per_token = (count * xy - x * y) / spread
        fixed = (y - per_token * x) / count
        if per_token <= 0:
            return self._limit
        return min(max(fixed / per_token, 0.0), self._limit)


@dataclass(slots=True)
class SpeculationStats:
    """Counters of a run: rounds with drafts, tokens drafted, and of those accepted.

    `tokens_per_round` is what a sequence gains in a round on average, its own draw included.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens of those drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0


class _Odds:
    """The chance that the next draft token of a sequence is right, given that those before it were."""

    __slots__ = ("hits", "trials")

    def __init__(self, prior: float) -> None:
        self.hits, self.trials = 2.0 * prior, 2.0

    def relax(self, prior: float) -> None:
        """A step without a draft: what was learned fades, so that there will be another try."""
        self.hits += 0.02 * (2.0 * prior - self.hits)
        self.trials += 0.02 * (2.0 - self.trials)

    def add(self, accepted: int, drafted: int) -> None:
        self.hits = 0.8 * self.hits + accepted
        self.trials = 0.8 * self.trials + min(accepted + 1, drafted)

    @property
    def chance(self) -> float:
        return self.hits / self.trials


class Speculator:
    """Hands out drafts as long as they are expected to be worth their cost.

    With E tokens expected of a step that costs as much as C tokens, one more token in it pays where its chance of being
    accepted is above E / C. So drafts are long where guesses were right, and there are none at all where the batch is
    large enough to keep the processor busy by itself.

    Args:
        most: draft tokens of a sequence in one step.
        margin: how much better than break-even a token must look.
        adaptive: False hands out all that the proposer has, up to `most`.
    """

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        *,
        adaptive: bool = True,
        margin: float = 1.2,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.stats = SpeculationStats()
        self.cost = StepCost()
        self._proposer = proposer
        self._most = most
        self._adaptive = adaptive
        self._margin = margin
        self._clock = clock
        self._odds: dict[int, _Odds] = {}
        self._started: float | None = None

    def drafts(self, sequences: SequenceOf[Sequence], num_other_tokens: int) -> list[list[int]]:
        """A draft for each sequence that is to decode, maybe empty, in a step that runs so many other tokens."""
        self._started = self._clock()
        lengths = [self._most] * len(sequences) if not self._adaptive else self._lengths(sequences, num_other_tokens)
        wanted = [
            (seq, min(length, seq.max_output_tokens - seq.num_output_tokens - 1))
            for seq, length in zip(sequences, lengths, strict=True)
        ]
        asked = [(seq, most) for seq, most in wanted if most > 0]
        found = iter(self._proposer.propose(asked) if asked else ())
        return [next(found) if most > 0 else [] for _, most in wanted]

    def _lengths(self, sequences: SequenceOf[Sequence], num_other_tokens: int) -> list[int]:
        """How long a draft of each sequence may be to pay."""
        prior = self._prior
        expected = float(len(sequences) + num_other_tokens)  # a prompt's token is worth as much as an output's
        cost = self.cost.ratio + expected
        lengths: list[int] = []
        for seq in sequences:
            odds = self._odds.get(seq.seq_id)
            chance = prior if odds is None else odds.chance
            length, pays = 0, chance
            while length < self._most and pays * cost > self._margin * expected:
                length += 1
                cost += 1
                expected += pays
                pays *= chance
            if not length and odds is not None:
                odds.relax(prior)
            lengths.append(length)
        return lengths

    @property
    def _prior(self) -> float:
        """What to expect of a sequence that was not tried yet: what the others show, with hope at first, never none."""
        stats = self.stats
        return max(0.2, (stats.num_accepted_tokens + 8.0) / (stats.num_draft_tokens + 10.0))

    def executed(self, num_tokens: int) -> None:
        """The step that drafts were last asked for has run, with so many tokens."""
        if self._started is not None:
            self.cost.add(num_tokens, self._clock() - self._started)
            self._started = None

    def accepted(self, seq: Sequence, num_accepted: int, num_drafted: int) -> None:
        """So many tokens of a sequence's draft were what the model drew."""
        self.stats.num_rounds += 1
        self.stats.num_draft_tokens += num_drafted
        self.stats.num_accepted_tokens += num_accepted
        self._odds.setdefault(seq.seq_id, _Odds(self._prior)).add(num_accepted, num_drafted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._odds.pop(seq.seq_id, None)
        self._proposer.forget(seq)


_BORDER = -1
_REREAD = 64
"""Tokens at the end of a sequence that are looked up anew when the library was replaced."""
