"""The workload file and the arithmetic it costs: what any engine must compute, and what sharing prefixes saves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paged_infer.models.config import ModelConfig

WORKLOAD = Path(__file__).with_name("workload.jsonl")


def read_rows(path: Path = WORKLOAD, num_rows: int | None = None) -> list[dict[str, Any]]:
    """All rows, or `num_rows` of them evenly spread, so that the mixture of lengths and prefixes stays."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if num_rows is None or num_rows >= len(rows):
        return rows
    return [rows[i * len(rows) // num_rows] for i in range(num_rows)]


def encode(rows: Iterable[dict[str, Any]], tokenizer_folder: Path) -> list[list[int]]:
    """The token ids of the rows' prompts, without special tokens."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    return [e.ids for e in tokenizer.encode_batch([row["prompt"] for row in rows], add_special_tokens=False)]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide what a token costs, for a dense decoder with gated MLP (Llama's shape)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        """The sizes of a model."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})

    def linears(self) -> dict[str, tuple[int, int]]:
        """The matrices of one layer as (in_features, out_features)."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv_proj": (self.hidden_size, q + 2 * kv),
            "o_proj": (q, self.hidden_size),
            "gate_up_proj": (self.hidden_size, 2 * self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs (a multiply-add is two) of a workload, and the tokens they are for."""

    computed_tokens: int
    shared_tokens: int
    generated_tokens: int
    linear: int
    head: int
    attention: int

    @property
    def total(self) -> int:
        """All FLOPs."""
        return self.linear + self.head + self.attention


def shared_lengths(prompts: Iterable[Sequence[int]], block_size: int) -> list[int]:
    """For each prompt, the tokens an ideal prefix cache has from the prompts before it.

    Whole blocks only, and the last prompt token is always computed (its logits are needed).
    """
    seen: set[tuple[int, ...]] = set()
    lengths = []
    for prompt in prompts:
        ids = tuple(prompt)
        borders = range(block_size, len(ids) + 1, block_size)
        hit = 0
        for end in borders:
            if end >= len(ids) or ids[:end] not in seen:
                break
            hit = end
        seen.update(ids[:end] for end in borders)
        lengths.append(hit)
    return lengths


def count_work(
    shape: ModelShape, prompts: Sequence[Sequence[int]], outputs: Sequence[int], block_size: int | None = 16
) -> Work:
    """FLOPs to answer each prompt with its number of output tokens (at least one).

    Every computed token passes the layers once, a token at position p attends to p + 1 keys, the LM head runs for
    generated tokens only, and the last generated token is never run. `block_size` None: no sharing.
    """
    shared = [0] * len(prompts) if block_size is None else shared_lengths(prompts, block_size)
    per_token = shape.num_layers * sum(2 * k * n for k, n in shape.linears().values())
    per_key = shape.num_layers * 4 * shape.num_heads * shape.head_dim
    computed = keys = 0
    for prompt, output, first in zip(prompts, outputs, shared, strict=True):
        end = len(prompt) + output - 1
        computed += end - first
        keys += (end * (end + 1) - first * (first + 1)) // 2
    generated = sum(outputs)
    return Work(
        computed_tokens=computed,
        shared_tokens=sum(shared),
        generated_tokens=generated,
        linear=per_token * computed,
        head=2 * shape.hidden_size * shape.vocab_size * generated,
        attention=per_key * keys,
    )
