"""Rows that ask the same are computed once, where the same answer is certain."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from paged_infer.types import Completion, Request, SamplingParams

KEPT_BYTES = 64 << 20
KEPT_PARAMS = 4096


class Dedupe:
    """Remembers answers by what was asked, and which rows wait for the same one.

    Two requests are the same when their prompts are and their options are and their noise is: greedy ones have none,
    sampled ones the same only if they set the same seed. Of answers the last used are kept, `KEPT_BYTES` of them.

    Attributes:
        num_copied: rows that got an answer computed for another one.
        num_following: rows waiting for the answer of a row that the engine has.
    """

    def __init__(self, capacity: int = KEPT_BYTES) -> None:
        self.num_copied = 0
        self.num_following = 0
        self._capacity = capacity
        self._size = 0
        self._answers: OrderedDict[bytes, tuple[Sequence[Completion], int]] = OrderedDict()
        self._keys: dict[int, bytes] = {}
        self._followers: dict[bytes, tuple[int, ...]] = {}
        self._numbers: dict[SamplingParams, int] = {}
        self._last_params: SamplingParams | None = None
        self._last_number = self._next_number = 0

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
            self.num_copied += 1
            return known[0]
        followers = self._followers.get(key)
        if followers is not None:
            self._followers[key] = (*followers, request.request_id)
            self.num_copied += 1
            self.num_following += 1
            return ()
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
        size = 512
        for sample in samples:
            if sample.logprobs or sample.prompt_logprobs:
                return followers
            size += 2 * len(sample.text) + 40 * len(sample.token_ids)
        if size <= self._capacity:
            self._answers[key] = samples, size
            self._size += size
            while self._size > self._capacity:
                self._size -= self._answers.popitem(last=False)[1][1]
        return followers

    def _key(self, request: Request) -> bytes | None:
        """A digest that only the same requests have; None where the request is like no other."""
        params = request.params
        if params.temperature and params.seed is None:
            return None
        if params is not self._last_params:
            number = self._numbers.get(params)
            if number is None:
                if len(self._numbers) == KEPT_PARAMS:
                    self._numbers.clear()
                number = self._numbers[params] = self._next_number
                self._next_number += 1
            self._last_params, self._last_number = params, number
        options = struct.pack("<qQ", self._last_number, request.noise_key if params.temperature else 0)
        prompt = array("i", request.prompt_token_ids).tobytes()
        return hashlib.blake2b(b"%b%b\0%b" % (options, request.salt.encode(), prompt), digest_size=16).digest()
