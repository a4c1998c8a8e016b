"""Low-bit weights in two layouts, whatever checkpoint format they come from.

A `GroupWeight` has one scale and one zero point for every output and every `group_size` inputs. Its numbers lie along
the inputs in 32-bit words, the first input in the lowest bits. GPTQ's files are stored so; AWQ's pack along the outputs
in the order 0 2 4 6 1 3 5 7. A `ScaledWeight` is a matrix of int8 or float8 numbers with scales and no zero points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 128
"""Outputs and inputs that share a scale in block-scaled float8 weights."""

_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit of output 0, 1, 2, … of a word."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight's numbers are kept, without the numbers.

    Attributes:
        kind: `group` is a `GroupWeight`; `int8` and `fp8` are a `ScaledWeight`.
        bits: of a number.
        group_size: inputs that share a scale; None = all of them.
        rounds_activations: the product is done in 8 bits on both sides.
    """

    kind: Literal["group", "int8", "fp8"]
    bits: int
    group_size: int | None = None
    rounds_activations: bool = False

    def __str__(self) -> str:
        name = f"int{self.bits}" if self.kind == "group" else self.kind
        return f"{name} W{self.bits}A{self.bits}" if self.rounds_activations else f"{name} weight-only"

    def bytes_of(self, outputs: int, inputs: int) -> int:
        """What a weight [outputs, inputs] takes, scales (16 bits) and zero points (8) included."""
        groups = 1 if self.group_size is None else -(-inputs // self.group_size)
        side = 3 if self.kind == "group" else 4
        return outputs * inputs * self.bits // 8 + outputs * groups * side


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """A weight [N, K] of `bits` (4 or 8) unsigned bits a number: scale * (number - zero).

    Attributes:
        qweight: [K * bits / 32, N] int32. scales: [K / group_size, N]. zeros: [K / group_size, N] uint8; they may
            reach 2^bits where that is no more than 255.
        permutation: [K] int64, where inputs are grouped in another order than they come: row k belongs to input
            permutation[k].
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_size: int
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        words, outputs = self.qweight.shape
        inputs = words * 32 // self.bits
        groups = inputs // self.group_size
        if self.bits not in (4, 8) or self.qweight.dtype != torch.int32:
            raise ValueError(f"qweight: expected int32, 4 or 8 bits a number, got {self.qweight.dtype}, {self.bits}")
        if groups * self.group_size != inputs or self.scales.shape != (groups, outputs):
            raise ValueError(
                f"scales: expected [{inputs} / {self.group_size}, {outputs}], got {list(self.scales.shape)}"
            )
        if self.zeros.shape != self.scales.shape or self.zeros.dtype != torch.uint8:
            raise ValueError(f"zeros: expected uint8 {list(self.scales.shape)}, got {list(self.zeros.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.qweight.shape[1], self.qweight.shape[0] * 32 // self.bits

    @property
    def format(self) -> WeightFormat:
        return WeightFormat("group", self.bits, self.group_size)

    def dequantize(self) -> Tensor:
        """[N, K] float32, inputs in the order they come."""
        numbers = unpack(self.qweight, self.bits).float()
        scales, zeros = (x.float().repeat_interleave(self.group_size, dim=0) for x in (self.scales, self.zeros))
        weight = scales * (numbers - zeros)
        if self.permutation is None:
            return weight.t().contiguous()
        return torch.empty_like(weight).index_copy_(0, self.permutation, weight).t().contiguous()

    def scale_rows(self, factors: Tensor) -> GroupWeight:
        """Output n times factors[n] [N], exactly but for the rounding of scales."""
        scales = (self.scales.float() * factors).to(self.scales.dtype)
        return GroupWeight(self.qweight, scales, self.zeros, self.bits, self.group_size, self.permutation)

    def rows(self, start: int, stop: int) -> GroupWeight:
        """Outputs [start, stop)."""
        qweight, scales, zeros = (x[:, start:stop].contiguous() for x in (self.qweight, self.scales, self.zeros))
        return GroupWeight(qweight, scales, zeros, self.bits, self.group_size, self.permutation)

    def columns(self, start: int, stop: int) -> GroupWeight | None:
        """Inputs [start, stop), in smaller groups where these are cut through.

        None where a word is cut through, or inputs are grouped in another order than they come.
        """
        per_word, size = 32 // self.bits, math.gcd(self.group_size, start, stop)
        if self.permutation is not None or size % per_word:
            return None
        groups = torch.arange(start, stop, size, device=self.scales.device) // self.group_size
        qweight = self.qweight[start // per_word : stop // per_word].contiguous()
        return GroupWeight(qweight, self.scales[groups], self.zeros[groups], self.bits, size)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [N, K] of int8 or float8_e4m3fn numbers: scale * number.

    Attributes:
        numbers: [N, K].
        scales: float32 [N or ceil(N / 128), 1 or ceil(K / 128)], one for an output or 128 of them and for all inputs
            or 128 of them.
        rounds_activations: inputs too are to be rounded to such numbers, a token (and 128 of them) at a time.
    """

    numbers: Tensor
    scales: Tensor
    rounds_activations: bool

    def __post_init__(self) -> None:
        n, k = self.numbers.shape
        if self.numbers.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"numbers: expected int8 or float8_e4m3fn, got {self.numbers.dtype}")
        rows, columns = self.scales.shape
        if rows not in (n, -(-n // BLOCK)) or columns not in (1, -(-k // BLOCK)):
            raise ValueError(
                f"scales: expected [{n}, 1] or [ceil({n} / 128), ceil({k} / 128)], got [{rows}, {columns}]"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def format(self) -> WeightFormat:
        kind: Literal["int8", "fp8"] = "int8" if self.numbers.dtype == torch.int8 else "fp8"
        return WeightFormat(kind, 8, BLOCK if self.scales.shape[1] > 1 else None, self.rounds_activations)

    def row_scales(self) -> Tensor:
        """[N, 1 or ceil(K / 128)]: a row of scales for every output."""
        n = len(self.numbers)
        return self.scales if len(self.scales) == n else self.scales.repeat_interleave(BLOCK, dim=0)[:n]

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        scales = self.row_scales().float()
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(BLOCK, dim=1)[:, : self.numbers.shape[1]]
        return self.numbers.float() * scales

    def scale_rows(self, factors: Tensor) -> ScaledWeight:
        """Output n times factors[n] [N]."""
        return ScaledWeight(self.numbers, self.row_scales() * factors[:, None], self.rounds_activations)

    def rows(self, start: int, stop: int) -> ScaledWeight:
        """Outputs [start, stop)."""
        return ScaledWeight(self.numbers[start:stop], self.row_scales()[start:stop], self.rounds_activations)

    def columns(self, start: int, stop: int) -> ScaledWeight | None:
        """Inputs [start, stop); None where a block of them is cut through."""
        scales = self.scales
        if scales.shape[1] > 1:
            if start % BLOCK or (stop % BLOCK and stop != self.numbers.shape[1]):
                return None
            scales = scales[:, start // BLOCK : -(-stop // BLOCK)].contiguous()
        return ScaledWeight(self.numbers[:, start:stop].contiguous(), scales, self.rounds_activations)


QuantizedWeight = GroupWeight | ScaledWeight


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Weights of the same inputs as one, along their outputs; None where they are of different kinds."""
    first = parts[0]
    if isinstance(first, GroupWeight):
        groups = [part for part in parts if isinstance(part, GroupWeight)]
        alike = [
            part.format == first.format and part.scales.dtype == first.scales.dtype and _same(part, first)
            for part in groups
        ]
        if len(groups) < len(parts) or not all(alike):
            return None
        qweight, scales, zeros = (
            torch.cat([getattr(part, name) for part in groups], dim=1) for name in ("qweight", "scales", "zeros")
        )
        return GroupWeight(qweight, scales, zeros, first.bits, first.group_size, first.permutation)
    scaled = [part for part in parts if isinstance(part, ScaledWeight)]
    if len(scaled) < len(parts) or any(part.format != first.format for part in scaled):
        return None
    whole = all(len(part.scales) != len(part.numbers) and len(part.numbers) % BLOCK == 0 for part in scaled[:-1])
    blocks = whole and len(scaled[-1].scales) != len(scaled[-1].numbers)
    return ScaledWeight(
        torch.cat([part.numbers for part in scaled]),
        torch.cat([part.scales if blocks else part.row_scales() for part in scaled]),
        first.rounds_activations,
    )


def _same(one: GroupWeight, other: GroupWeight) -> bool:
    a, b = one.permutation, other.permutation
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def unpack(words: Tensor, bits: int) -> Tensor:
    """[W, N] int32 -> [W * 32 / bits, N] uint8, lowest bits first; numbers of 3 bits run on from word to word."""
    if bits == 3:
        bit = torch.arange(0, 96, 3, device=words.device)
        triples = words.long().view(-1, 3, words.shape[1]) & 0xFFFFFFFF
        low = triples[:, bit // 32] >> (bit % 32)[None, :, None]
        high = triples[:, (bit // 32 + 1).clamp(max=2)] << (32 - bit % 32)[None, :, None]
        return ((low | high) & 7).flatten(0, 1).to(torch.uint8)
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = words[:, None, :] >> shifts[None, :, None] & (1 << bits) - 1
    return numbers.flatten(0, 1).to(torch.uint8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """[K, N] unsigned numbers below 2^bits -> [K * bits / 32, N] int32, first row in the lowest bits."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, device=numbers.device)
    words = (numbers.long().view(-1, per_word, numbers.shape[1]) << shifts[None, :, None]).sum(dim=1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def from_numbers(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int, g_idx: Tensor | None = None) -> GroupWeight:
    """Unpacked numbers [K, N] with scales and zeros [G, N]; g_idx [K] input -> group, None = G runs of equal length.

    Numbers of 2 or 3 bits are kept in 4. Raises ValueError where K or the groups don't divide.
    """
    inputs = len(numbers)
    kept = 8 if bits == 8 else 4
    if inputs % len(scales) or inputs % (32 // kept):
        raise ValueError(f"{inputs} inputs cannot be cut into {len(scales)} groups and words of {32 // kept} numbers")
    group_size = inputs // len(scales)
    permutation = None
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(inputs, device=g_idx.device) // group_size):
        if not (torch.bincount(g_idx.long(), minlength=len(scales)) == group_size).all():
            raise ValueError(f"g_idx: expected {group_size} inputs in each of {len(scales)} groups")
        permutation = torch.argsort(g_idx, stable=True)
        numbers = numbers[permutation]
    return GroupWeight(
        pack(numbers, kept), scales.contiguous(), zeros.to(torch.uint8).contiguous(), kept, group_size, permutation
    )


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, bits: int, v2: bool = False
) -> GroupWeight:
    """GPTQ's tensors: qweight [K * bits / 32, N], qzeros [G, N * bits / 32], scales [G, N], g_idx [K] input -> group.

    `bits` is 2, 3, 4 or 8. Version 1 stores zero points less 1, so that the largest number stored, 15 of 4 bits, is one
    more than a weight's number can be, 16. Raises ValueError where groups are of different sizes, and for the one zero
    point that a byte does not hold: 256, of 8 bits.
    """
    zeros = unpack(qzeros.t().contiguous(), bits).t()
    if not v2:
        if bits == 8 and bool((zeros == 255).any()):
            raise ValueError("qzeros hold 255, which in version 1 is the zero point 256; expected at most 254")
        zeros = zeros + 1
    return from_numbers(unpack(qweight, bits), scales, zeros, bits, g_idx)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupWeight:
    """AWQ's tensors (GEMM version, 4 bits): qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]."""
    shifts = torch.tensor(_AWQ_SHIFTS, device=qweight.device)
    numbers, zeros = ((words[..., None] >> shifts & 15).flatten(1) for words in (qweight, qzeros))
    return GroupWeight(pack(numbers, 4), scales.contiguous(), zeros.to(torch.uint8), 4, len(qweight) // len(scales))


def to_awq(numbers: Tensor) -> Tensor:
    """Numbers [R, N] below 16 -> [R, N / 8] int32 as AWQ's files hold them; the inverse of what `from_awq` unpacks."""
    shifts = torch.tensor(_AWQ_SHIFTS, device=numbers.device)
    words = (numbers.long().view(len(numbers), -1, 8) << shifts).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def round_scaled(weight: Tensor, dtype: torch.dtype, rounds_activations: bool = True) -> ScaledWeight:
    """Weight [N, K] to int8 or float8_e4m3fn, a scale for each output; the nearest numbers."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    weight = weight.float()
    scales = (weight.abs().amax(dim=1, keepdim=True) / largest).clamp(min=1e-12)
    numbers = weight / scales
    return ScaledWeight((numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales, rounds_activations)


def group_grid(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points, float32 [N, K / group_size], that put the range of each group of weight [N, K] and 0 on
    the numbers 0 .. 2^bits - 1."""
    n, k = weight.shape
    groups = weight.float().view(n, k // group_size, group_size)
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-8)
    return scales, (-low / scales).round()


def round_grouped(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Numbers uint8 [N, K]: the nearest on a grid [N, G] as `group_grid` gives it."""
    n, k = weight.shape
    groups = weight.float().view(n, scales.shape[1], -1) / scales[..., None] + zeros[..., None]
    return groups.round().clamp(0, (1 << bits) - 1).to(torch.uint8).view(n, k)


def round_group_weight(weight: Tensor, bits: int, group_size: int, dtype: torch.dtype = torch.float16) -> GroupWeight:
    """Weight [N, K] to the nearest numbers of `bits`, scales in `dtype`."""
    scales, zeros = group_grid(weight, bits, group_size)
    scales = scales.to(dtype).float().clamp(min=2.0**-24)
    numbers = round_grouped(weight, scales, zeros, bits)
    return from_numbers(numbers.t(), scales.t().to(dtype), zeros.t(), bits)
