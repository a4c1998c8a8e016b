"""The decoder: one pre-norm transformer for every supported family, driven by the flags of its config.

Wiring only: ops and packed weights belong to the backend, shapes and tensor names to `config` and `weights`. Nothing is
kept between calls: every input of `forward` is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from paged_kernels.interface import AttentionMeta, Backend, Embedding, KVCache, Linear
from torch import Tensor

from paged_infer.layers.rotary import rope_table
from paged_infer.models.config import ModelConfig
from paged_infer.models.lora import AdapterRows
from paged_infer.models.packing import LinearPacker
from paged_infer.models.weights import Weight, assemble, dense

_ROWS_COMPARED = 4096


@dataclass(frozen=True, slots=True)
class Layer:
    """Packed weights of a layer; norm weights are float32 vectors."""

    input_layernorm: Tensor
    qkv_proj: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_proj: Linear
    post_attention_layernorm: Tensor
    gate_up_proj: Linear
    down_proj: Linear
    window: int


class Decoder:
    """A model ready to run.

    Args:
        weights: checkpoint tensors under their Hugging Face names; each is packed and let go as it comes.
        max_position: positions the model will see; None = the model's context length.
        packer: what makes the layers' matrices into linear layers, where it is not the backend alone.

    Raises `CheckpointError` when the weights do not fit the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        weights: Iterable[tuple[str, Weight]],
        *,
        max_position: int | None = None,
        packer: LinearPacker | None = None,
    ) -> None:
        self.config = config
        self._backend = backend
        self._rope = rope_table(config.rope, max_position or config.max_position_embeddings).to(backend.device)
        self._scale = config.head_dim**-0.5
        linears: dict[str, Linear] = {}
        vectors: dict[str, Tensor] = {}
        separate_head: Tensor | None = None
        packer = packer or LinearPacker(backend)
        for key, stored, bias in assemble(config, weights):
            if packer.takes(key, stored):
                linears[key] = packer(key, stored, bias)
                del stored
                continue
            weight = dense(stored)
            if weight.dim() == 1:
                vectors[key] = weight.to(backend.device, torch.float32, copy=True)
            elif key == "embed_tokens" and config.tie_word_embeddings:
                self._embed_tokens, self._lm_head = backend.make_tied(weight)
            elif key == "embed_tokens":
                self._embed_tokens = backend.make_embedding(weight)
            elif key == "lm_head" and config.tie_word_embeddings:
                separate_head = weight
            elif key == "lm_head":
                self._lm_head = backend.make_head(weight)
            del stored, weight, bias
        packer.report()
        if separate_head is not None and not _same_rows(backend, self._embed_tokens, separate_head):
            self._lm_head = backend.make_head(separate_head)
        self._norm = vectors["norm"]
        self._layers = [
            Layer(
                input_layernorm=vectors[f"{i}.input_layernorm"],
                qkv_proj=linears[f"{i}.qkv_proj"],
                q_norm=vectors.get(f"{i}.q_norm"),
                k_norm=vectors.get(f"{i}.k_norm"),
                o_proj=linears[f"{i}.o_proj"],
                post_attention_layernorm=vectors[f"{i}.post_attention_layernorm"],
                gate_up_proj=linears[f"{i}.gate_up_proj"],
                down_proj=linears[f"{i}.down_proj"],
                window=window,
            )
            for i, window in enumerate(config.windows)
        ]

    def forward(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        """Run a packed batch: input_ids [T] int64, logits_indices [R] int64 into T -> logits [R, V] float32.

        Keys and values of all T tokens go to their slots in `kv`. R may be 0.
        """
        return self.logits(self.hidden(input_ids, meta, kv, logits_indices))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H], as `hidden` returns it -> logits [R, V] float32."""
        return (
            self._lm_head(hidden) if len(hidden) else hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        )

    def hidden(
        self,
        input_ids: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        logits_indices: Tensor,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """`forward` up to the LM head: the normed hidden rows [R, H] from which `logits` follow.

        adapters: what changes the linear layers for some of the T tokens.
        """
        ops, config, eps = self._backend, self.config, self.config.rms_norm_eps
        residual = self._embed_tokens(input_ids).to(torch.float32)
        x = ops.rms_norm(residual, self._layers[0].input_layernorm, eps)
        for i, layer in enumerate(self._layers):
            if i > 0:
                x = ops.add_rms_norm(x, residual, layer.input_layernorm, eps)
            qkv = layer.qkv_proj(x)
            if adapters is not None:
                adapters.add(f"{i}.qkv_proj", x, qkv)
            q = ops.rope_and_store(qkv, meta, self._rope, kv, i, config.num_heads, layer.q_norm, layer.k_norm, eps)
            x = ops.attention(q, kv, i, meta, self._scale, layer.window)
            if i == len(self._layers) - 1:  # past the last attention, rows without logits are of no use
                if len(logits_indices) == 0:
                    return x[:0]
                x, residual = x[logits_indices], residual[logits_indices]
                adapters = None if adapters is None else adapters.take(logits_indices)
            attended = layer.o_proj(x)
            if adapters is not None:
                adapters.add(f"{i}.o_proj", x, attended)
            x = ops.add_rms_norm(attended, residual, layer.post_attention_layernorm, eps)
            gate_up = layer.gate_up_proj(x)
            if adapters is not None:
                adapters.add(f"{i}.gate_up_proj", x, gate_up)
            inner = ops.silu_mul(gate_up)
            x = layer.down_proj(inner)
            if adapters is not None:
                adapters.add(f"{i}.down_proj", inner, x)
        return ops.add_rms_norm(x, residual, self._norm, eps)


def _same_rows(backend: Backend, embedding: Embedding, weight: Tensor) -> bool:
    """Whether the packed embedding holds exactly weight [V, H], rounded to the run dtype."""
    for start in range(0, len(weight), _ROWS_COMPARED):
        rows = weight[start : start + _ROWS_COMPARED].to(backend.device, backend.dtype).to(backend.activation_dtype)
        if not torch.equal(embedding(torch.arange(start, start + len(rows), device=backend.device)), rows):
            return False
    return True
