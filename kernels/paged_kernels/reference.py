"""The kernel interface in plain torch: specification, fallback for any device, and oracle of every kernel's tests.

Written to be read, not to be fast: each op is the formula of `interface.Backend`, computed in float32 (sampling
probabilities in float64) and rounded once to the dtype it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.interface import (
    AttentionMeta,
    Embedding,
    GroupedLinear,
    KVCache,
    Linear,
    LogitSummary,
    PenaltyRows,
    SamplingRows,
)
from paged_kernels.quantized import BLOCK, QuantizedWeight, ScaledWeight, WeightFormat
from paged_kernels.reference_quant import quantize_rows

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    All words are int64 tensors holding values in [0, 2^32) that broadcast against each other; so is the result.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The signed product wraps modulo 2^64, so its masked halves are those of the unsigned one.
        first, second = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _PHILOX_WEYL[0] & _WORD, k1 + _PHILOX_WEYL[1] & _WORD
    return c0, c1, c2, c3


def gumbel_noise(noise_key: Tensor, sample: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise that depends on nothing but the row's key, sample and output position, and the token.

    noise_key int64, sample and position int32, all [R]; token_ids [N] or [R, N] integers. Returns [R, N] float32.
    The counter is (token id, position, sample, 0); the upper 23 bits of the first output word, centred, are the uniform
    number u, exact in float32, and the noise is -log(-log(u)).
    """
    zero = torch.zeros((), dtype=torch.int64, device=noise_key.device)
    counter = (token_ids.long() & _WORD, position.long()[:, None] & _WORD, sample.long()[:, None] & _WORD, zero)
    key = noise_key[:, None]
    word = philox4x32(counter, (key & _WORD, key >> 32 & _WORD))[0]
    uniform = ((word >> 9).double() + 0.5) * 2.0**-23
    return (-torch.log(-torch.log(uniform))).float()


class ReferenceLinear:
    """x @ weight.T + bias with the weight [N, K] kept in the run dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, float32_out: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias
        self._float32_out = float32_out

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight.float() if self._float32_out else self._weight
        return F.linear(x.to(weight.dtype), weight, self._bias)


class ReferenceScaledLinear:
    """8 bits on both sides: x is rounded a token at a time, then multiplied with the dequantised weight."""

    def __init__(self, weight: ScaledWeight, bias: Tensor | None, device: torch.device) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.dequantize().to(device)
        self._bias = None if bias is None else bias.to(device, torch.float32, copy=True)
        self._dtype = weight.numbers.dtype
        self._group_size = BLOCK if weight.scales.shape[1] > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = quantize_rows(x, self._dtype, self._group_size)
        rounded = numbers.float() * scales.repeat_interleave(x.shape[1] // scales.shape[1], dim=1)
        return F.linear(rounded, self._weight, self._bias).to(x.dtype)


class ReferenceGroupedLinear:
    """A linear layer for each group of rows."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.num_groups = len(linears)
        self._linears = linears

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        runs = torch.split(x, offsets.diff().tolist())
        parts = [linear(rows) for linear, rows in zip(self._linears, runs, strict=True) if len(rows)]
        return torch.cat(parts) if parts else x.new_empty(0, self._linears[0].out_features)


class ReferenceEmbedding:
    """Rows of a table [V, H] kept in the run dtype."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


_SCORE_BYTES = 64 << 20
"""Most bytes of attention scores at a time."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class ReferenceKVCache:
    """Keys and values [num_layers, num_blocks, block_size, num_kv_heads, head_dim], any block size.

    An int8 or float8_e4m3fn cache has a scale for every token and head, [num_layers, num_blocks, block_size,
    num_kv_heads] float32, which maps the largest element of that head on the largest number there is.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.scales: list[Tensor] = []
        if dtype in _LARGEST:
            self.scales = [torch.zeros(shape[:-1], dtype=torch.float32, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.k, self.v, *self.scales))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for tensor in (self.k, self.v, *self.scales):
                tensor[:, destination] = tensor[:, source]

    def export(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = self.k[layer].to(torch.float32, copy=True), self.v[layer].to(torch.float32, copy=True)
        for values, scale in zip((k, v), self.scales, strict=False):
            values *= scale[layer, ..., None]
        return k, v

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, num_kv_heads, head_dim] to slots [T] int64, leaving out negative ones."""
        kept = slots >= 0
        for i, (cache, rows) in enumerate(((self.k, k), (self.v, v))):
            rows = rows[kept]
            if self.scales:
                scale = rows.float().abs().amax(dim=-1) / _LARGEST[cache.dtype]
                self.scales[i][layer].view(-1, self.num_kv_heads)[slots[kept]] = scale
                rows = rows / torch.where(scale > 0, scale, 1.0)[..., None]
                rows = rows.round() if cache.dtype == torch.int8 else rows
            cache[layer].view(-1, self.num_kv_heads, self.head_dim)[slots[kept]] = rows.to(cache.dtype)

    def gather(self, layer: int, block_table: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [start, stop): float32 [stop - start, num_kv_heads, head_dim] each."""
        first = start // self.block_size
        blocks = block_table[first : -(-stop // self.block_size)].long()
        inside = slice(start - first * self.block_size, stop - first * self.block_size)
        k, v = self.k[layer, blocks].float(), self.v[layer, blocks].float()
        for values, scale in zip((k, v), self.scales, strict=False):
            values *= scale[layer, blocks, ..., None]
        return k.flatten(0, 1)[inside], v.flatten(0, 1)[inside]


def _reference_cache(kv: KVCache) -> ReferenceKVCache:
    if not isinstance(kv, ReferenceKVCache):
        raise TypeError(f"the reference backend cannot use a {type(kv).__name__}")
    return kv


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * half dims of x [T, heads, head_dim] by cos and sin [T, half], as NeoX pairs them."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class ReferenceBackend:
    """`interface.Backend` in plain torch. Activations have the run dtype: float32, bfloat16 or float16.

    `kv_dtype` is that of the cache, where it is another than the run dtype: int8 or float8_e4m3fn.
    """

    name = "reference"

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype {dtype}: expected float32, bfloat16 or float16")
        self.dtype = dtype
        self.activation_dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.device = torch.device(device)

    def _pack(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype, copy=True)

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return ReferenceLinear(self._pack(weight), None if bias is None else self._pack(bias))

    def keeps(self, weight_format: WeightFormat) -> bool:
        return False

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear | None:
        """Only for weights that round activations, which dequantising them would not do."""
        if not isinstance(weight, ScaledWeight) or not weight.rounds_activations:
            return None
        if weight.scales.shape[1] > 1 and weight.shape[1] % BLOCK:
            return None
        return ReferenceScaledLinear(weight, bias, self.device)

    def make_grouped(self, weight: Tensor, bias: Tensor | None = None) -> GroupedLinear:
        biases = [None] * len(weight) if bias is None else list(bias)
        return ReferenceGroupedLinear([self.make_linear(w, b) for w, b in zip(weight, biases, strict=True)])

    def make_embedding(self, weight: Tensor) -> Embedding:
        return ReferenceEmbedding(self._pack(weight))

    def make_tied(self, weight: Tensor) -> tuple[Embedding, Linear]:
        packed = self._pack(weight)
        return ReferenceEmbedding(packed), ReferenceLinear(packed, None, float32_out=True)

    def make_head(self, weight: Tensor) -> Linear:
        return ReferenceLinear(self._pack(weight), None, float32_out=True)

    def make_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVCache:
        return ReferenceKVCache(num_layers, num_blocks, block_size, num_kv_heads, head_dim, self.kv_dtype, self.device)

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int) -> int:
        scale_bytes = torch.float32.itemsize if self.kv_dtype in _LARGEST else 0
        return 2 * num_layers * block_size * num_kv_heads * (head_dim * self.kv_dtype.itemsize + scale_bytes)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(self.activation_dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

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
        cache = _reference_cache(kv)
        heads = qkv.float().view(len(qkv), -1, cache.head_dim)
        q, k, v = torch.split(heads, [num_heads, cache.num_kv_heads, cache.num_kv_heads], dim=1)
        if q_norm is not None:
            q = F.rms_norm(q, q_norm.shape, q_norm.float(), eps)
        if k_norm is not None:
            k = F.rms_norm(k, k_norm.shape, k_norm.float(), eps)
        cos, sin = rope[meta.positions.long()].chunk(2, dim=-1)
        cache.store(layer, meta.slot_mapping, _rotate(k, cos, sin), v)
        return _rotate(q, cos, sin).to(self.activation_dtype)

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
        cache = _reference_cache(kv)
        out = torch.zeros_like(q)
        bounds, seq_lens = meta.cu_seqlens_q.tolist(), meta.seq_lens.tolist()
        for s, stop in enumerate(seq_lens):
            rows = slice(bounds[s], bounds[s + 1])
            query = q[rows].float()
            if len(query) == 0:
                continue
            query_positions = torch.arange(stop - len(query), stop, device=q.device)[:, None]
            start = max(0, stop - len(query) - window + 1) if window > 0 else 0
            key_positions = torch.arange(start, stop, device=q.device)
            k, v = cache.gather(layer, meta.block_tables[s], start, stop)
            query = query.view(len(query), cache.num_kv_heads, -1, cache.head_dim)
            at_once = max(1, _SCORE_BYTES // (4 * q.shape[1] * len(key_positions)))
            pieces = (torch.split(part, at_once) for part in (query, query_positions, out[rows]))
            for some, positions, results in zip(*pieces, strict=True):
                hidden = key_positions > positions
                if window > 0:
                    hidden |= key_positions <= positions - window
                scores = torch.einsum("qkgd,pkd->kgqp", some, k) * scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores.masked_fill(hidden, float("-inf"))
                if sinks is not None:
                    sink = sinks.view(cache.num_kv_heads, -1, 1, 1).expand(-1, -1, len(some), 1)
                    scores = torch.cat([scores, sink], dim=-1)
                weights = scores.softmax(dim=-1)[..., : len(key_positions)]
                results.copy_(torch.einsum("kgqp,pkd->qkgd", weights, v).flatten(1, 2))
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(self.activation_dtype)

    def gelu_mul(self, gate_up: Tensor, approximate: bool = False) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh" if approximate else "none") * up).to(self.activation_dtype)

    def sample(self, logits: Tensor, rows: SamplingRows, vocab_size: int) -> Tensor:
        """Top-k keeps exactly k ids, the lowest among equals; top-p keeps the shortest prefix of what is left,
        likeliest first, whose renormalised mass reaches top_p; min-p keeps ids at least min_p times as likely as the
        likeliest, which survives all three. A temperature so small that logit / temperature overflows is greedy.
        """
        logits = logits[:, :vocab_size].float()
        best, chosen = logits.max(dim=-1).values, logits.argmax(dim=-1)
        usable = torch.isfinite(best) & ~logits.isnan().any(dim=-1)
        chosen = torch.where(usable, chosen, -1)
        drawn = usable & (rows.temperature > 0) & torch.isfinite(best / rows.temperature)
        if not drawn.any():
            return chosen
        logits, best = logits[drawn], best[drawn, None]
        temperature, top_p, min_p = (x[drawn, None] for x in (rows.temperature, rows.top_p, rows.min_p))
        top_k = rows.top_k[drawn, None]

        order = logits.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.arange(vocab_size, device=logits.device)
        likelihood = ((logits - best).double() / temperature).exp().gather(-1, order)  # relative to the likeliest
        kept = (top_k <= 0) | (rank < top_k)
        mass = torch.where(kept, likelihood, 0.0).cumsum(dim=-1)
        before = F.pad(mass[:, :-1], (1, 0))
        kept &= (top_p >= 1) | (before < top_p * mass[:, -1:])
        kept &= likelihood >= min_p
        kept[:, 0] = True

        noise = gumbel_noise(rows.noise_key[drawn], rows.sample[drawn], rows.position[drawn], rank)
        survives = torch.zeros_like(kept).scatter_(-1, order, kept)
        scores = (logits / temperature + noise).masked_fill(~survives, float("-inf"))
        chosen[drawn] = scores.argmax(dim=-1)
        return chosen

    def mask(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        bits = allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
        left_out = bits.flatten(1)[:, : logits.shape[1]] == 0
        logits[rows] = logits[rows].masked_fill(left_out, -torch.inf)

    def penalize(self, logits: Tensor, rows: PenaltyRows) -> None:
        vocab_size = logits.shape[1]
        place = torch.arange(rows.tokens.shape[1], device=logits.device)
        counts = torch.zeros(2, len(rows.row), vocab_size + 1, device=logits.device)
        for count, first in zip(counts, (torch.zeros_like(rows.num_tokens), rows.num_prompt_tokens), strict=True):
            counted = (place >= first[:, None]) & (place < rows.num_tokens[:, None])
            ids = torch.where(counted, rows.tokens.long(), vocab_size)
            count.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))
        anywhere, in_output = counts[:, :, :vocab_size]
        x = logits[rows.row]
        repetition = torch.where(anywhere > 0, rows.repetition[:, None], 1.0)
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - rows.presence[:, None] * (in_output > 0) - rows.frequency[:, None] * in_output
        logits[rows.row] = x

    def summarize(self, logits: Tensor, token_ids: Tensor, k: int, vocab_size: int) -> LogitSummary:
        total = logits.double().logsumexp(dim=-1)
        total = torch.where(total.isfinite() & ~logits.isposinf().any(dim=-1), total, torch.nan)
        listed = logits[:, :vocab_size]
        own = listed.gather(1, token_ids[:, None])
        order = listed.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return LogitSummary(total.float(), 1 + (listed > own).sum(dim=-1, dtype=torch.int32), order.int())
