"""The model families the decoder knows: what is particular to each, and how their checkpoints spell it.

A family is a row of `FAMILIES`; code that asks for a family by name belongs nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norms = Literal["pre", "post", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What a family's checkpoints call the parts of a decoder.

    Attributes:
        layers: a layer's tensors begin with this and its number.
        qkv_proj, gate_up_proj: the parts of a stacked weight, in order; a single name where files have it stacked too.
        input_layernorm, post_attention_layernorm: norms before attention and before the MLP.
        attention_norm, mlp_norm: norms of what attention and the MLP give.
        router, expert_gate_up, expert_down: of a layer with experts, `{}` standing for an expert's number; without it
            the file has the weights of all experts in one tensor.
        transposed: weight matrices lie as [in_features, out_features].
        ignored: pattern of tensors that are no weights of the decoder.
        renamed: (pattern, replacement) for names that begin otherwise.
    """

    embed_tokens: str = "model.embed_tokens"
    embed_positions: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    qkv_proj: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o_proj: str = "self_attn.o_proj"
    gate_up_proj: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down_proj: str = "mlp.down_proj"
    input_layernorm: str = "input_layernorm"
    post_attention_layernorm: str = "post_attention_layernorm"
    attention_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    transposed: bool = False
    ignored: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    renamed: tuple[tuple[str, str], ...] = ()

    def usual(self, name: str) -> str:
        """The name of a stored tensor as this table spells it."""
        for pattern, replacement in self.renamed:
            if match := re.match(pattern, name):
                return replacement + name[match.end() :]
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one `model_type` differ.

    Attributes:
        defaults: values of `config.json` fields that the file may leave out.
        fields: names of `config.json` fields that are spelled otherwise.
        qkv_bias, o_bias, mlp_bias: True, False, or the `config.json` field that says so.
        qk_norm: queries and keys are normed before the rotation, each head or the whole projection.
        norms: where a layer norms: before attention and MLP, what they give, or both.
        norm_offset: norm weights are stored less this.
        layer_norm: norms subtract the mean and have biases; else they are RMS norms.
        gated: the MLP multiplies its activated half with another.
        partial_rotary: `partial_rotary_factor` says how much of each head turns.
        rotary: positions turn queries and keys; else they are embedded and added.
        scaled_embedding: embeddings are multiplied by the square root of their size.
        sliding: layers that see only the last `sliding_window` keys: none; all; those that `layer_types` names, or else
            those from `max_window_layers` on; or else all but each `sliding_window_pattern`th; or else those without
            rotation. A false `use_sliding_window` means none.
        sinks: each head has a score that takes part in the softmax and has no value.
        experts: layers have experts.
        clamped_swiglu: experts' activation is that of gpt-oss.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["head", "projection"] | None = None
    norms: Norms = "pre"
    norm_offset: float = 0.0
    layer_norm: bool = False
    gated: bool = True
    rotary: bool = True
    partial_rotary: bool = False
    scaled_embedding: bool = False
    sliding: Literal["none", "all", "from_layer", "pattern", "without_rope"] = "none"
    sinks: bool = False
    experts: bool = False
    clamped_swiglu: bool = False
    naming: Naming = field(default_factory=Naming)


_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA_2 = _GEMMA | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3 = _GEMMA | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GEMMA_NAMES = Naming(
    post_attention_layernorm="pre_feedforward_layernorm",
    ignored=r"model\.vision_tower\..*|vision_tower\..*|(model\.)?multi_modal_projector\..*",
    renamed=(
        (r"(?:model\.)?language_model\.(?:model\.)?(?!lm_head)", "model."),
        (r"language_model\.lm_head", "lm_head"),
    ),
)
_OLMO = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279, "bos_token_id": None}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": 4096,
        },
        sliding="all",
    ),
    "qwen2": Family(defaults=_QWEN, qkv_bias=True, sliding="from_layer"),
    "qwen3": Family(
        defaults=_QWEN | {"head_dim": 128},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        sliding="from_layer",
    ),
    "smollm3": Family(
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "rope_theta": 2_000_000.0,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        sliding="without_rope",
    ),
    "gemma": Family(
        defaults=_GEMMA | {"num_key_value_heads": 16},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "gemma2": Family(
        defaults=_GEMMA_2,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms="both",
        norm_offset=1.0,
        scaled_embedding=True,
        sliding="pattern",
        naming=_GEMMA_NAMES,
    ),
    "gemma3_text": Family(
        defaults=_GEMMA_3,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        norms="both",
        norm_offset=1.0,
        scaled_embedding=True,
        sliding="pattern",
        naming=_GEMMA_NAMES,
    ),
    "phi3": Family(
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        partial_rotary=True,
        sliding="all",
        naming=Naming(qkv_proj=("self_attn.qkv_proj",), gate_up_proj=("mlp.gate_up_proj",)),
    ),
    "olmo2": Family(
        defaults=_OLMO,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="projection",
        norms="post",
    ),
    "olmo3": Family(
        defaults=_OLMO | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="projection",
        norms="post",
        sliding="pattern",
    ),
    "granite": Family(
        defaults={
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attention_multiplier": 1.0,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "gpt2": Family(
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        fields={
            "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        layer_norm=True,
        gated=False,
        rotary=False,
        naming=Naming(
            embed_tokens="transformer.wte",
            embed_positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            qkv_proj=("attn.c_attn",),
            o_proj="attn.c_proj",
            gate_up_proj=("mlp.c_fc",),
            down_proj="mlp.c_proj",
            input_layernorm="ln_1",
            post_attention_layernorm="ln_2",
            transposed=True,
            ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
            renamed=((r"(?=(?:wte|wpe|ln_f|h\.\d+)\.)", "transformer."),),
        ),
    ),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        sliding="all",
        experts=True,
        naming=Naming(
            router="block_sparse_moe.gate",
            expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
    ),
    "qwen2_moe": Family(
        defaults=_QWEN
        | {
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias=True,
        sliding="from_layer",
        experts=True,
    ),
    "qwen3_moe": Family(
        defaults=_QWEN
        | {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        sliding="all",
        experts=True,
    ),
    "olmoe": Family(
        defaults=_OLMO | {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="projection",
        experts=True,
    ),
    "gpt_oss": Family(
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=True,
        sliding="pattern",
        sinks=True,
        experts=True,
        clamped_swiglu=True,
        naming=Naming(
            router="mlp.router",
            expert_gate_up=("mlp.experts.gate_up_proj",),
            expert_down="mlp.experts.down_proj",
        ),
    ),
}

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
    "GPT2LMHeadModel": "gpt2",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
}
"""Of Gemma 3's vision models the text part is run."""
