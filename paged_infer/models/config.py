"""What a decoder needs to know about a model, and the only place that knows how HF and GGUF files spell it.

A family is a row of `FAMILIES`: the defaults of its `config.json` and what is particular to its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paged_infer.config import ConfigError
from paged_infer.layers.rotary import DivisorScaling, LinearScaling, Llama3Scaling, RopeConfig, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and flags of a decoder-only transformer with RMSNorm, RoPE, grouped-query attention and a gated MLP.

    Attributes:
        family: row of `FAMILIES`.
        vocab_size: rows of the embedding and of the LM head.
        max_position_embeddings: context length, in tokens.
        tie_word_embeddings: the LM head is the embedding, unless the checkpoint brings a different one.
        qkv_bias, o_bias, mlp_bias: these projections have biases.
        qk_norm: queries and keys are normed per head before the rotation.
        windows: [num_layers]; how many keys a token of that layer sees, itself included; 0 = all before it.
        eos_token_ids: ids that end a sequence, as the model's config names them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    eos_token_ids: frozenset[int]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            _whole(name, getattr(self, name))
        for name in ("head_dim", "max_position_embeddings"):
            _whole(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.rope.rotary_dim % 2 or not 0 < self.rope.rotary_dim <= self.head_dim:
            raise ConfigError(f"rotary dimension {self.rope.rotary_dim}: expected an even number up to {self.head_dim}")


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"model config: {name}={value!r}, expected a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one `model_type` differ.

    Attributes:
        defaults: values of `config.json` fields that the file may leave out.
        qkv_bias, o_bias, mlp_bias: True, False, or the `config.json` field that says so.
        sliding: layers that see only the last `sliding_window` keys: none, all, or those that `use_sliding_window`,
            `layer_types` and `max_window_layers` name.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    sliding: Literal["none", "all", "by_layer"] = "none"


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
    "qwen2": Family(
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        qkv_bias=True,
        sliding="by_layer",
    ),
    "qwen3": Family(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding="by_layer",
    ),
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed `config.json`, as transformers 4 and 5 write it.

    Raises `ConfigError` naming the field: an architecture, activation or RoPE type that is not supported, or a required
    field that is missing.
    """
    name = _family_name(hf)
    family = FAMILIES[name]
    values = {**family.defaults, **hf}
    hidden_act = values.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {hidden_act!r} is not supported; supported: silu")

    num_layers, num_heads = _required(values, "num_hidden_layers"), _required(values, "num_attention_heads")
    hidden_size = _required(values, "hidden_size")
    head_dim = values.get("head_dim") or hidden_size // num_heads
    max_position_embeddings = values["max_position_embeddings"]

    def flag(setting: bool | str) -> bool:
        return bool(values.get(setting, False)) if isinstance(setting, str) else setting

    return ModelConfig(
        family=name,
        vocab_size=_required(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=_hf_rope(values, head_dim),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_hf_windows(values, family, num_layers),
        eos_token_ids=_ids(values.get("eos_token_id")),
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
    return ModelConfig(
        family=name,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=value("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=optional("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(
            theta=optional("rope.freq_base", 10000.0),
            rotary_dim=optional("rope.dimension_count", head_dim),
            scaling=_gguf_scaling(optional, rope_divisors),
        ),
        max_position_embeddings=value("context_length"),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm=FAMILIES[name].qk_norm,
        windows=(optional("attention.sliding_window", 0),) * num_layers,
        eos_token_ids=frozenset(token for token in eos if token is not None),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
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


def _hf_rope(values: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4), whichever is there."""
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError("RoPE parameters per layer type are not supported")
    if parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported for this architecture")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(f"rope_type {rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    theta = parameters.get("rope_theta") or values.get("rope_theta") or 10000.0
    return RopeConfig(theta=float(theta), rotary_dim=head_dim, scaling=_ROPE_TYPES[rope_type](parameters, values))


def _linear(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    return LinearScaling(float(_required(parameters, "factor")))


def _llama3(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    original = values.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return Llama3Scaling(
        factor=float(_required(parameters, "factor")),
        low_freq_factor=float(_required(parameters, "low_freq_factor")),
        high_freq_factor=float(_required(parameters, "high_freq_factor")),
        original_max_position_embeddings=original or values["max_position_embeddings"],
    )


_ROPE_TYPES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], RopeScaling | None]] = {
    "default": lambda parameters, values: None,
    "linear": _linear,
    "llama3": _llama3,
}


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
    if family.sliding == "all":
        return (window,) * num_layers
    if family.sliding == "none" or not values.get("use_sliding_window", False):
        return (0,) * num_layers
    layer_types = values.get("layer_types")
    if layer_types is None:
        first = values.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    kinds = {"full_attention": 0, "sliding_attention": window}
    unknown = set(layer_types) - kinds.keys()
    if unknown or len(layer_types) != num_layers:
        raise ConfigError(f"layer_types: expected {num_layers} of {', '.join(kinds)}, found {layer_types}")
    return tuple(kinds[kind] for kind in layer_types)
