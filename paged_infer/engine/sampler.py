"""From logits to tokens: what each sequence asked for, kept in arrays and applied to all logit rows at once.

Knows neither blocks nor batches. A logit row belongs to the sequence in some state row; several may belong to one. What
has gone before the token to choose is a number of tokens in that sequence's history, so a row in the middle of a draft
is a row like any other. The order is: masks (allowed ids, bad words, `min_tokens`), logit bias, penalties, and then the
backend's: temperature, top-k, top-p, min-p, noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from paged_kernels.interface import Backend, PenaltyRows, SamplingRows
from torch import Tensor

from paged_infer.engine.batch import LogprobColumns, NewSequence
from paged_infer.engine.logprobs import LogprobReader
from paged_infer.engine.structured import Grammars
from paged_infer.types import RowError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ARRAYS: dict[str, tuple[type[np.generic], float]] = {
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "noise_key": (np.int64, 0),
    "sample": (np.int32, 0),
}
_PENALTIES = ("repetition", "presence", "frequency")


class _Edits:
    """What one sequence wants changed in its logits beside penalties."""

    def __init__(self, new: NewSequence, matcher: LLMatcher | None, num_words: int) -> None:
        params = new.params
        self.matcher = matcher
        self.min_tokens = params.min_tokens
        self.banned_at_first = np.array(new.banned_until_min_tokens if params.min_tokens else (), np.int64)
        self.banned = np.array([word[0] for word in new.bad_words if len(word) == 1], np.int64)
        self.words = [list(word) for word in new.bad_words if len(word) > 1]
        self.allowed: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            bits = np.zeros(32 * num_words, bool)
            bits[list(params.allowed_token_ids)] = True
            self.allowed = np.packbits(bits, bitorder="little").view(np.int32)
        self.bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float32)

    def __bool__(self) -> bool:
        return bool(
            len(self.banned_at_first)
            or len(self.banned)
            or self.words
            or self.allowed is not None
            or self.matcher is not None
            or len(self.bias)
        )

    def masked(self, position: int, history: np.ndarray) -> np.ndarray:
        """Ids that must not follow `history` as output token `position`."""
        parts = [self.banned]
        if position < self.min_tokens:
            parts.append(self.banned_at_first)
        if self.words:
            ending = [word[-1] for word in self.words if history[1 - len(word) :].tolist() == word[:-1]]
            parts.append(np.array(ending, np.int64))
        return np.concatenate(parts)


@dataclass(slots=True)
class Sampled:
    """A token for each logit row: `token_ids` [R], -1 where `errors` says why; `logprobs` of rows that want them; for
    beams, their `candidates`, in whose place the token means nothing.
    """

    token_ids: np.ndarray
    errors: dict[int, RowError]
    logprobs: dict[int, LogprobColumns]
    candidates: dict[int, tuple[list[int], list[float]]]


class Sampler:
    """Chooses tokens for sequences that live in state rows.

    Args:
        rows: state rows there are.
        grammars: what the outputs of structured rows follow.
        vocab_size: ids below it may be chosen, but for the `undecodable_ids` among them.
        device: where the logits are.
    """

    def __init__(
        self,
        backend: Backend,
        grammars: Grammars,
        *,
        rows: int,
        vocab_size: int,
        undecodable_ids: SequenceOf[int] = (),
        device: str = "cpu",
    ) -> None:
        self._backend = backend
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._holes = torch.tensor(list(undecodable_ids), dtype=torch.int64, device=device)
        self._options = {name: np.full(rows, value, dtype) for name, (dtype, value) in _ARRAYS.items()}
        self._penalties = {name: np.zeros(rows, np.float32) for name in _PENALTIES}
        self._penalised = np.zeros(rows, bool)
        self._num_candidates = np.zeros(rows, np.int32)
        self._num_logprobs = np.full(rows, -1, np.int32)
        self._num_prompt_tokens = np.zeros(rows, np.int32)
        self._edits: dict[int, _Edits] = {}
        self.logprobs = LogprobReader(backend, vocab_size, self._holes)

    def add(self, row: int, new: NewSequence) -> None:
        """Put a sequence into a state row."""
        params, options, penalties = new.params, self._options, self._penalties
        options["temperature"][row] = params.temperature
        options["top_k"][row] = min(params.top_k, 2**31 - 1)
        options["top_p"][row] = params.top_p
        options["min_p"][row] = params.min_p
        options["noise_key"][row] = np.uint64(new.noise_key).astype(np.int64)
        options["sample"][row] = new.sample
        penalties["repetition"][row] = params.repetition_penalty
        penalties["presence"][row] = params.presence_penalty
        penalties["frequency"][row] = params.frequency_penalty
        self._penalised[row] = any(
            value != off
            for value, off in (
                (params.repetition_penalty, 1),
                (params.presence_penalty, 0),
                (params.frequency_penalty, 0),
            )
        )
        self._num_candidates[row] = min(new.num_candidates, self._vocab_size)
        if new.num_candidates:
            options["temperature"][row] = 0
        self._num_logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        matcher = self._grammars.matcher(params) if params.is_structured else None
        if matcher is not None:
            matcher.consume_tokens(new.token_ids[new.num_prompt_tokens :])
        edits = _Edits(new, matcher, self._grammars.num_words)
        if edits:
            self._edits[row] = edits

    def advance(self, row: int, token_ids: SequenceOf[int]) -> None:
        """The sequence in this state row goes on with these tokens."""
        edits = self._edits.get(row)
        if edits is not None and edits.matcher is not None:
            edits.matcher.consume_tokens(list(token_ids))

    @property
    def is_structured(self) -> bool:
        """Whether any sequence must be told to `advance`."""
        return any(edits.matcher is not None for edits in self._edits.values())

    def forget(self, row: int) -> None:
        """The sequence in this state row is gone."""
        self._edits.pop(row, None)

    def options(self, rows: np.ndarray, num_tokens: np.ndarray) -> list[np.ndarray]:
        """The fields of `SamplingRows` in order, for logit rows as `sample` takes them."""
        position = (num_tokens - self._num_prompt_tokens[rows]).astype(np.int32)
        return [*(values[rows] for values in self._options.values()), position]

    def sample(
        self, logits: Tensor, options: SamplingRows, rows: np.ndarray, tokens: np.ndarray, num_tokens: np.ndarray
    ) -> Sampled:
        """Choose a token for each row of logits [R, V] float32, which are changed in place.

        Args:
            options: of `self.options`, on the device.
            rows: [R], the state row of the sequence that each logit row belongs to.
            tokens: [state rows, L] int32, the tokens of each sequence.
            num_tokens: [R], how many of them stand before the token to choose.
        """
        position = num_tokens - self._num_prompt_tokens[rows]
        reported = np.flatnonzero(self._num_logprobs[rows] >= 0)
        edited = [i for i in range(len(rows)) if int(rows[i]) in self._edits] if self._edits else []
        penalised = np.flatnonzero(self._penalised[rows])
        raw = None
        if len(reported):
            raw = logits if len(reported) == len(rows) else logits[self._tensor(reported)]
            if raw is logits and (edited or len(penalised) or self._holes.numel()):
                raw = logits.clone()
        beams = np.flatnonzero(self._num_candidates[rows])
        if len(beams) == len(rows):
            logits = logits.log_softmax(dim=-1)
        elif len(beams):
            place = self._tensor(beams)
            logits[place] = logits[place].log_softmax(dim=-1)
        if self._holes.numel():
            logits[:, self._holes] = -torch.inf
        if edited:
            self._edit(logits, edited, rows, tokens, num_tokens, position)
        if len(penalised):
            self._penalise(logits, penalised, rows, tokens, num_tokens)
        token_ids = self._backend.sample(logits, options, self._vocab_size).to("cpu").numpy()
        sampled = Sampled(token_ids, {}, {}, self._candidates(logits, beams, rows) if len(beams) else {})
        for failed in np.flatnonzero(token_ids < 0).tolist():
            sampled.errors[failed] = _reason(logits[failed, : self._vocab_size], int(position[failed]))
        if raw is not None:
            wanted = self._num_logprobs[rows[reported]]
            columns = self.logprobs.read(raw, np.maximum(token_ids[reported], 0), int(wanted.max()))
            for j, (i, k) in enumerate(zip(reported.tolist(), wanted.tolist(), strict=True)):
                sampled.logprobs[i] = columns.take(slice(j, j + 1), k)
        return sampled

    def _candidates(
        self, logits: Tensor, beams: np.ndarray, rows: np.ndarray
    ) -> dict[int, tuple[list[int], list[float]]]:
        """The likeliest next tokens of the logit rows `beams`, those that are masked left out."""
        counts = self._num_candidates[rows[beams]]
        log_probs = logits if len(beams) == len(rows) else logits[self._tensor(beams)]
        ids = torch.zeros(len(beams), dtype=torch.int64, device=logits.device)
        top = self._backend.summarize(log_probs, ids, int(counts.max()), self._vocab_size).top_ids.long()
        found = {}
        values = log_probs.gather(1, top).tolist()
        for i, count, tokens, scores in zip(beams.tolist(), counts.tolist(), top.tolist(), values, strict=True):
            kept = sum(score > -math.inf for score in scores[:count])
            found[i] = tokens[:kept], scores[:kept]
        return found

    def _edit(
        self,
        logits: Tensor,
        edited: list[int],
        rows: np.ndarray,
        tokens: np.ndarray,
        num_tokens: np.ndarray,
        position: np.ndarray,
    ) -> None:
        """Masks, then logit bias, of the logit rows `edited`."""
        edits = [self._edits[int(rows[i])] for i in edited]
        self._mask(logits, edited, edits, rows, tokens, num_tokens)
        masked = [
            edit.masked(int(position[i]), tokens[rows[i], : num_tokens[i]])
            for i, edit in zip(edited, edits, strict=True)
        ]
        logits[self._spread(edited, masked), self._tensor(np.concatenate(masked))] = -torch.inf
        ids = [edit.bias_ids for edit in edits]
        place = self._spread(edited, ids), self._tensor(np.concatenate(ids))
        logits[place] += self._tensor(np.concatenate([edit.bias for edit in edits]))

    def _mask(
        self,
        logits: Tensor,
        edited: list[int],
        edits: list[_Edits],
        rows: np.ndarray,
        tokens: np.ndarray,
        num_tokens: np.ndarray,
    ) -> None:
        """Leave to the logit rows `edited` what allowed ids and structures allow."""
        limited = [(i, edit) for i, edit in zip(edited, edits, strict=True) if edit.allowed is not None or edit.matcher]
        if not limited:
            return
        wanted = []
        for place, (i, edit) in enumerate(limited):
            first = i == 0 or rows[i - 1] != rows[i]  # rows of one sequence follow each other, a draft token apart
            if edit.matcher is not None and first:
                last = i
                while last + 1 < len(rows) and rows[last + 1] == rows[i]:
                    last += 1
                wanted.append((edit.matcher, place, tokens[rows[i], num_tokens[i] : num_tokens[last]].tolist()))
        masks = np.full((len(limited), self._grammars.num_words), -1, np.int32)
        if wanted:
            masks = self._grammars.masks(wanted, len(limited))
        for place, (_, edit) in enumerate(limited):
            if edit.allowed is not None:
                masks[place] &= edit.allowed
        self._backend.mask(logits, self._tensor(np.array([i for i, _ in limited], np.int64)), self._tensor(masks))

    def _penalise(
        self, logits: Tensor, penalised: np.ndarray, rows: np.ndarray, tokens: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        state_rows, lengths = rows[penalised], num_tokens[penalised]
        self._backend.penalize(
            logits,
            PenaltyRows(
                row=self._tensor(penalised.astype(np.int64)),
                tokens=self._tensor(tokens[state_rows, : int(lengths.max())]),
                num_tokens=self._tensor(lengths.astype(np.int32)),
                num_prompt_tokens=self._tensor(self._num_prompt_tokens[state_rows]),
                **{name: self._tensor(values[state_rows]) for name, values in self._penalties.items()},
            ),
        )

    def _spread(self, edited: list[int], ids: list[np.ndarray]) -> Tensor:
        """The logit row of each id in the concatenation of `ids`."""
        return self._tensor(np.repeat(np.array(edited, np.int64), [len(x) for x in ids]))

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device == "cpu" else tensor.to(self._device, non_blocking=True)


def _reason(logits: Tensor, position: int) -> RowError:
    """Why nothing could be chosen from a logit row."""
    if bool(torch.isneginf(logits).all()):
        return RowError(
            "nothing_allowed", f"the row's own limits on token ids leave none to choose at output position {position}"
        )
    return RowError(
        "non_finite_logits",
        f"non-finite logits at output position {position}: the model overflows here; --dtype float32 may help",
    )
