"""The seam between model code and kernels: what every backend offers, with shapes and dtypes.

T = tokens of the packed batch, S = sequences in it, R = logit rows, H = hidden size, V = vocabulary rows.
`reference.py` implements this in plain torch and is the specification; `cpu/` and `triton/` must agree with it.
A backend is an object made once per model (`dispatch.make_backend`); it owns how weights are packed and how keys and
values are laid out, so a `Linear` or `KVCache` of one backend is meaningless to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paged_kernels.quantized import QuantizedWeight, WeightFormat


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Runs of neighbouring sequences whose first blocks are the same, so that those need be read once for all of them.

    Every sequence belongs to one run, if need be alone with a prefix of 0. It is a hint: results differ by rounding.

    Attributes:
        cu_tokens: [G+1] int32, tokens of run g are [cu_tokens[g], cu_tokens[g+1]).
        prefix_lens: [G] int32, keys that all sequences of a run share, before the first query of any of them.
        block_tables: [G, max_blocks] int32, the blocks of those keys.
        seq_starts: [S] int32, the prefix of each sequence's run: the first key that is its own.
        max_tokens, max_prefix_len: maxima over the runs, as Python ints.
    """

    cu_tokens: Tensor
    prefix_lens: Tensor
    block_tables: Tensor
    seq_starts: Tensor
    max_tokens: int
    max_prefix_len: int


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where the tokens of a packed batch stand. All tensors are contiguous and on the backend's device.

    Attributes:
        positions: [T] int32, 0-based position of each token in its sequence.
        slot_mapping: [T] int64, `block_id * block_size + offset` where a token's key and value go; -1 = nowhere.
        cu_seqlens_q: [S+1] int32, tokens of sequence s are [cu_seqlens_q[s], cu_seqlens_q[s+1]).
        seq_lens: [S] int32, keys visible to the last token of sequence s, itself included.
        block_tables: [S, max_blocks] int32; entries past a sequence's last block are arbitrary.
        max_seqlen_q, max_seq_len: maxima of the above, as Python ints.
        shared_prefixes: for backends that can use it; None = nothing known.
    """

    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_seqlen_q: int
    max_seq_len: int
    shared_prefixes: SharedPrefixes | None = None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to choose a token from each logit row. All tensors are [R] and on the backend's device.

    Attributes:
        temperature: float32; 0 = greedy (argmax, lowest id on ties), the other fields of the row are then ignored.
        top_k: int32; <= 0 or >= V = off. top_p: float32; 1 = off. min_p: float32; 0 = off.
        noise_key: int64, the 64 key bits of Philox4x32-10 (low word first).
        sample: int32, second-from-last counter word. position: int32, output position of the token being drawn.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise_key: Tensor
    sample: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Which logit rows are penalised for which tokens. P rows, all tensors contiguous and on the backend's device.

    Attributes:
        row: [P] int64, the logit row; none twice.
        tokens: [P, L] int32, the tokens before the one to choose, of which the first `num_tokens` [P] int32 count; of
            those, the first `num_prompt_tokens` [P] int32 are prompt.
        repetition, presence, frequency: [P] float32; 1, 0 and 0 change nothing.
    """

    row: Tensor
    tokens: Tensor
    num_tokens: Tensor
    num_prompt_tokens: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class LogitSummary:
    """What log-probabilities need to know of logit rows.

    Attributes:
        log_sum_exp: [R] float32, over all logits of a row; NaN where a row has NaN or +inf or nothing but -inf.
        ranks: [R] int32, 1 + how many of the first `vocab_size` logits are strictly greater than the token's.
        top_ids: [R, k] int32, the ids below `vocab_size` with the greatest logits, falling, ties by id.
    """

    log_sum_exp: Tensor
    ranks: Tensor
    top_ids: Tensor


class Linear(Protocol):
    """A packed weight. Calling it computes x @ weight.T (+ bias): [T, in_features] -> [T, out_features]."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


class GroupedLinear(Protocol):
    """A packed weight of several linear layers of one shape, each for a run of the rows."""

    num_groups: int

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [P, K], rows [offsets[g], offsets[g+1]) for group g, offsets [num_groups+1] int32 rising from 0 ->
        [P, N] in the activation dtype. Rows past the last offset come out as zeros (without the bias).
        """
        ...


class Embedding(Protocol):
    """A table of rows; may share its storage with a packed `Linear` (tied embeddings)."""

    def __call__(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H] in the backend's activation dtype."""
        ...


class KVCache(Protocol):
    """Paged keys and values of all layers, in a layout of the backend's own choosing."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def nbytes(self) -> int: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""
        ...

    def export(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as float32 [num_blocks, block_size, num_kv_heads, head_dim] copies (for tests)."""
        ...


class Backend(Protocol):
    """Every op a decoder needs, for one device and one run dtype.

    `dtype` is the run dtype (weights and KV); activations have `activation_dtype`, which may be wider. Ops that the
    docstring calls in-place write to that argument; all others return new tensors. Tensors given to an op (norm
    weights, rotary tables, logits) lie on `device`.
    """

    name: str
    dtype: torch.dtype
    activation_dtype: torch.dtype
    device: torch.device

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack weight [N, K] (any float dtype) and bias [N] for repeated use; the caller drops its own copy."""
        ...

    def keeps(self, weight_format: WeightFormat) -> bool:
        """Whether weights of this format stay in their few bits; else they are to be dequantised at load."""
        ...

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear | None:
        """Like `make_linear` over a low-bit weight; None where there is no kernel for it or for its shape."""
        ...

    def make_grouped(self, weight: Tensor, bias: Tensor | None = None) -> GroupedLinear:
        """Pack weight [G, N, K] and bias [G, N] of G linear layers."""
        ...

    def make_embedding(self, weight: Tensor) -> Embedding:
        """Pack weight [V, H]."""
        ...

    def make_tied(self, weight: Tensor) -> tuple[Embedding, Linear]:
        """Embedding and LM head over one copy of weight [V, H]. The head returns float32 logits like `make_head`."""
        ...

    def make_head(self, weight: Tensor) -> Linear:
        """LM head over weight [V, H]: its output is float32 whatever the run dtype."""
        ...

    def make_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVCache: ...

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that `make_kv_cache` takes for each block."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] float32, weight [H] float32 -> x / rms(x) * weight, [T, H] in the activation dtype."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In place: residual [T, H] float32 += x [T, H]; returns rms_norm(residual, weight, eps).

        The residual stream stays in float32 whatever the run dtype.
        """
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        meta: AttentionMeta,
        rope: Tensor,
        kv: KVCache,
        layer: int,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Split qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], norm q and k per head where weights [head_dim] are
        given, rotate q and k (NeoX halves) and write k and v to their slots in `kv`.

        rope: [max_position, rotary_dim] float32, first half cos, second half sin; rotary_dim <= head_dim, the rest of
        the head passes through. Returns q [T, num_heads, head_dim].
        """
        ...

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        meta: AttentionMeta,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, num_heads, head_dim] over the cached keys: [T, num_heads * head_dim].

        Query i of sequence s stands at position seq_lens[s] - (tokens of s) + i and sees keys 0..position; with
        `window` > 0 only the last `window` of them, itself included. Keys before the window of a sequence's first
        query are not read: their blocks may be gone. num_heads is a multiple of num_kv_heads.

        `softcap` > 0 turns each scaled score s into softcap * tanh(s / softcap). `sinks` [num_heads] float32 are scores
        of one more key for each head, whose value is 0.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2I] -> silu(gate_up[:, :I]) * gate_up[:, I:], [T, I]."""
        ...

    def gelu_mul(self, gate_up: Tensor, approximate: bool = False) -> Tensor:
        """gate_up [T, 2I] -> gelu(gate_up[:, :I]) * gate_up[:, I:], [T, I]; `approximate` is the tanh form."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows, vocab_size: int) -> Tensor:
        """Choose one id per row of logits [R, V] float32 among ids < vocab_size: [R] int64.

        Order: temperature, top-k, top-p, min-p, then argmax of (logit / temperature + Gumbel noise) over the
        survivors; ties go to the lowest id. -inf marks a masked id. A row with NaN or +inf among its first vocab_size
        logits, or with nothing but -inf, yields -1.
        """
        ...

    def mask(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        """In place on logits [R, V] float32: -inf to what row p of allowed [P, ceil(V / 32)] int32 leaves out.

        rows: [P] int64, the logit row each mask is for. Bit i of word w, the lowest first, is token 32 * w + i.
        """
        ...

    def penalize(self, logits: Tensor, rows: PenaltyRows) -> None:
        """In place on logits [R, V] float32: the penalties of tokens that stand before the one to choose.

        A token anywhere before has its logit divided by `repetition` where positive, multiplied where negative. Then
        one in the output loses `presence`, and `frequency` times the number of its occurrences there.
        """
        ...

    def summarize(self, logits: Tensor, token_ids: Tensor, k: int, vocab_size: int) -> LogitSummary:
        """Normaliser, rank of one token (token_ids [R] int64, below `vocab_size`) and the k <= vocab_size likeliest of
        each row of logits [R, V] float32.
        """
        ...
