"""Rotary position embedding: which angle each pair of a head's dimensions turns by, as a table of cosines and sines.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). A scaling changes the frequencies so
that positions beyond the trained context stay within reach.

All arithmetic is float32, in the order in which Hugging Face does it: the frequencies and angles that models were
trained with carry that rounding, and at position 2,000 a more exact table already moves logits by several 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """A change of the rotary frequencies."""

    def __call__(self, inv_freq: Tensor) -> Tensor:
        """[rotary_dim / 2] float32, radians per position -> the same, scaled."""
        ...


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`.

    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023).
    """

    factor: float

    def __call__(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    A wavelength is short below `original_max_position_embeddings / high_freq_factor` positions and long above
    `original_max_position_embeddings / low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, inv_freq: Tensor) -> Tensor:
        periods = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        kept = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return kept * inv_freq + (1 - kept) * inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each frequency divided by its own number; GGUF files carry Llama 3 scaling in this form."""

    divisors: tuple[float, ...] = field(repr=False)

    def __call__(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / torch.tensor(self.divisors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary embedding of a model.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading dimensions of each head that are rotated, an even number.
        scaling: None = the plain frequencies theta^(-2i / rotary_dim).
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    return inv_freq if rope.scaling is None else rope.scaling(inv_freq)


def rope_table(rope: RopeConfig, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim] float32: cosines in the first half of a row, sines in the second."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    return torch.cat([angles.cos(), angles.sin()], dim=1)
