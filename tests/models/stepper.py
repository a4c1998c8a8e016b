"""Runs a decoder over sequences in any packing, with scattered KV blocks: what a scheduler and a runner would do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from paged_kernels.interface import AttentionMeta, Backend
from torch import Tensor

from paged_infer.models.decoder import Decoder

NUM_SPARE_BLOCKS = 3


class Stepper:
    """Sequences of known tokens, fed in pieces. Block tables are shuffled and what lies beyond their end is rubbish."""

    def __init__(
        self, decoder: Decoder, backend: Backend, sequences: Sequence[Sequence[int]], block_size: int = 16
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._sequences = sequences
        self._block_size = block_size
        self._done = [0] * len(sequences)
        needed = [-(-len(sequence) // block_size) for sequence in sequences]
        num_blocks = sum(needed) + NUM_SPARE_BLOCKS
        blocks = random.Random(0).sample(range(num_blocks), num_blocks)
        self._tables = torch.randint(num_blocks, (len(sequences), max(needed) + 1), dtype=torch.int32)
        for table, count in zip(self._tables, needed, strict=True):
            table[:count] = torch.tensor([blocks.pop() for _ in range(count)])
        self.kv = backend.make_kv_cache(config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)

    def batch(self, work: Sequence[tuple[int, int]]) -> tuple[Tensor, AttentionMeta]:
        """Input ids and meta of a step that runs `count` further tokens of each named sequence."""
        positions = [range(self._done[s], self._done[s] + count) for s, count in work]
        rows = torch.tensor([s for s, _ in work])
        slots = [self._slot(s, p) for (s, _), span in zip(work, positions, strict=True) for p in span]
        ends = [span.stop for span in positions]
        meta = AttentionMeta(
            positions=torch.tensor([p for span in positions for p in span], dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            cu_seqlens_q=torch.tensor([0, *(count for _, count in work)]).cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=self._tables[rows].contiguous(),
            max_seqlen_q=max(count for _, count in work),
            max_seq_len=max(ends),
        )
        tokens = [self._sequences[s][p] for (s, _), span in zip(work, positions, strict=True) for p in span]
        return torch.tensor(tokens), meta

    def step(self, work: Sequence[tuple[int, int]], logits_indices: Sequence[int] | None = None) -> Tensor:
        """Run the step and return its logits: of every token, or of those named."""
        input_ids, meta = self.batch(work)
        wanted = range(len(input_ids)) if logits_indices is None else logits_indices
        with torch.inference_mode():
            logits = self._decoder.forward(input_ids, meta, self.kv, torch.tensor(list(wanted), dtype=torch.int64))
        for s, count in work:
            self._done[s] += count
        return logits

    def run(self, steps: Iterable[Sequence[tuple[int, int]]]) -> list[Tensor]:
        """Logits [len, V] of each sequence after all steps."""
        pieces: list[list[Tensor]] = [[] for _ in self._sequences]
        for work in steps:
            logits = self.step(work).split([count for _, count in work])
            for (s, _), piece in zip(work, logits, strict=True):
                pieces[s].append(piece)
        assert self._done == [len(sequence) for sequence in self._sequences]
        return [torch.cat(piece) for piece in pieces]

    def _slot(self, sequence: int, position: int) -> int:
        block = int(self._tables[sequence, position // self._block_size])
        return block * self._block_size + position % self._block_size
