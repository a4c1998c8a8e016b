"""Beam search over one prompt, decision by decision as Hugging Face's `generate` takes it. Pure Python, no blocks.

Every step, each running beam brings its likeliest continuations. The best of all of them, by the sum of their tokens'
log-probabilities, fall into those that end here and those that go on. A continuation that ends counts as finished only
if it is among the `width` best: the others are there so that `width` beams can go on whatever ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Candidates = tuple[Sequence[int], Sequence[float]]
"""Token ids and their log-probabilities, falling."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output; `score` is its log-probability over (number of tokens) ** length_penalty."""

    token_ids: list[int]
    score: float


class BeamSearch:
    """Which beams go on and which outputs win.

    Args:
        width: beams, and finished outputs that are kept.
        ends: token ids that finish an output.
        max_tokens: output tokens after which everything is finished.
        length_penalty, early_stopping: see `SamplingParams`.
    """

    def __init__(
        self,
        width: int,
        ends: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> None:
        self.finished: list[Hypothesis] = []
        self._width = width
        self._ends = frozenset(ends)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._scores = [0.0]
        self._num_tokens = 0

    @property
    def num_candidates(self) -> int:
        """How many continuations each beam must bring, and how many are looked at in all."""
        return max(2, 1 + len(self._ends)) * self._width

    def advance(self, outputs: Sequence[list[int]], candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Take the continuations of all running beams; return the beams that run on as (index of parent, token).

        Args:
            outputs: the output tokens of each beam so far.
            candidates: the continuations of each beam.

        Returns:
            The best first; empty when the search is over and `finished` is the result, the best first.
        """
        pool = sorted(
            (-(score + logprob), beam, token)
            for beam, (score, (ids, logprobs)) in enumerate(zip(self._scores, candidates, strict=True))
            for token, logprob in zip(ids, logprobs, strict=True)
        )[: self.num_candidates]
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_tokens
        running: list[tuple[float, int, int]] = []
        new: list[Hypothesis] = []
        for place, (cost, beam, token) in enumerate(pool):
            if not is_last and token not in self._ends:
                running.append((cost, beam, token))
            elif place < self._width:
                new.append(Hypothesis([*outputs[beam], token], -cost / self._num_tokens**self._length_penalty))
        running = running[: self._width]
        self.finished = sorted([*self.finished, *new], key=lambda hypothesis: -hypothesis.score)[: self._width]
        self._scores = [-cost for cost, _, _ in running]
        if not running or (len(self.finished) == self._width and not self._can_improve()):
            return []
        return [(beam, token) for _, beam, token in running]

    def _can_improve(self) -> bool:
        """Whether a running beam may replace one of the finished outputs, of which there are as many as are kept."""
        if self._early_stopping is True:
            return False
        longest = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if longest else self._num_tokens
        return self._scores[0] / length**self._length_penalty > self.finished[-1].score
