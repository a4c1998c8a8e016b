"""Launch settings hold what kernels and chips ask for, on every shape."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from paged_kernels.triton.settings import (
    MAX_SPLIT_QUERIES,
    AttentionSettings,
    Chip,
    attention_settings,
    gemm_settings,
    heads_settings,
    row_settings,
)

CHIPS = {
    "ampere": Chip(108, 166912, register_operands=True),
    "hopper": Chip(132, 232448),
    "cdna": Chip(304, 65536, hip=True),
}


def attention(chip: Chip, num_seqs: int = 64, queries: int = 1, length: int = 2048, **shape: int) -> AttentionSettings:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "itemsize": 2, "kv_itemsize": 2} | shape
    return attention_settings(
        chip,
        num_tokens=num_seqs * queries,
        num_seqs=num_seqs,
        max_seqlen_q=queries,
        max_seq_len=length,
        **sizes,
    )


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_attention_tiles_fit(chip: Chip) -> None:
    for head_dim, group, itemsize, kv_itemsize, queries in itertools.product(
        (16, 64, 80, 96, 128, 256), (1, 3, 4, 9, 16, 20, 71), (2, 4), (1, 2, 4), (1, 2, 7, 64, 4096)
    ):
        if kv_itemsize > itemsize:
            continue
        chosen = attention(
            chip,
            queries=queries,
            num_heads=group,
            num_kv_heads=1,
            head_dim=head_dim,
            itemsize=itemsize,
            kv_itemsize=kv_itemsize,
        )
        assert chosen.block_m >= group
        for size in (chosen.block_m, chosen.block_n, chosen.num_splits, chosen.num_warps):
            assert size & (size - 1) == 0
        assert min(chosen.block_m, chosen.block_n) >= 16
        depth = max(16, 1 << (head_dim - 1).bit_length())
        buffered = chosen.num_stages if chosen.num_stages > 1 else 0
        keys_and_values = 2 * buffered * chosen.block_n * depth * kv_itemsize
        assert keys_and_values <= chip.shared_bytes


def test_keys_are_split_where_processors_would_be_idle() -> None:
    hopper = CHIPS["hopper"]
    assert attention(hopper, num_seqs=64).num_splits == 1
    assert attention(hopper, num_seqs=1, length=32768).num_splits == 32
    assert attention(hopper, num_seqs=1, length=500).num_splits == 1
    assert attention(hopper, num_seqs=4, length=32768).num_splits == 8
    assert attention(hopper, num_seqs=1, queries=MAX_SPLIT_QUERIES + 1, length=32768).num_splits == 1


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_product_tiles_fit(chip: Chip) -> None:
    for rows, outputs, inputs, itemsize, bits in itertools.product(
        (1, 16, 100, 5000), (40, 6144), (64, 14336), (1, 2, 4), (4, 8, 16)
    ):
        chosen = gemm_settings(chip, rows=rows, outputs=outputs, inputs=inputs, itemsize=itemsize, weight_bits=bits)
        assert min(chosen.block_m, chosen.block_n, chosen.block_k) >= 16
        assert chosen.splits * chosen.block_k <= max(inputs, chosen.block_k)
        buffered = chosen.num_stages if chosen.num_stages > 1 else 0
        assert buffered * (chosen.block_m + chosen.block_n) * chosen.block_k * itemsize <= chip.shared_bytes


def test_same_tiles_do_not_depend_on_the_batch() -> None:
    chip = replace(CHIPS["hopper"], same_tiles=True)
    batches = itertools.product((1, 64), (1, 7, 4096), (100, 32768))
    assert len({attention(chip, num_seqs=s, queries=q, length=n) for s, q, n in batches}) == 1
    sizes = {"outputs": 64, "inputs": 14336, "itemsize": 2, "weight_bits": 4}
    assert len({gemm_settings(chip, rows=rows, **sizes) for rows in (1, 16, 100, 5000)}) == 1


def test_rows_and_heads() -> None:
    assert row_settings(4096).block == 4096
    assert row_settings(577).block == 1024
    assert row_settings(1).num_warps == 1
    assert heads_settings(48, 128).block * 128 <= 2048
    assert heads_settings(3, 64).block == 4
