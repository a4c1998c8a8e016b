"""Every family's logits against Hugging Face in float32, beyond windows and over alternating layers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from paged_kernels.interface import Backend
from torch import Tensor

from paged_infer.models.decoder import Decoder
from paged_infer.models.source import resolve_model
from tests.fixtures.checkpoints import hf_logits, random_checkpoint
from tests.models.stepper import Stepper

TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 7.0, 8.0],
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "smollm3 window": ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 5}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 48, "sliding_window": 6, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
    ),
    "phi3": ("phi3", {}),
    "phi3 partial, longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "sliding_window": 20,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 7}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "gpt2": ("gpt2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn factors": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2_moe": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 80, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe window": ("qwen3_moe", EXPERTS | {"use_sliding_window": True, "sliding_window": 4}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 6,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: random_checkpoint(root / name.replace(" ", "_"), family, **{"num_hidden_layers": 4, **config})
        for name, (family, config) in FAMILIES.items()
    }


def load(folder: Path, backend: Backend, max_position: int | None = None) -> Decoder:
    source = resolve_model(str(folder))
    return Decoder(source.config(), backend, source.weights(), max_position=max_position)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_one_shot_chunks_and_decode(folders: dict[str, Path], backend: Backend, name: str) -> None:
    """Two sequences side by side, in one piece, and in pieces down to single tokens."""
    sequences = [tokens(45), tokens(33, seed=1)]
    expected = [hf_logits(folders[name], ids) for ids in sequences]
    changed = [*sequences[0][:35], (sequences[0][35] + 1) % VOCAB_SIZE, *sequences[0][36:]]
    assert (expected[0] - hf_logits(folders[name], changed))[-1].abs().max() > 1e-2
    decoder = load(folders[name], backend)
    pieces = [[(0, 7), (1, 20)], [(0, 1), (1, 1)], [(0, 13)], *[[(1, 1), (0, 2)]] * 12]
    for steps in ([[(0, 45), (1, 33)]], pieces):
        found = Stepper(decoder, backend, sequences).run(steps)
        for logits, wanted in zip(found, expected, strict=True):
            assert_close(logits, wanted)
