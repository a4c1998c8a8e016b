"""Rotary frequencies: known numbers, and Hugging Face's own buffers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paged_infer.layers.rotary import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    inverse_frequencies,
    rope_table,
    yarn_magnitude,
)

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LLAMA3_HF = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_frequencies() -> None:
    """Llama 3.1: short wavelengths kept (28), blended (29 to 33), long ones divided by 8 (35 on)."""
    found = inverse_frequencies(RopeConfig(theta=5e5, rotary_dim=128, scaling=LLAMA3), 8192)
    plain = [5e5 ** (-2 * i / 128) for i in range(64)]
    expected = {28: 3.211446e-3, 29: 2.166571e-3, 30: 1.371894e-3, 33: 3.126938e-4, 35: 9.556212e-5, 63: 3.068926e-7}
    for i, value in expected.items():
        assert found[i].item() == pytest.approx(value, rel=1e-6)
    assert found[28].item() == pytest.approx(plain[28], rel=1e-6)
    assert found[35].item() == pytest.approx(plain[35] / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 3.0}, LinearScaling(3.0)),
        (LLAMA3_HF, LLAMA3),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_table_is_hugging_faces(parameters: dict[str, object], scaling: RopeScaling | None, head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 5e5, **parameters},
    )
    positions = torch.arange(8192)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = rope_table(RopeConfig(theta=5e5, rotary_dim=head_dim, scaling=scaling), 8192)
    half = head_dim // 2
    assert table.shape == (8192, head_dim)
    assert table.dtype == torch.float32
    # one rounding of the largest angle (8191 radians) is 5e-4
    assert (table[:, :half] - cos[0, :, :half]).abs().max() < 1e-3
    assert (table[:, half:] - sin[0, :, :half]).abs().max() < 1e-3
    assert (table[:, :half] - cos[0, :, :half]).abs().mean() < 1e-6


def test_the_magnitude_yarn_recommends() -> None:
    assert yarn_magnitude(8.0) == pytest.approx(1.207944, abs=1e-6)
    assert yarn_magnitude(1.0) == 1.0


def test_divisors_are_applied_one_by_one() -> None:
    found = inverse_frequencies(RopeConfig(theta=1e4, rotary_dim=8, scaling=DivisorScaling((1.0, 2.0, 4.0, 8.0))), 8)
    assert found.tolist() == pytest.approx([1.0, 0.1 / 2, 0.01 / 4, 0.001 / 8], rel=1e-6)


def test_table_of_partial_rotation() -> None:
    table = rope_table(RopeConfig(theta=1e4, rotary_dim=4), 3)
    assert table.shape == (3, 4)
    assert table[2].tolist() == pytest.approx([math.cos(2), math.cos(0.02), math.sin(2), math.sin(0.02)], rel=1e-6)
