"""Embedding and LM head of which each rank holds a run of rows."""

from __future__ import annotations

from paged_kernels.interface import Embedding, Linear
from torch import Tensor

from paged_infer.parallel.groups import TensorGroup


class VocabParallelEmbedding:
    """Ids that are not this rank's are zeros here and come from the others.

    Args:
        embedding: rows [rank * rows, (rank + 1) * rows) of the whole.
    """

    def __init__(self, embedding: Embedding, group: TensorGroup, rows: int) -> None:
        self._embedding = embedding
        self._group = group
        self._first, self._rows = group.rank * rows, rows

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self._first
        absent = (own < 0) | (own >= self._rows)
        embedded = self._embedding(own.masked_fill(absent, 0)).clone()
        return self._group.all_reduce(embedded.masked_fill_(absent[:, None], 0))


class VocabParallelHead:
    """Logits of all ranks side by side; those of the rows that only pad the last rank's share are left out.

    Args:
        head: rows of this rank.
        vocab_size: rows of the whole.
    """

    def __init__(self, head: Linear, group: TensorGroup, vocab_size: int) -> None:
        self._head = head
        self._group = group
        self.in_features, self.out_features = head.in_features, vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._group.gather_columns(self._head(x))
        return logits[:, : self.out_features].contiguous() if logits.shape[1] != self.out_features else logits
