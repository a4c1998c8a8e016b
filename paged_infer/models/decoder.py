"""The decoder: one transformer for every supported family, driven by the flags of its config.

Wiring only: ops and packed weights belong to the backend, shapes and tensor names to `config` and `weights`. Nothing is
kept between calls: every input of `forward` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from paged_kernels.interface import AttentionMeta, Backend, Embedding, GroupedLinear, KVCache, Linear
from torch import Tensor

from paged_infer.layers.mlp import MLP, DenseMLP, SharedExpert, SparseMLP, activation_function, clamped_swiglu
from paged_infer.layers.norm import LayerNorm, NoNorm, Norm, RMSNorm, Scale
from paged_infer.layers.rotary import RopeConfig, rope_table
from paged_infer.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from paged_infer.models.config import ExpertsConfig, ModelConfig
from paged_infer.models.lora import AdapterRows
from paged_infer.models.packing import LinearPacker
from paged_infer.models.weights import Weight, assemble
from paged_infer.parallel.groups import TensorGroup
from paged_infer.parallel.place import WHOLE, Place

_ROWS_COMPARED = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model.

    Attributes:
        group: the ranks that share its layers; None = it has them whole.
        vocab_size: of the whole model.
    """

    place: Place = WHOLE
    group: TensorGroup | None = None
    vocab_size: int = 0


ALONE = Share()


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer is made of; plain tensors are float32.

    Attributes:
        input_layernorm, post_attention_layernorm: before attention and before the MLP.
        q_norm, k_norm: [head_dim], for each head. whole_q_norm, whole_k_norm: of the whole projection.
        attention_norm, mlp_norm: what becomes of the outputs of attention and MLP before they join the residual.
        rope: [max_position, rotary_dim] table.
        sinks: [num_heads].
    """

    input_layernorm: Norm
    qkv_proj: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    whole_q_norm: Norm | None
    whole_k_norm: Norm | None
    rope: Tensor
    window: int
    sinks: Tensor | None
    o_proj: Linear
    attention_norm: Callable[[Tensor], Tensor] | None
    post_attention_layernorm: Norm
    mlp: MLP
    mlp_norm: Callable[[Tensor], Tensor] | None


class Decoder:
    """A model ready to run.

    Args:
        weights: checkpoint tensors under their Hugging Face names; each is packed and let go as it comes.
        max_position: positions the model will see; None = the model's context length.
        packer: what makes the layers' matrices into linear layers, where it is not the backend alone.
        share: where this is one rank's share of a model; `config` and `weights` are those of the share then.

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
        share: Share = ALONE,
    ) -> None:
        self.config = config
        self._share = share
        self._backend = backend
        self._linears: dict[str, Linear] = {}
        self._grouped: dict[str, GroupedLinear] = {}
        self._vectors: dict[str, Tensor] = {}
        self._embed_positions: Embedding | None = None
        separate_head: Tensor | None = None
        packer = packer or LinearPacker(backend)
        for key, stored, bias in assemble(config, weights, share.place):
            if packer.takes(key, stored):
                self._linears[key] = packer(key, stored, bias)
                del stored
                continue
            weight = packer.dense(stored)
            if weight.dim() == 1:
                self._vectors[key] = weight.to(backend.device, torch.float32, copy=True)
                if bias is not None:
                    self._vectors[f"{key}.bias"] = bias.to(backend.device, torch.float32, copy=True)
            elif key == "embed_tokens" and config.tie_word_embeddings and share.place.is_last:
                self._embed_tokens, self._lm_head = backend.make_tied(weight)
            elif key == "embed_tokens":
                self._embed_tokens = backend.make_embedding(weight)
            elif key == "embed_positions":
                self._embed_positions = backend.make_embedding(weight)
            elif key == "lm_head" and config.tie_word_embeddings:
                separate_head = weight
            elif key == "lm_head":
                self._lm_head = backend.make_head(weight)
            elif config.experts is not None and ".experts." in key:
                groups = config.experts.num_experts
                self._grouped[key] = backend.make_grouped(
                    weight.view(groups, -1, weight.shape[1]), None if bias is None else bias.view(groups, -1)
                )
            del stored, weight, bias
        packer.report()
        if separate_head is not None and not _same_rows(backend, self._embed_tokens, separate_head):
            self._lm_head = backend.make_head(separate_head)
        if share.group is not None and share.place.is_first:
            self._embed_tokens = VocabParallelEmbedding(self._embed_tokens, share.group, config.vocab_size)
        if share.group is not None and share.place.is_last:
            self._lm_head = VocabParallelHead(self._lm_head, share.group, share.vocab_size)
        tables = {
            rope: rope_table(rope, max_position or config.max_position_embeddings).to(backend.device)
            for rope in dict.fromkeys(config.ropes)
        }
        self._layers = [self._layer(i, tables) for i in range(config.num_layers)]
        self._norm = self._make_norm("norm") if share.place.is_last else None
        del self._linears, self._grouped, self._vectors

    def _layer(self, i: int, tables: dict[RopeConfig | None, Tensor]) -> Layer:
        config, vectors = self.config, self._vectors
        pre, post = config.norms != "post", config.norms != "pre"
        whole = config.qk_norm == "projection"
        per_head = config.qk_norm == "head"
        scale = None if config.residual_multiplier == 1 else Scale(config.residual_multiplier)
        return Layer(
            input_layernorm=self._make_norm(f"{i}.input_layernorm") if pre else NoNorm(self._backend),
            qkv_proj=self._linears[f"{i}.qkv_proj"],
            q_norm=vectors[f"{i}.q_norm"] + config.norm_offset if per_head else None,
            k_norm=vectors[f"{i}.k_norm"] + config.norm_offset if per_head else None,
            whole_q_norm=self._make_norm(f"{i}.q_norm") if whole else None,
            whole_k_norm=self._make_norm(f"{i}.k_norm") if whole else None,
            rope=tables[config.ropes[i]],
            window=config.windows[i],
            sinks=vectors.get(f"{i}.sinks"),
            o_proj=self._linears[f"{i}.o_proj"],
            attention_norm=self._summed(self._make_norm(f"{i}.attention_norm") if post else scale),
            post_attention_layernorm=(
                self._make_norm(f"{i}.post_attention_layernorm") if pre else NoNorm(self._backend)
            ),
            mlp=self._mlp(i),
            mlp_norm=self._summed(self._make_norm(f"{i}.mlp_norm") if post else scale),
        )

    def _summed(self, following: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
        """Where several ranks share a layer, add up what they have before that."""
        group = self._share.group
        if group is None:
            return following
        return group.all_reduce if following is None else lambda x: following(group.all_reduce(x))

    def _make_norm(self, key: str) -> Norm:
        weight = self._vectors[key] + self.config.norm_offset
        if self.config.layer_norm:
            return LayerNorm(self._backend, weight, self._vectors[f"{key}.bias"], self.config.norm_eps)
        return RMSNorm(self._backend, weight, self.config.norm_eps)

    def _mlp(self, i: int) -> MLP:
        config, experts = self.config, self.config.experts
        if experts is not None and i in experts.layers:
            return self._sparse_mlp(f"{i}.", experts)
        return self._dense_mlp(f"{i}.", config.gated)

    def _dense_mlp(self, key: str, gated: bool) -> DenseMLP:
        activation = activation_function(self._backend, self.config.activation, gated)
        return DenseMLP(key, self._linears[f"{key}gate_up_proj"], self._linears[f"{key}down_proj"], activation)

    def _sparse_mlp(self, key: str, experts: ExpertsConfig) -> SparseMLP:
        shared = None
        if experts.shared_size:
            gate = self._linears[f"{key}shared_expert_gate"]
            shared = SharedExpert(gate, self._dense_mlp(f"{key}shared_expert.", gated=True))
        if experts.clamp is not None:
            activation = clamped_swiglu(*experts.clamp)
        else:
            activation = activation_function(self._backend, self.config.activation, gated=True)
        return SparseMLP(
            self._backend,
            self._linears[f"{key}router"],
            self._grouped[f"{key}experts.gate_up_proj"],
            self._grouped[f"{key}experts.down_proj"],
            activation,
            top_k=experts.top_k,
            renormalise=experts.renormalise,
            shared=shared,
        )

    def forward(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        """Run a packed batch: input_ids [T] int64, logits_indices [R] int64 into T -> logits [R, V] float32.

        Keys and values of all T tokens go to their slots in `kv`. R may be 0.
        """
        return self.logits(self.hidden(input_ids, meta, kv, logits_indices))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H], as `hidden` returns it -> logits [R, V] float32."""
        if len(hidden) == 0:
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        logits = self._lm_head(hidden)
        if self.config.logits_divisor != 1:
            logits /= self.config.logits_divisor
        if self.config.logit_softcap > 0:
            logits.div_(self.config.logit_softcap).tanh_().mul_(self.config.logit_softcap)
        return logits

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
        return self.onwards(self.embed(input_ids, meta), meta, kv, logits_indices, adapters)

    def onwards(
        self,
        residual: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        logits_indices: Tensor,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """`hidden` from the residual stream [T, H] float32 on, which is overwritten.

        Of a stage of a pipeline that is not the last: the residual stream after its layers.
        """
        ops, config, eps = self._backend, self.config, self.config.norm_eps
        last = len(self._layers) - 1 if self._norm is not None else -1
        x = self._layers[0].input_layernorm(residual)
        for i, layer in enumerate(self._layers):
            if i > 0:
                x = layer.input_layernorm.add(x, residual)
            qkv = layer.qkv_proj(x)
            if adapters is not None:
                adapters.add(f"{i}.qkv_proj", x, qkv)
            if layer.whole_q_norm is not None and layer.whole_k_norm is not None:
                self._norm_projections(qkv, layer.whole_q_norm, layer.whole_k_norm)
            q = ops.rope_and_store(qkv, meta, layer.rope, kv, i, config.num_heads, layer.q_norm, layer.k_norm, eps)
            x = ops.attention(
                q, kv, i, meta, config.attention_scale, layer.window, config.attention_softcap, layer.sinks
            )
            if i == last:  # past the last attention, rows without logits are of no use
                if len(logits_indices) == 0:
                    return residual.new_empty(0, config.hidden_size, dtype=x.dtype)
                x, residual = x[logits_indices], residual[logits_indices]
                adapters = None if adapters is None else adapters.take(logits_indices)
            attended = layer.o_proj(x)
            if adapters is not None:
                adapters.add(f"{i}.o_proj", x, attended)
            if layer.attention_norm is not None:
                attended = layer.attention_norm(attended)
            x = layer.post_attention_layernorm.add(attended, residual)
            x = layer.mlp(x, adapters)
            if layer.mlp_norm is not None:
                x = layer.mlp_norm(x)
        return residual.add_(x) if self._norm is None else self._norm.add(x, residual)

    def embed(self, input_ids: Tensor, meta: AttentionMeta) -> Tensor:
        """[T] int64 -> [T, H] float32, the residual stream's beginning."""
        embedded = self._embed_tokens(input_ids).to(torch.float32)
        if self.config.embedding_multiplier != 1:
            embedded *= self.config.embedding_multiplier
        if self._embed_positions is not None:
            embedded += self._embed_positions(meta.positions.long())
        return embedded

    def _norm_projections(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> None:
        """In place: queries and keys of qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], each as a whole."""
        q_size = self.config.num_heads * self.config.head_dim
        k_end = q_size + self.config.num_kv_heads * self.config.head_dim
        qkv[:, :q_size] = q_norm(qkv[:, :q_size].contiguous())
        qkv[:, q_size:k_end] = k_norm(qkv[:, q_size:k_end].contiguous())


def _same_rows(backend: Backend, embedding: Embedding, weight: Tensor) -> bool:
    """Whether the packed embedding holds exactly weight [V, H], rounded to the run dtype."""
    for start in range(0, len(weight), _ROWS_COMPARED):
        rows = weight[start : start + _ROWS_COMPARED].to(backend.device, backend.dtype).to(backend.activation_dtype)
        if not torch.equal(embedding(torch.arange(start, start + len(rows), device=backend.device)), rows):
            return False
    return True
