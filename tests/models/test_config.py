"""Reading config.json in the spellings there are, and refusing by name what is not supported."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from paged_infer.config import ConfigError
from paged_infer.layers.rotary import DivisorScaling, LinearScaling, Llama3Scaling
from paged_infer.models.config import config_from_gguf, config_from_hf
from paged_infer.models.families import ARCHITECTURES

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
FAMILY_ARCHITECTURES = {family: architecture for architecture, family in ARCHITECTURES.items()} | {
    "gemma3_text": "Gemma3ForCausalLM"
}


@pytest.mark.parametrize("family", FAMILY_ARCHITECTURES)
def test_fields_left_out_have_hugging_faces_defaults(family: str) -> None:
    shape = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 30}
    if family == "gpt2":
        shape = {"vocab_size": 96, "n_embd": 256, "n_layer": 30}
    given: dict[str, Any] = shape | {"architectures": [FAMILY_ARCHITECTURES[family]]}
    given |= {"n_head": 32} if family == "gpt2" else {"num_attention_heads": 32}
    if family in ("qwen2", "qwen3", "smollm3"):
        given |= {"use_sliding_window": True}
    hf = AutoConfig.for_model(family, **given)
    config = config_from_hf(given)
    assert config.family == family
    assert config.num_kv_heads == getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    assert config.head_dim == (getattr(hf, "head_dim", None) or 256 // 32)
    assert config.norm_eps == (hf.layer_norm_epsilon if family == "gpt2" else hf.rms_norm_eps)
    assert config.max_position_embeddings == hf.max_position_embeddings
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.bos_token_id == hf.bos_token_id
    assert config.eos_token_ids == (frozenset() if hf.eos_token_id is None else {hf.eos_token_id})
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * 30
    if family != "gpt2":
        for rope, kind in zip(config.ropes, kinds, strict=True):
            parameters = hf.rope_parameters.get(kind, hf.rope_parameters)
            assert rope is None or rope.theta == parameters["rope_theta"]
    if config.experts is not None:
        assert config.experts.num_experts == (getattr(hf, "num_local_experts", None) or hf.num_experts)
        assert config.experts.top_k == hf.num_experts_per_tok
        assert config.experts.shared_size == getattr(hf, "shared_expert_intermediate_size", 0)
    if family in ("mistral", "phi3", "mixtral", "qwen3_moe"):
        assert config.windows == (hf.sliding_window or 0,) * 30
    else:
        windows = {"full_attention": 0, "sliding_attention": getattr(hf, "sliding_window", None)}
        assert config.windows == tuple(windows[kind] or 0 for kind in kinds)


def test_a_written_hf_config_reads_back() -> None:
    for family, architecture in FAMILY_ARCHITECTURES.items():
        hf = AutoConfig.for_model(family, **{name: value for name, value in LLAMA.items() if name != "architectures"})
        config = config_from_hf(hf.to_dict() | {"architectures": [architecture]})
        if family == "gpt2":
            assert (config.num_layers, config.num_heads, config.intermediate_size) == (3, 4, 256)
            continue
        assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 96)


def test_head_dim_given_and_not() -> None:
    assert config_from_hf(LLAMA).head_dim == 16
    assert config_from_hf(LLAMA | {"head_dim": None}).head_dim == 16
    assert config_from_hf(LLAMA | {"head_dim": 32}).head_dim == 32
    assert config_from_hf(LLAMA | {"head_dim": 32}).ropes[0].rotary_dim == 32


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
    rope = config_from_hf(LLAMA | spelling).ropes[0]
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
    rope = config_from_hf(LLAMA | spelling).ropes[0]
    assert (rope.theta, rope.scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 8.0}}, "spiral"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8}}, "short_factor, expected 8"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv"),
        ({"architectures": ["OlmoeForCausalLM"], "num_experts_per_tok": 65}, "65 of 64 experts"),
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
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM, MistralForCausalLM, .*GptOssForCausalLM"):
        config_from_hf(LLAMA | {"architectures": ["OPTForCausalLM"]})
    with pytest.raises(ConfigError, match="default, linear, dynamic, llama3, yarn, longrope"):
        config_from_hf(LLAMA | {"rope_scaling": {"rope_type": "spiral"}})


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
    assert (config.ropes[0].theta, config.ropes[0].rotary_dim, config.ropes[0].scaling) == (10000.0, 16, None)
    assert config.eos_token_ids == {2, 3}
    assert config.tie_word_embeddings
    assert not any([config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm])
    assert not config_from_gguf(GGUF, GGUF_SHAPES | {"output.weight": (320, 64)}).tie_word_embeddings
    assert config_from_gguf(GGUF, GGUF_SHAPES | {"blk.0.attn_q.bias": (64,)}).qkv_bias


def test_gguf_rope() -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 5e5}
    rope = config_from_gguf(GGUF | linear, GGUF_SHAPES).ropes[0]
    assert (rope.theta, rope.scaling) == (5e5, LinearScaling(4.0))
    unscaled = config_from_gguf(GGUF | linear | {"llama.rope.scaling.type": "none"}, GGUF_SHAPES).ropes[0]
    assert unscaled.scaling is None
    divisors = (1.0,) * 4 + (8.0,) * 4
    assert config_from_gguf(GGUF, GGUF_SHAPES, divisors).ropes[0].scaling == DivisorScaling(divisors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "rwkv7"}, "rwkv7"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.context_length": None}, "llama.context_length"),
        ({"llama.attention.value_length": 8}, "value_length"),
    ],
)
def test_gguf_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_gguf(GGUF | change, GGUF_SHAPES)
