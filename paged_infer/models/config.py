"""What a decoder needs to know about a model, read out of Hugging Face and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paged_infer.config import ConfigError
from paged_infer.layers.mlp import Activation
from paged_infer.layers.rotary import DivisorScaling, LinearScaling, RopeConfig, RopeScaling
from paged_infer.models.families import ARCHITECTURES, FAMILIES, Family, Naming, Norms
from paged_infer.models.hf_rope import has_rope, layer_ropes

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""GGUF's name of an architecture → family."""

_GGUF_GEMMA_NAMES = Naming(
    attention_norm="post_attention_norm", mlp_norm="post_ffw_norm", renamed=((r"blk\.", "model.layers."),)
)
_GEMMA_27B_LAYERS = 62
"""The one size of Gemma 3 whose attention scale does not follow from the head's; its files do not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Layers whose MLP is a choice of experts.

    Attributes:
        num_experts, top_k: how many there are and how many a token uses.
        intermediate_size: of one expert.
        renormalise: the weights of a token's experts sum to 1; else they are the softmax over all.
        layers: those that have experts; the others have an MLP of the model's `intermediate_size`.
        shared_size: intermediate size of the expert that every token uses, behind a gate of its own; 0 = none.
        clamp: (alpha, limit) of gpt-oss's activation; None = the model's activation.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    layers: frozenset[int]
    shared_size: int = 0
    clamp: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate_size"):
            _whole(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ConfigError(f"a token cannot use {self.top_k} of {self.num_experts} experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and flags of a decoder-only transformer.

    Attributes:
        family: row of `FAMILIES`; for people and for file formats, the decoder asks for flags.
        naming: what the tensors are called in Hugging Face checkpoints.
        vocab_size: rows of the embedding and of the LM head.
        max_position_embeddings: context length, in tokens.
        tie_word_embeddings: the LM head is the embedding, unless the checkpoint brings a different one.
        qkv_bias, o_bias, mlp_bias: these projections have biases.
        qk_norm: queries and keys are normed before the rotation, each head or the whole projection.
        norms: where a layer norms: before attention and MLP, what they give, or both.
        norm_offset: what norm weights lack in the file.
        layer_norm: norms subtract the mean and have biases; else they are RMS norms.
        activation, gated: of the MLP; gated ones multiply the activated half of their inner values with the other.
        ropes: [num_layers]; None = no rotation.
        learned_positions: positions are embedded and added.
        windows: [num_layers]; how many keys a token of that layer sees, itself included; 0 = all before it.
        attention_scale: multiplies the products of queries and keys.
        attention_softcap, logit_softcap: c > 0 turns scaled scores, or logits, x into c * tanh(x / c); 0 = off.
        sinks: each head has a score that takes part in the softmax and has no value.
        embedding_multiplier, residual_multiplier: of embeddings, and of what attention and MLP add to the residual.
        logits_divisor: of logits.
        experts: None = none.
        eos_token_ids: ids that end a sequence, as the model's config names them.
    """

    family: str
    naming: Naming = field(default_factory=Naming, repr=False)
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    learned_positions: bool = False
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: Literal["head", "projection"] | None
    norms: Norms = "pre"
    norm_offset: float = 0.0
    layer_norm: bool = False
    activation: Activation = "silu"
    gated: bool = True
    windows: tuple[int, ...]
    attention_scale: float
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    sinks: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    experts: ExpertsConfig | None = None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None

    @property
    def widest_window(self) -> int:
        """How many keys a token can see in any layer, itself included; 0 = all before it."""
        return max(self.windows) if all(self.windows) else 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            _whole(name, getattr(self, name))
        for name in ("head_dim", "max_position_embeddings"):
            _whole(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        for rope in self.ropes:
            if rope is not None and (rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.head_dim):
                raise ConfigError(f"rotary dimension {rope.rotary_dim}: expected an even number up to {self.head_dim}")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"model config: {name}={value!r}, expected a whole number of at least 1")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed `config.json`, as transformers 4 and 5 write it.

    Raises `ConfigError` naming the field: an architecture, activation or RoPE type that is not supported, or a required
    field that is missing.
    """
    name = _family_name(hf)
    family = FAMILIES[name]
    values = _values(hf, family)
    for unsupported in ("use_bidirectional_attention", "scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if values.get(unsupported):
            raise ConfigError(f"{unsupported}={values[unsupported]!r} is not supported")
    if values.get("clip_qkv") is not None:
        raise ConfigError(f"clip_qkv={values['clip_qkv']!r} is not supported")

    num_layers, num_heads = _required(values, "num_hidden_layers"), _required(values, "num_attention_heads")
    hidden_size = _required(values, "hidden_size")
    head_dim = values.get("head_dim") or hidden_size // num_heads
    windows = _hf_windows(values, family, num_layers)

    def flag(setting: bool | str) -> bool:
        return bool(values.get(setting, False)) if isinstance(setting, str) else setting

    scale = (values.get("query_pre_attn_scalar") or head_dim) ** -0.5
    if values.get("scale_attn_weights") is False:
        scale = 1.0
    return ModelConfig(
        family=name,
        naming=family.naming,
        vocab_size=_required(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(values, family),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        ropes=layer_ropes(values, head_dim, windows, family.partial_rotary) if family.rotary else (None,) * num_layers,
        learned_positions=not family.rotary,
        max_position_embeddings=values["max_position_embeddings"],
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
        layer_norm=family.layer_norm,
        activation=_activation(values),
        gated=family.gated,
        windows=windows,
        attention_scale=float(values.get("attention_multiplier", scale)),
        attention_softcap=float(values.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(values.get("final_logit_softcapping") or 0.0),
        sinks=family.sinks,
        embedding_multiplier=hidden_size**0.5 if family.scaled_embedding else values.get("embedding_multiplier", 1.0),
        residual_multiplier=values.get("residual_multiplier", 1.0),
        logits_divisor=values.get("logits_scaling", 1.0),
        experts=_hf_experts(values, family, num_layers) if family.experts else None,
        eos_token_ids=_ids(values.get("eos_token_id")) | _ids(hf.get("eos_token_id")),
        bos_token_id=values.get("bos_token_id"),
    )


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_divisors: tuple[float, ...] | None = None
) -> ModelConfig:
    """Read the metadata of a GGUF file and the shapes of its tensors (rows first, under their GGUF names).

    `rope_divisors` are the values of its tensor `rope_freqs.weight`, where it has one. Raises `ConfigError` as
    `config_from_hf` does.
    """
    name = metadata.get("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")
    family = FAMILIES[GGUF_ARCHITECTURES[name]]

    def value(key: str) -> Any:
        return _required(metadata, f"{name}.{key}")

    def optional(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if optional("expert_count", 0):
        raise ConfigError(f"GGUF architecture {name!r} with experts is not supported")
    hidden_size, num_heads, num_layers = value("embedding_length"), value("attention.head_count"), value("block_count")
    head_dim = optional("attention.key_length", hidden_size // num_heads)
    if optional("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{name}.attention.value_length differs from key_length: not supported")
    if "token_embd.weight" not in shapes:
        raise ConfigError("the GGUF file has no tensor token_embd.weight")
    eos = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    is_gemma = family.norms == "both"
    window, pattern = optional("attention.sliding_window", 0), family.defaults.get("sliding_window_pattern")
    windows = tuple(0 if pattern and (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    local = RopeConfig(theta=optional("rope.freq_base_swa", 10000.0), rotary_dim=head_dim)
    rope = RopeConfig(
        theta=optional("rope.freq_base", 10000.0),
        rotary_dim=optional("rope.dimension_count", head_dim),
        scaling=_gguf_scaling(optional, rope_divisors),
    )
    return ModelConfig(
        family=GGUF_ARCHITECTURES[name],
        naming=_GGUF_GEMMA_NAMES if is_gemma else family.naming,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=value("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=optional("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=value("attention.layer_norm_rms_epsilon"),
        ropes=tuple(local if window and is_gemma else rope for window in windows),
        max_position_embeddings=value("context_length"),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm=family.qk_norm,
        norms=family.norms,  # Gemma's norm weights are stored as they are used
        activation="gelu_tanh" if is_gemma else "silu",
        windows=windows,
        attention_scale=(hidden_size / num_heads if is_gemma and num_layers == _GEMMA_27B_LAYERS else head_dim) ** -0.5,
        embedding_multiplier=hidden_size**0.5 if family.scaled_embedding else 1.0,
        eos_token_ids=frozenset(token for token in eos if token is not None),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def is_native(hf: Mapping[str, Any]) -> bool:
    """Whether `config.json` names an architecture that the decoder knows."""
    architectures = hf.get("architectures") or []
    return any(name in ARCHITECTURES for name in architectures) or (
        not architectures and hf.get("model_type") in FAMILIES
    )


def _family_name(hf: Mapping[str, Any]) -> str:
    architectures = hf.get("architectures") or []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    if not architectures and hf.get("model_type") in FAMILIES:
        return str(hf["model_type"])
    found = ", ".join(architectures) or f"model_type {hf.get('model_type')!r}"
    raise ConfigError(f"architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _required(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ConfigError(f"model config: {name} is missing")
    return values[name]


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _values(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The config's fields under their usual names, those of a text model inside a larger one, and the defaults."""
    given = {**hf, **(hf.get("text_config") or {})}
    values = {**family.defaults, **given}
    if "rope_parameters" in given:
        values.pop("rope_scaling", None)
        if given.get("rope_scaling"):
            values["rope_scaling"] = given["rope_scaling"]
    for usual, spelled in family.fields.items():
        values[usual] = values.get(spelled)
    return values


def _activation(values: Mapping[str, Any]) -> Activation:
    name = values.get("hidden_activation") or values.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _intermediate_size(values: Mapping[str, Any], family: Family) -> int:
    size = values.get("intermediate_size")
    if size is None and not family.gated:
        return int(4 * values["hidden_size"])
    return int(_required(values, "intermediate_size"))


def _hf_experts(values: Mapping[str, Any], family: Family, num_layers: int) -> ExpertsConfig:
    dense, step = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step", 1)
    return ExpertsConfig(
        num_experts=values.get("num_local_experts") or _required(values, "num_experts"),
        top_k=_required(values, "num_experts_per_tok"),
        intermediate_size=values.get("moe_intermediate_size") or _required(values, "intermediate_size"),
        renormalise=bool(values.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        shared_size=values.get("shared_expert_intermediate_size", 0),
        clamp=(values["swiglu_alpha"], values["swiglu_limit"]) if family.clamped_swiglu else None,
    )


def _gguf_scaling(optional: Callable[..., Any], divisors: tuple[float, ...] | None) -> RopeScaling | None:
    kind = optional("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ConfigError(f"GGUF rope.scaling.type {kind!r} is not supported; supported: none, linear")
    if divisors is not None:
        return DivisorScaling(divisors)
    factor = optional("rope.scaling.factor") or optional("rope.scale_linear")
    return LinearScaling(factor) if factor and kind == "linear" else None


def _hf_windows(values: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    window = values.get("sliding_window") or 0
    if family.sliding == "none" or not window or not values.get("use_sliding_window", True):
        return (0,) * num_layers
    if family.sliding == "all":
        return (window,) * num_layers
    layer_types = values.get("layer_types")
    if layer_types is None:
        return tuple(window if _slides(values, family, layer) else 0 for layer in range(num_layers))
    kinds = {"full_attention": 0, "sliding_attention": window}
    unknown = set(layer_types) - kinds.keys()
    if unknown or len(layer_types) != num_layers:
        raise ConfigError(f"layer_types: expected {num_layers} of {', '.join(kinds)}, found {layer_types}")
    return tuple(kinds[kind] for kind in layer_types)


def _slides(values: Mapping[str, Any], family: Family, layer: int) -> bool:
    """Whether a layer has the window where the config does not list which ones do."""
    if family.sliding == "pattern":
        return (layer + 1) % int(values["sliding_window_pattern"]) != 0
    if family.sliding == "without_rope":
        return not has_rope(values, layer)
    return layer >= int(values.get("max_window_layers", 28))
