"""Log-probabilities of tokens under the model's raw distribution, for any number of logit rows in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from paged_kernels.interface import Backend
from torch import Tensor

from paged_infer.engine.batch import LogprobColumns

_PIECE_BYTES = 32 << 20
"""Most bytes of logits that exist at a time on behalf of prompt tokens."""


class LogprobReader:
    """Reads log-probabilities, ranks and the likeliest tokens off logit rows.

    Args:
        vocab_size, undecodable: only ids below `vocab_size` that are not in the tensor `undecodable` are listed and
            ranked; the others have their share of the probability all the same.
    """

    def __init__(self, backend: Backend, vocab_size: int, undecodable: Tensor) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._undecodable = undecodable
        self._rows_at_once = 1  # as many as memory allows, once the width of a row is known

    def read(self, logits: Tensor, token_ids: np.ndarray, k: int) -> LogprobColumns:
        """Of token_ids [R] under logits [R, V] float32, with the `k` likeliest of each row. May change the logits."""
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)
        k = min(k, self._vocab_size)
        own = logits.gather(1, ids[:, None])
        summary = self._backend.summarize(logits, ids, 0 if self._undecodable.numel() else k, self._vocab_size)
        total = summary.log_sum_exp[:, None]
        if self._undecodable.numel():
            logits[:, self._undecodable] = -torch.inf
            k = min(k, self._vocab_size - len(self._undecodable))
            summary = self._backend.summarize(logits, ids, k, self._vocab_size)
        top = logits.gather(1, summary.top_ids.long()) - total
        return LogprobColumns(
            token_ids.tolist(),
            (own - total)[:, 0].tolist(),
            summary.ranks.tolist(),
            summary.top_ids.tolist(),
            top.tolist(),
        )

    def read_hidden(
        self, hidden: Tensor, to_logits: Callable[[Tensor], Tensor], token_ids: np.ndarray, k: int
    ) -> LogprobColumns:
        """The same from hidden rows [R, H], whose logits are made and dropped piece by piece."""
        columns = LogprobColumns()
        while len(columns) < len(hidden):
            piece = slice(len(columns), len(columns) + self._rows_at_once)
            logits = to_logits(hidden[piece])
            self._rows_at_once = max(1, _PIECE_BYTES // (4 * logits.shape[1]))
            columns.extend(self.read(logits, token_ids[piece], k))
        return columns
