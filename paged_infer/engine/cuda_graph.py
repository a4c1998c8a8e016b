"""Forward passes of small batches, recorded once for each padded size and replayed.

A recorded pass launches all its kernels in one call, so that a step of a few hundred tokens is not limited by Python.
It reads its inputs from fixed buffers; a batch is copied there, padded with tokens that belong to no sequence and are
stored nowhere. Two kinds are recorded: one token for each sequence, and any mix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from paged_kernels.interface import AttentionMeta, KVCache
from torch import Tensor

from paged_infer.engine.runner import Forward

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Runs a function that always reads and writes the same memory; returns what repeats it, and its result."""


def record_cuda_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A CUDA graph of `run`. It runs once before, so that whatever is compiled or chosen at first use is."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result


def padded_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest, 64)]
    return [*(size for size in steps if size < largest), largest]


@dataclass(frozen=True, slots=True)
class _Recorded:
    input_ids: Tensor
    meta: AttentionMeta
    logits_indices: Tensor
    replay: Callable[[], None]
    hidden: Tensor


class GraphedForward:
    """A forward pass that replays recordings where it can and runs as it comes where it cannot.

    Args:
        forward: the pass; all it reads beside its arguments stays in place.
        sizes: padded numbers of tokens, rising; larger batches are not recorded.
        max_num_seqs: most sequences in a batch.
        max_blocks: columns of the block tables.
        max_seq_len: longest sequence; recordings are made for it.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        sizes: Sequence[int],
        max_num_seqs: int,
        max_blocks: int,
        max_seq_len: int,
        record: Record = record_cuda_graph,
    ) -> None:
        self._forward = forward
        self._sizes = list(sizes)
        self._max_num_seqs = max_num_seqs
        self._max_blocks = max_blocks
        self._max_seq_len = max_seq_len
        self._record = record
        self._recorded: dict[tuple[bool, int], _Recorded] = {}

    def __call__(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        tokens, rows = len(input_ids), len(logits_indices)
        place = bisect_left(self._sizes, tokens)
        if (
            place == len(self._sizes)
            or not 0 < rows <= min(self._sizes[place], self._max_num_seqs)
            or meta.shared_prefixes is not None
        ):
            return self._forward(input_ids, meta, kv, logits_indices)
        key = meta.max_seqlen_q == 1, self._sizes[place]
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._new(*key, input_ids.device, kv)
        _fill(recorded, input_ids, meta, logits_indices)
        recorded.replay()
        return recorded.hidden[:rows]

    def _new(self, decode: bool, size: int, device: torch.device, kv: KVCache) -> _Recorded:
        seqs = min(size, self._max_num_seqs)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        input_ids, logits_indices = zeros(size, dtype=torch.int64), zeros(seqs, dtype=torch.int64)
        meta = AttentionMeta(
            positions=zeros(size),
            slot_mapping=zeros(size, dtype=torch.int64).fill_(-1),
            cu_seqlens_q=zeros(seqs + 1),
            seq_lens=zeros(seqs),
            block_tables=zeros(seqs, self._max_blocks),
            max_seqlen_q=1 if decode else size,
            max_seq_len=self._max_seq_len,
        )
        replay, hidden = self._record(lambda: self._forward(input_ids, meta, kv, logits_indices))
        return _Recorded(input_ids, meta, logits_indices, replay, hidden)


def _fill(recorded: _Recorded, input_ids: Tensor, meta: AttentionMeta, logits_indices: Tensor) -> None:
    """Put a batch into the buffers; sequences behind its last have no tokens, tokens behind its last no slot."""
    there = recorded.meta
    tokens, seqs = len(input_ids), len(meta.seq_lens)
    recorded.input_ids[:tokens] = input_ids
    recorded.logits_indices.zero_()
    recorded.logits_indices[: len(logits_indices)] = logits_indices
    there.positions[:tokens] = meta.positions
    there.positions[tokens:] = 0
    there.slot_mapping[:tokens] = meta.slot_mapping
    there.slot_mapping[tokens:] = -1
    there.cu_seqlens_q[: seqs + 1] = meta.cu_seqlens_q
    there.cu_seqlens_q[seqs + 1 :] = tokens
    there.seq_lens[:seqs] = meta.seq_lens
    there.seq_lens[seqs:] = 0
    there.block_tables[:seqs, : meta.block_tables.shape[1]] = meta.block_tables
