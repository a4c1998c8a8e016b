"""Text to calibrate on, and a batch of it all at once."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any, cast

import torch
from paged_kernels.interface import AttentionMeta, Backend, KVCache
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.text.tokenizer import Tokenizer

BLOCK_SIZE = 16


def builtin_text() -> str:
    """Every fourth topic of Python's built-in help: prose and code, the same wherever that Python is."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)[::4])


def token_rows(tokenizer: Tokenizer, text: str, num_tokens: int, length: int = 512) -> Tensor:
    """[R, length] int64: the beginning of the text in rows, as few as hold `num_tokens`.

    Raises `ConfigError` where the text has not even one row's tokens.
    """
    ids = tokenizer.encode(text[: 12 * num_tokens])
    length = min(length, num_tokens)
    rows = min(-(-num_tokens // length), len(ids) // length)
    if rows == 0:
        raise ConfigError(f"calibration: {len(ids)} tokens of text are too few; give at least {length}")
    return torch.tensor(ids[: rows * length]).view(rows, length)


def read_text(path: str | None) -> str:
    """The file's text, None = the built-in one. Raises `ConfigError`."""
    if path is None:
        return builtin_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration {path} cannot be read: {error}") from None


class OneLayerCache:
    """A backend whose layers share one layer's cache, for a single pass over whole sequences."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def rope_and_store(
        self, qkv: Tensor, meta: AttentionMeta, rope: Tensor, kv: KVCache, layer: int, *others: Any, **named: Any
    ) -> Tensor:
        return self._backend.rope_and_store(qkv, meta, rope, kv, 0, *others, **named)

    def attention(self, q: Tensor, kv: KVCache, layer: int, *others: Any, **named: Any) -> Tensor:
        return self._backend.attention(q, kv, 0, *others, **named)


def one_layer_cache(backend: Backend) -> Backend:
    """`OneLayerCache`, as what it behaves like."""
    return cast(Backend, OneLayerCache(backend))


def whole_batch(rows: Tensor, device: torch.device) -> tuple[Tensor, AttentionMeta, int]:
    """Input ids [R * L] and meta of a step that runs rows [R, L] from their beginnings; the blocks it needs."""
    count, length = rows.shape
    blocks = -(-length // BLOCK_SIZE)
    positions = torch.arange(length).repeat(count)
    tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    starts = tables[:, 0].long().repeat_interleave(length) * BLOCK_SIZE
    meta = AttentionMeta(
        positions=positions.int().to(device),
        slot_mapping=(starts + positions).to(device),
        cu_seqlens_q=(torch.arange(count + 1) * length).int().to(device),
        seq_lens=torch.full((count,), length, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        max_seqlen_q=length,
        max_seq_len=length,
    )
    return rows.flatten().to(device), meta, count * blocks
