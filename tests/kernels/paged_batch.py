"""Packed batches with their keys and values kept aside, so that attention can be checked without trusting any cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from paged_kernels.interface import AttentionMeta, Backend, KVCache
from torch import Tensor


@dataclass
class PagedBatch:
    """Sequences of `context` cached and `queries` new tokens each, in shuffled blocks of a larger cache."""

    meta: AttentionMeta
    num_blocks: int
    block_size: int
    keys: list[Tensor]  # per sequence [context + queries, num_kv_heads, head_dim] float32
    values: list[Tensor]

    @classmethod
    def random(
        cls,
        sequences: list[tuple[int, int]],
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        round_to: torch.dtype = torch.float32,
        spare_blocks: int = 3,
        seed: int = 0,
    ) -> PagedBatch:
        rng = torch.Generator().manual_seed(seed)
        lengths = [context + queries for context, queries in sequences]
        counts = [-(-n // block_size) for n in lengths]
        num_blocks = sum(counts) + spare_blocks
        order = torch.randperm(num_blocks, generator=rng).int()
        tables = torch.full((len(sequences), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
        for s, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
            tables[s, :count] = order[end - count : end]
        positions = [torch.arange(c, c + q) for c, q in sequences]
        slots = [tables[s, p // block_size].long() * block_size + p % block_size for s, p in enumerate(positions)]
        queries = [q for _, q in sequences]
        meta = AttentionMeta(
            positions=torch.cat(positions).int(),
            slot_mapping=torch.cat(slots),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            max_seqlen_q=max(queries),
            max_seq_len=max(lengths),
        )
        shapes = [(n, num_kv_heads, head_dim) for n in lengths]
        dense = [[torch.randn(s, generator=rng).to(round_to).float() for s in shapes] for _ in range(2)]
        return cls(meta, num_blocks, block_size, *dense)

    def share(self, first: int, others: list[int], tokens: int) -> None:
        """Let sequences begin with the blocks, keys and values of another; `tokens` are whole blocks of cached ones."""
        blocks = tokens // self.block_size
        for s in others:
            self.meta.block_tables[s, :blocks] = self.meta.block_tables[first, :blocks]
            for dense in (self.keys, self.values):
                dense[s][:tokens] = dense[first][:tokens]

    def alone(self, s: int) -> AttentionMeta:
        """Sequence s as a batch of its own."""
        start, stop = self.meta.cu_seqlens_q[s : s + 2].tolist()
        return AttentionMeta(
            positions=self.meta.positions[start:stop],
            slot_mapping=self.meta.slot_mapping[start:stop],
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=self.meta.seq_lens[s : s + 1],
            block_tables=self.meta.block_tables[s : s + 1],
            max_seqlen_q=stop - start,
            max_seq_len=int(self.meta.seq_lens[s]),
        )

    def fill(self, backend: Backend, kv: KVCache, layer: int = 0) -> None:
        """Store every key and value through the backend, unrotated."""
        num_kv_heads, head_dim = self.keys[0].shape[1:]
        k, v = torch.cat(self.keys), torch.cat(self.values)
        where = [torch.arange(len(keys)) for keys in self.keys]
        slots = torch.cat(
            [self.meta.block_tables[s, p // self.block_size].long() * self.block_size + p % self.block_size
             for s, p in enumerate(where)]
        )  # fmt: skip
        tokens = len(slots)
        meta = AttentionMeta(
            positions=torch.zeros(tokens, dtype=torch.int32),
            slot_mapping=slots,
            cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
            seq_lens=torch.tensor([tokens], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            max_seqlen_q=tokens,
            max_seq_len=tokens,
        )
        qkv = torch.cat([torch.zeros_like(k), k, v], dim=1).flatten(1).to(backend.activation_dtype)
        unrotated = torch.tensor([[1.0] * (head_dim // 2) + [0.0] * (head_dim // 2)])
        backend.rope_and_store(qkv, meta, unrotated, kv, layer, num_kv_heads)

    def attention(
        self, q: Tensor, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """The same formula in float64, a query at a time: [T, num_heads * head_dim]."""
        out = []
        bounds = self.meta.cu_seqlens_q.tolist()
        for s, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            group = q.shape[1] // keys.shape[1]
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            for row in range(bounds[s], bounds[s + 1]):
                last = len(keys) - (bounds[s + 1] - row)
                visible = slice(max(0, last - window + 1) if window else 0, last + 1)
                scores = torch.einsum("hd,phd->hp", q[row].double() * scale, k[visible])
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
                weights = scores.softmax(dim=-1)[:, : len(k[visible])]
                out.append(torch.einsum("hp,phd->hd", weights, v[visible]).flatten())
        return torch.stack(out)
