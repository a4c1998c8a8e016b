"""Rows that ask the same are computed once, where the same answer is certain."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from paged_infer.types import Completion, Request, SamplingParams

KEPT_BYTES = 64 << 20
KEPT_ROWS = 1 << 13
KEPT_PARAMS = 4096


class Dedupe:
    """Remembers answers by what was asked, and which rows wait for the same one.

    Two requests are the same when their prompts are and their options are and their noise is: greedy ones have none,
    sampled ones the same only if they set the same seed. Of answers the last used are kept, `KEPT_BYTES` of them; of
    `KEPT_ROWS` it is known in which row they stand, so that they can be read back, after a restart too.

    Args:
        rows: as an earlier run's `rows` had it.
        recall: reads a row's samples back, None where it cannot.

    Attributes:
        rows: the row that has the answer, by a digest of what was asked; the last used ones.
        num_copied: rows that got an answer computed for another one.
        num_following: rows waiting for the answer of a row that the engine has.
    """

    def __init__(
        self,
        rows: Mapping[str, int] | None = None,
        recall: Callable[[int], Sequence[Completion] | None] = lambda row: None,
        *,
        capacity: int = KEPT_BYTES,
        max_rows: int = KEPT_ROWS,
    ) -> None:
        self.rows = OrderedDict(rows or {})
        self.num_copied = 0
        self.num_following = 0
        self._recall = recall
        self._capacity = capacity
        self._max_rows = max_rows
        self._size = 0
        self._answers: OrderedDict[str, tuple[Sequence[Completion], int]] = OrderedDict()
        self._keys: dict[int, str] = {}
        self._followers: dict[str, tuple[int, ...]] = {}
        self._digests: dict[SamplingParams, bytes] = {}
        self._last_params: SamplingParams | None = None
        self._last_digest = b""

    def ask(self, request: Request) -> Sequence[Completion] | None:
        """What is known of a request before it is computed.

        Returns:
            The samples of an equal one; () when this row follows one that the engine has, and will come out of
            `answered` with it; None when it must be computed.
        """
        key = self._key(request)
        if key is None:
            return None
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)
            self._stands_in(key, request.request_id)
            self.num_copied += 1
            return known[0]
        followers = self._followers.get(key)
        if followers is not None:
            self._followers[key] = (*followers, request.request_id)
            self.num_copied += 1
            self.num_following += 1
            return ()
        row = self.rows.get(key)
        samples = None if row is None else self._recall(row)
        if samples is not None:
            self._keep(key, samples)
            self._stands_in(key, request.request_id)
            self.num_copied += 1
            return samples
        self._keys[request.request_id] = key
        self._followers[key] = ()
        return None

    def answered(self, row: int, samples: Sequence[Completion]) -> tuple[int, ...]:
        """Take the answer of a computed row; the rows that wait for the same."""
        key = self._keys.pop(row, None)
        if key is None:
            return ()
        followers = self._followers.pop(key)
        self.num_following -= len(followers)
        self._keep(key, samples)
        return followers

    def _keep(self, key: str, samples: Sequence[Completion]) -> None:
        """Remember an answer, unless it carries log-probabilities, which are large, or is a failure."""
        size = 512
        for sample in samples:
            if sample.logprobs or sample.prompt_logprobs or sample.error is not None:
                return
            size += 2 * len(sample.text) + 40 * len(sample.token_ids)
        self._stands_in(key, samples[0].request_id)
        if size > self._capacity:
            return
        self._answers[key] = samples, size
        self._size += size
        while self._size > self._capacity:
            self._size -= self._answers.popitem(last=False)[1][1]

    def _stands_in(self, key: str, row: int) -> None:
        """The newest row with an answer: the one that can be read back longest."""
        rows = self.rows
        rows[key] = row
        rows.move_to_end(key)
        if len(rows) > self._max_rows:
            rows.popitem(last=False)

    def _key(self, request: Request) -> str | None:
        """A digest that only the same requests have; None where the request is like no other."""
        params = request.params
        if params.temperature and params.seed is None:
            return None
        if params is not self._last_params:
            digest = self._digests.get(params)
            if digest is None:
                if len(self._digests) == KEPT_PARAMS:
                    self._digests.clear()
                digest = self._digests[params] = hashlib.blake2b(repr(params).encode(), digest_size=16).digest()
            self._last_params, self._last_digest = params, digest
        noise = request.noise_key if params.temperature else 0
        prompt = array("i", request.prompt_token_ids).tobytes()
        asked = b"%b%d %b\0%b" % (self._last_digest, noise, request.salt.encode(), prompt)
        return hashlib.blake2b(asked, digest_size=16).hexdigest()
