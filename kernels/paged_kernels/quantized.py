"""Low-bit weights in one layout, whatever checkpoint format they come from.

A `GroupWeight` has one scale and one zero point for every output and every `group_size` inputs. Its numbers lie along
the inputs in 32-bit words, the first input in the lowest bits. GPTQ's files are stored so; AWQ's pack along the outputs
in the order 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit of output 0, 1, 2, … of a word."""


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """A weight [N, K] of `bits` (4 or 8) unsigned bits a number: scale * (number - zero).

    Attributes:
        qweight: [K * bits / 32, N] int32. scales: [K / group_size, N]. zeros: [K / group_size, N] uint8.
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

    def dequantize(self) -> Tensor:
        """[N, K] float32, inputs in the order they come."""
        numbers = unpack(self.qweight, self.bits).float()
        scales, zeros = (x.float().repeat_interleave(self.group_size, dim=0) for x in (self.scales, self.zeros))
        weight = scales * (numbers - zeros)
        if self.permutation is None:
            return weight.t().contiguous()
        return torch.empty_like(weight).index_copy_(0, self.permutation, weight).t().contiguous()


def unpack(words: Tensor, bits: int) -> Tensor:
    """[W, N] int32 -> [W * 32 / bits, N] uint8, lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = words[:, None, :] >> shifts[None, :, None] & (1 << bits) - 1
    return numbers.flatten(0, 1).to(torch.uint8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """[K, N] unsigned numbers below 2^bits -> [K * bits / 32, N] int32, first row in the lowest bits."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, device=numbers.device)
    words = (numbers.long().view(-1, per_word, numbers.shape[1]) << shifts[None, :, None]).sum(dim=1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, bits: int, v2: bool = False
) -> GroupWeight:
    """GPTQ's tensors: qweight [K * bits / 32, N], qzeros [G, N * bits / 32], scales [G, N], g_idx [K] input -> group.

    Version 1 stores zero points less 1. Raises ValueError where groups are of different sizes.
    """
    zeros = unpack(qzeros.t(), bits).t()
    if not v2:
        zeros = zeros + 1 & (1 << bits) - 1
    inputs = qweight.shape[0] * 32 // bits
    group_size = inputs // len(scales)
    permutation = None
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(inputs, device=g_idx.device) // group_size):
        if not (torch.bincount(g_idx.long(), minlength=len(scales)) == group_size).all():
            raise ValueError(f"g_idx: expected {group_size} inputs in each of {len(scales)} groups")
        permutation = torch.argsort(g_idx, stable=True)
        qweight = pack(unpack(qweight, bits)[permutation], bits)
    return GroupWeight(qweight.contiguous(), scales.contiguous(), zeros.contiguous(), bits, group_size, permutation)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupWeight:
    """AWQ's tensors (GEMM version, 4 bits): qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]."""
    shifts = torch.tensor(_AWQ_SHIFTS, device=qweight.device)
    numbers, zeros = ((words[..., None] >> shifts & 15).flatten(1) for words in (qweight, qzeros))
    return GroupWeight(pack(numbers, 4), scales.contiguous(), zeros.to(torch.uint8), 4, len(qweight) // len(scales))
