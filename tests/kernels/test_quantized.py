"""Checkpoint formats of low-bit weights, read from words packed by hand."""

from __future__ import annotations

import pytest
import torch
from paged_kernels.quantized import ScaledWeight, from_awq, from_gptq, from_numbers, pack, unpack

from tests.models.quantized_files import words


def word(*nibbles: int) -> int:
    """The signed 32-bit word with the first nibble in the lowest bits."""
    value = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    return value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize(("v2", "zeros"), [(False, [8, 16, 1, 1, 1, 1, 1, 16]), (True, [7, 15, 0, 0, 0, 0, 0, 15])])
def test_gptq_words_hold_eight_inputs_lowest_bits_first(v2: bool, zeros: list[int]) -> None:
    """Eight outputs, eight inputs, one group. Version 1 stores zero points less 1: 15 is 16, not 0."""
    numbers = [[0, 1, 2, 3, 4, 5, 6, 15], [15, 14, 13, 12, 11, 10, 9, 8], *[[n, 15 - n] * 4 for n in range(6)]]
    scales = [0.5, 2.0, 1.0, 4.0, 0.25, 8.0, 16.0, 0.125]
    qweight = torch.tensor([[word(*row) for row in numbers]], dtype=torch.int32)
    qzeros = torch.tensor([[word(7, 15, 0, 0, 0, 0, 0, 15)]], dtype=torch.int32)
    weight = from_gptq(qweight, qzeros, torch.tensor([scales]), None, bits=4, v2=v2)
    exact = [[s * (n - zero) for n in row] for row, s, zero in zip(numbers, scales, zeros, strict=True)]
    assert weight.zeros.tolist() == [zeros]
    assert weight.dequantize().tolist() == exact


@pytest.mark.parametrize(("bits", "largest"), [(2, 4), (3, 8), (4, 16), (8, 255)])
def test_gptq_v1_zero_points_reach_one_past_the_numbers(bits: int, largest: int) -> None:
    """But for the 256 of 8 bits, which is said."""
    qweight = torch.zeros(bits, 32, dtype=torch.int32)
    stored = torch.full((32, 1), largest - 1)
    qzeros = torch.tensor([words(stored.flatten().tolist(), bits)], dtype=torch.int32)
    found = from_gptq(qweight, qzeros, torch.ones(1, 32), None, bits=bits).dequantize()
    assert found.tolist() == [[-largest] * 32] * 32
    if bits == 8:
        full = torch.full((1, 8), -1, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"255.*256"):
            from_gptq(qweight, full, torch.ones(1, 32), None, bits=8)
        assert from_gptq(qweight, full, torch.ones(1, 32), None, bits=8, v2=True).zeros.unique().tolist() == [255]


def test_gptq_with_inputs_in_another_order() -> None:
    """Act-order: g_idx says which group an input belongs to; numbers stand where the inputs are."""
    numbers = torch.arange(16)[:, None].expand(16, 8) % 16
    g_idx = torch.tensor([1, 0] * 8, dtype=torch.int32)
    scales = torch.tensor([1.0, 10.0])[:, None].expand(2, 8).contiguous()
    qzeros = torch.zeros(2, 1, dtype=torch.int32)
    weight = from_gptq(pack(numbers, 4), qzeros, scales, g_idx, bits=4, v2=True)
    assert weight.dequantize()[3].tolist() == [n * (10.0 if n % 2 == 0 else 1.0) for n in range(16)]
    with pytest.raises(ValueError, match="g_idx"):
        from_gptq(pack(numbers, 4), qzeros, scales, torch.tensor([0] * 15 + [1]), bits=4)


def test_groups_that_do_not_divide_the_inputs_are_refused() -> None:
    numbers, qzeros = torch.ones(48, 8, dtype=torch.uint8), torch.zeros(5, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="48 inputs cannot be cut into 5 groups"):
        from_gptq(pack(numbers, 4), qzeros, torch.ones(5, 8), None, bits=4)


def test_awq_words_hold_eight_outputs_in_their_own_order() -> None:
    """Nibbles of a word, lowest first, are outputs 0 2 4 6 1 3 5 7; zero points are stored as they are."""
    qweight = torch.tensor([[word(0, 2, 4, 6, 1, 3, 5, 7)], [word(9, 9, 9, 9, 15, 9, 9, 9)]] * 4, dtype=torch.int32)
    qzeros = torch.tensor([[word(1, 1, 1, 1, 2, 1, 1, 1)]], dtype=torch.int32)
    scales = torch.full((1, 8), 0.5)
    found = from_awq(qweight, qzeros, scales).dequantize()
    assert found.shape == (8, 8)
    zeros = [1, 2, 1, 1, 1, 1, 1, 1]
    assert found[:, 0].tolist() == [0.5 * (output - zeros[output]) for output in range(8)]
    assert found[:, 1].tolist() == [0.5 * ((15 if output == 1 else 9) - zeros[output]) for output in range(8)]


@pytest.mark.parametrize("bits", [4, 8])
def test_pack_and_unpack_are_inverse(bits: int) -> None:
    numbers = torch.randint(1 << bits, (64, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    words = pack(numbers, bits)
    assert words.shape == (64 * bits // 32, 5)
    assert torch.equal(unpack(words, bits), numbers)


@pytest.mark.parametrize(("span", "group_size"), [((32, 64), 32), ((48, 96), 16), ((0, 48), 16), ((8, 16), 8)])
def test_inputs_of_groups_cut_through_keep_their_scales(span: tuple[int, int], group_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers, zeros = (torch.randint(16, (rows, 5), generator=generator) for rows in (96, 3))
    scales = torch.rand(3, 5, generator=generator)
    weight = from_numbers(numbers, scales, zeros, 4).columns(*span)
    assert weight is not None
    assert weight.group_size == group_size
    exact = (numbers - zeros.repeat_interleave(32, dim=0)) * scales.repeat_interleave(32, dim=0)
    assert torch.equal(weight.dequantize(), exact[slice(*span)].t())


def test_inputs_that_cannot_be_cut_off() -> None:
    numbers = torch.ones(32, 5, dtype=torch.uint8)
    in_order, otherwise = torch.arange(32) // 16, torch.arange(32) % 2
    weights = [from_numbers(numbers, torch.ones(2, 5), torch.ones(2, 5), 4, order) for order in (in_order, otherwise)]
    assert weights[0].columns(0, 8) is not None
    assert weights[0].columns(0, 12) is None  # a word of eight
    assert weights[1].columns(0, 8) is None


def test_inputs_of_scaled_weights_are_cut_off_at_blocks() -> None:
    numbers = torch.arange(300).remainder(100).to(torch.int8).expand(130, 300)
    for scales in (torch.rand(130, 1), torch.rand(2, 3)):
        weight = ScaledWeight(numbers, scales, True)
        for span in ((0, 128), (128, 300), (256, 300)):
            part = weight.columns(*span)
            assert part is not None
            assert part.rounds_activations
            assert torch.equal(part.dequantize(), weight.dequantize()[:, slice(*span)])
        for span in ((0, 64), (64, 300)):
            assert (weight.columns(*span) is None) == (scales.shape[1] > 1)
