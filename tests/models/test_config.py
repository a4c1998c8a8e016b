"""Reading config.json in the spellings there are, and refusing by name what is not supported."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from paged_infer.config import ConfigError
from paged_infer.layers.rotary import DivisorScaling, LinearScaling, Llama3Scaling
from paged_infer.models.config import config_from_gguf, config_from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HF_CLASSES: dict[str, tuple[str, type[PretrainedConfig]]] = {
    "llama": ("LlamaForCausalLM", LlamaConfig),
    "mistral": ("MistralForCausalLM", MistralConfig),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config),
}


@pytest.mark.parametrize("family", HF_CLASSES)
def test_fields_left_out_have_hugging_faces_defaults(family: str) -> None:
    architecture, hf_class = HF_CLASSES[family]
    shape = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 30}
    given = shape | {"num_attention_heads": 32, "architectures": [architecture], "use_sliding_window": True}
    hf = hf_class(**given)
    config = config_from_hf(given)
    assert config.family == family
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.head_dim == hf.head_dim if hasattr(hf, "head_dim") else 256 // 32
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.max_position_embeddings == hf.max_position_embeddings
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.rope.theta == hf.rope_parameters["rope_theta"]
    assert config.bos_token_id == hf.bos_token_id
    assert config.eos_token_ids == (frozenset() if hf.eos_token_id is None else {hf.eos_token_id})
    if family == "llama":
        assert config.windows == (0,) * 30
    elif family == "mistral":
        assert config.windows == (hf.sliding_window,) * 30
    else:
        kinds = {"full_attention": 0, "sliding_attention": hf.sliding_window}
        assert config.windows == tuple(kinds[kind] for kind in hf.layer_types)


def test_a_written_hf_config_reads_back() -> None:
    for architecture, hf_class in HF_CLASSES.values():
        hf = hf_class(**{name: value for name, value in LLAMA.items() if name != "architectures"})
        config = config_from_hf(hf.to_dict() | {"architectures": [architecture]})
        assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 96)


def test_head_dim_given_and_not() -> None:
    assert config_from_hf(LLAMA).head_dim == 16
    assert config_from_hf(LLAMA | {"head_dim": None}).head_dim == 16
    assert config_from_hf(LLAMA | {"head_dim": 32}).head_dim == 32
    assert config_from_hf(LLAMA | {"head_dim": 32}).rope.rotary_dim == 32


@pytest.mark.parametrize(("given", "expected"), [(7, {7}), ([7, 9], {7, 9}), (None, set()), (0, {0})])
def test_eos(given: Any, expected: set[int]) -> None:
    assert config_from_hf(LLAMA | {"eos_token_id": given}).eos_token_ids == expected


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_rope_in_every_spelling(spelling: dict[str, Any]) -> None:
    rope = config_from_hf(LLAMA | spelling).rope
    assert rope.theta == 5e5
    assert rope.scaling == Llama3Scaling(**LLAMA3)


@pytest.mark.parametrize(
    ("spelling", "theta", "scaling"),
    [
        ({"rope_theta": 2e4, "rope_scaling": None}, 2e4, None),
        ({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}, 2e4, None),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4}}, 2e4, LinearScaling(4.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1e4, LinearScaling(4.0)),
        ({}, 1e4, None),
    ],
)
def test_other_rope_spellings(spelling: dict[str, Any], theta: float, scaling: object) -> None:
    rope = config_from_hf(LLAMA | spelling).rope
    assert (rope.theta, rope.scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_hf(LLAMA | change)


def test_what_is_supported_is_said() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        config_from_hf(LLAMA | {"architectures": ["OPTForCausalLM"]})
    with pytest.raises(ConfigError, match="default, linear, llama3"):
        config_from_hf(LLAMA | {"rope_scaling": {"rope_type": "yarn"}})


def test_layer_types_must_fit() -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    full, sliding = "full_attention", "sliding_attention"
    assert config_from_hf(qwen | {"layer_types": [sliding, full, sliding]}).windows == (8, 0, 8)
    assert config_from_hf(qwen | {"use_sliding_window": False, "layer_types": [sliding] * 3}).windows == (0, 0, 0)
    for layer_types in ([full], [full, "chunked_attention", full]):
        with pytest.raises(ConfigError, match="layer_types"):
            config_from_hf(qwen | {"layer_types": layer_types})


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}
GGUF_SHAPES = {"token_embd.weight": (320, 64), "blk.0.attn_q.weight": (64, 64)}


def test_gguf() -> None:
    config = config_from_gguf(GGUF, GGUF_SHAPES)
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (320, 16, 2)
    assert config.max_position_embeddings == 512
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.scaling) == (10000.0, 16, None)
    assert config.eos_token_ids == {2, 3}
    assert config.tie_word_embeddings
    assert not any([config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm])
    assert not config_from_gguf(GGUF, GGUF_SHAPES | {"output.weight": (320, 64)}).tie_word_embeddings
    assert config_from_gguf(GGUF, GGUF_SHAPES | {"blk.0.attn_q.bias": (64,)}).qkv_bias


def test_gguf_rope() -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 5e5}
    rope = config_from_gguf(GGUF | linear, GGUF_SHAPES).rope
    assert (rope.theta, rope.scaling) == (5e5, LinearScaling(4.0))
    unscaled = config_from_gguf(GGUF | linear | {"llama.rope.scaling.type": "none"}, GGUF_SHAPES).rope
    assert unscaled.scaling is None
    divisors = (1.0,) * 4 + (8.0,) * 4
    assert config_from_gguf(GGUF, GGUF_SHAPES, divisors).rope.scaling == DivisorScaling(divisors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.context_length": None}, "llama.context_length"),
        ({"llama.attention.value_length": 8}, "value_length"),
    ],
)
def test_gguf_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_gguf(GGUF | change, GGUF_SHAPES)
