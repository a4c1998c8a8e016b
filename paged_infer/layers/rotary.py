"""Rotary position embedding: which angle each pair of a head's dimensions turns by, as a table of cosines and sines.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). A scaling changes the frequencies so
that positions beyond the trained context stay within reach.

All arithmetic is float32, in the order in which Hugging Face does it: the frequencies and angles that models were
trained with carry that rounding, and at position 2,000 a more exact table already moves logits by several 1e-4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """A change of the rotary frequencies.

    `magnitude` multiplies cosines and sines, and so scales attention scores by its square.
    """

    @property
    def magnitude(self) -> float: ...

    def __call__(self, periods: Tensor, num_positions: int) -> Tensor:
        """[rotary_dim / 2] float32, theta^(2i / rotary_dim) -> radians per position, for that many positions."""
        ...


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`.

    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023).
    """

    magnitude: ClassVar[float] = 1.0
    factor: float

    def __call__(self, periods: Tensor, num_positions: int) -> Tensor:
        return 1.0 / periods / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    A wavelength is short below `original_max_position_embeddings / high_freq_factor` positions and long above
    `original_max_position_embeddings / low_freq_factor`.
    """

    magnitude: ClassVar[float] = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, periods: Tensor, num_positions: int) -> Tensor:
        inv_freq = 1.0 / periods
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return kept * inv_freq + (1 - kept) * inv_freq / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Dimensions that turn often within the trained context kept, those that hardly turn divided by `factor`.

    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023). `beta_fast` and `beta_slow`
    are the turns at which the linear blend between the two begins and ends; `truncate` rounds these ends outwards to
    whole dimensions. `theta` is the base of the frequencies.
    """

    theta: float
    factor: float
    original_max_position_embeddings: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __call__(self, periods: Tensor, num_positions: int) -> Tensor:
        low, high = self._dimension(self.beta_fast, len(periods)), self._dimension(self.beta_slow, len(periods))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(periods) - 1)
        ramp = (torch.arange(len(periods), dtype=torch.float32) - low) / (high - low if high > low else 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _dimension(self, turns: float, pairs: int) -> float:
        """Which pair of dimensions makes so many turns within the trained context."""
        return pairs * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(self.theta)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The magnitude that YaRN recommends for a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by its own number, from one of two lists: by how many positions there can be.

    Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024). Hugging Face changes lists
    when a sequence outgrows the original context, which makes keys already cached wrong; here a run has one list.
    """

    short_factor: tuple[float, ...] = field(repr=False)
    long_factor: tuple[float, ...] = field(repr=False)
    original_max_position_embeddings: int
    magnitude: float

    def __call__(self, periods: Tensor, num_positions: int) -> Tensor:
        is_long = num_positions > self.original_max_position_embeddings
        return 1.0 / (torch.tensor(self.long_factor if is_long else self.short_factor) * periods)


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each frequency divided by its own number; GGUF files carry Llama 3 scaling in this form."""

    magnitude: ClassVar[float] = 1.0
    divisors: tuple[float, ...] = field(repr=False)

    def __call__(self, periods: Tensor, num_positions: int) -> Tensor:
        return 1.0 / periods / torch.tensor(self.divisors)


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


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> Tensor:
    """[rotary_dim / 2] float32: radians per position of each pair of dimensions, for that many positions."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    periods = rope.theta**exponents
    return 1.0 / periods if rope.scaling is None else rope.scaling(periods, num_positions)


def rope_table(rope: RopeConfig | None, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim] float32: cosines in the first half of a row, sines in the second.

    Without a rotary embedding the table is [num_positions, 2] and rotates by nothing.
    """
    if rope is None:
        return torch.tensor([1.0, 0.0]).repeat(num_positions, 1)
    frequencies = inverse_frequencies(rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude
    return torch.cat([angles.cos(), angles.sin()], dim=1) * magnitude
