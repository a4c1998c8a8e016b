"""Paged attention under the interpreter against float64 on keys and values kept aside."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_kernels.interface import SharedPrefixes
from paged_kernels.reference import ReferenceBackend, ReferenceKVCache
from paged_kernels.triton import backend as backend_module
from paged_kernels.triton.backend import TritonBackend
from paged_kernels.triton.kv_cache import TritonKVCache
from paged_kernels.triton.settings import Chip
from torch import Tensor

from tests.kernels.paged_batch import PagedBatch
from tests.pairwise import pairwise

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
TOLERANCE = {F32: 4e-6, F16: 2e-3, BF16: 2e-2}

BATCHES = {
    "mixed": [(0, 37), (70, 1), (30, 9), (0, 1), (63, 2)],
    "decodes": [(0, 1), (16, 1), (131, 1)],
    "split": [(1029, 1), (3, 1)],
    "prompt": [(0, 71)],
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 40},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "window, softcap, sinks": {"window": 5, "softcap": 3.0, "sinks": True},
}
OPTIONS: dict[str, list[Any]] = {
    "dtype": [F32, F16, BF16],
    "kv_dtype": [None, INT8, FP8],
    "heads": [(3, 3), (4, 2), (3, 1), (5, 1), (8, 1), (16, 1)],
    "head_dim": [64, 80, 96, 128, 256],
    "block_size": [16, 32],
    "batch": list(BATCHES),
    "mask": list(MASKS),
}


def described(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "").replace(" ", "") for value in row.values())


def queries(batch: PagedBatch, num_heads: int, dtype: torch.dtype) -> Tensor:
    shape = (len(batch.meta.positions), num_heads, batch.keys[0].shape[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def filled(backend: TritonBackend, batch: PagedBatch) -> TritonKVCache:
    """A cache in which what nobody stored is NaN, or has a scale of NaN; stored by the reference, which is fast."""
    shape = (1, batch.num_blocks, batch.block_size, *batch.keys[0].shape[1:])
    reference = ReferenceBackend(backend.dtype, "cpu", backend.kv_dtype)
    stored = reference.make_kv_cache(*shape)
    kv = backend.make_kv_cache(*shape)
    assert isinstance(stored, ReferenceKVCache)
    assert isinstance(kv, TritonKVCache)
    for tensor in stored.scales if kv.quantized else (stored.k, stored.v):
        tensor.fill_(float("nan"))
    batch.fill(reference, stored)
    kv.k.copy_(stored.k)
    kv.v.copy_(stored.v)
    if kv.quantized:
        kv.k_scale.copy_(stored.scales[0])
        kv.v_scale.copy_(stored.scales[1])
    return kv


def as_stored(kv: TritonKVCache, batch: PagedBatch) -> None:
    """What the cache holds in place of what was put in: how well it is rounded is another test's question."""
    k, v = kv.export(0)
    for s, keys in enumerate(batch.keys):
        blocks = batch.meta.block_tables[s, : -(-len(keys) // batch.block_size)].long()
        batch.values[s] = v[blocks].flatten(0, 1)[: len(keys)]
        batch.keys[s] = k[blocks].flatten(0, 1)[: len(keys)]


def check(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    batch: str,
    mask: str,
) -> None:
    num_heads, num_kv_heads = heads
    paged = PagedBatch.random(BATCHES[batch], block_size, num_kv_heads, head_dim, round_to=dtype)
    backend = TritonBackend(dtype, "cpu", kv_dtype)
    q = queries(paged, num_heads, dtype)
    options = dict(MASKS[mask])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2, 4, num_heads)
    kv = filled(backend, paged)
    got = backend.attention(q, kv, 0, paged.meta, head_dim**-0.5, **options)
    tolerance = TOLERANCE[dtype]
    assert got.dtype == dtype
    if kv_dtype is not None:
        as_stored(kv, paged)
    expected = paged.attention(q, head_dim**-0.5, **options)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=described)
def test_every_pair_of_options(row):
    check(**row)


@pytest.mark.full
@pytest.mark.parametrize("row", [dict(zip(OPTIONS, row, strict=True)) for row in itertools.product(*OPTIONS.values())],
                         ids=described)  # fmt: skip
def test_every_combination(row):
    check(**row)


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_backend_agrees_with_the_formula(mask):
    paged = PagedBatch.random(BATCHES["mixed"], 16, 2, 32)
    reference = ReferenceBackend()
    kv = reference.make_kv_cache(1, paged.num_blocks, 16, 2, 32)
    paged.fill(reference, kv)
    q = queries(paged, 6, F32)
    options = dict(MASKS[mask])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2, 4, 6)
    got = reference.attention(q, kv, 0, paged.meta, 0.2, **options)
    torch.testing.assert_close(got.double(), paged.attention(q, 0.2, **options), atol=4e-6, rtol=4e-6)


def shared_batch(prefixes: list[tuple[int, int]], lengths: list[tuple[int, int]]) -> PagedBatch:
    """Sequences (cached, new); run g joins the next prefixes[g][0] of them over a prefix of prefixes[g][1] tokens."""
    batch = PagedBatch.random(lengths, 16, 2, 64)
    starts: list[int] = []
    first = 0
    for count, length in prefixes:
        blocks = length // 16
        for s in range(first, first + count):
            batch.meta.block_tables[s, :blocks] = batch.meta.block_tables[first, :blocks]
            batch.keys[s][:length] = batch.keys[first][:length]
            batch.values[s][:length] = batch.values[first][:length]
            starts.append(length)
        first += count
    bounds = torch.tensor([0, *itertools.accumulate(count for count, _ in prefixes)])
    cu_tokens = batch.meta.cu_seqlens_q[bounds]
    shared = SharedPrefixes(
        cu_tokens=cu_tokens,
        prefix_lens=torch.tensor([length for _, length in prefixes], dtype=torch.int32),
        block_tables=batch.meta.block_tables[bounds[:-1]].contiguous(),
        seq_starts=torch.tensor(starts, dtype=torch.int32),
        max_tokens=int(cu_tokens.diff().max()),
        max_prefix_len=max(length for _, length in prefixes),
    )
    batch.meta = replace(batch.meta, shared_prefixes=shared)
    return batch


@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [
        ([(4, 64)], [(64, 1), (70, 1), (95, 1), (200, 1)]),
        ([(2, 48), (1, 0), (3, 160)], [(50, 3), (48, 20), (5, 2), (161, 1), (190, 1), (160, 9)]),
        ([(2, 608)], [(610, 1), (640, 1)]),
    ],
)
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 2.0, 20.0])])
def test_shared_prefixes_change_nothing(prefixes, lengths, sinks):
    batch = shared_batch(prefixes, lengths)
    backend = TritonBackend(F32, "cpu")
    q = queries(batch, 4, F32)
    got = backend.attention(q, filled(backend, batch), 0, batch.meta, 0.125, sinks=sinks)
    expected = batch.attention(q, 0.125, sinks=sinks)
    torch.testing.assert_close(got.double(), expected, atol=4e-6, rtol=4e-6)


def test_a_shared_prefix_is_read_through_the_run_s_own_table():
    """The sequences' own table entries for it point at blocks of NaN: nothing may look there."""
    batch = shared_batch([(3, 64)], [(64, 1), (70, 2), (95, 1)])
    backend = TritonBackend(F32, "cpu")
    kv = filled(backend, batch)
    q = queries(batch, 4, F32)
    batch.meta.block_tables[:, :4] = 2**31 - 1
    got = backend.attention(q, kv, 0, batch.meta, 0.125)
    torch.testing.assert_close(got.double(), batch.attention(q, 0.125), atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_decode_at_the_edges_of_tiles(length):
    batch = PagedBatch.random([(length - 1, 1)], 16, 1, 64, seed=length)
    backend = TritonBackend(F32, "cpu")
    kv, q = filled(backend, batch), queries(batch, 3, F32)
    for window in {0, 1, 16, max(1, length - 1), length, length + 1}:
        got = backend.attention(q, kv, 0, batch.meta, 0.5, window)
        torch.testing.assert_close(got.double(), batch.attention(q, 0.5, window), atol=4e-6, rtol=4e-6)


def test_large_scores_do_not_overflow():
    batch = PagedBatch.random([(299, 1), (0, 100)], 16, 1, 64)
    for keys, place in zip(batch.keys, (0, 50), strict=True):
        keys[place] *= 32
    backend = TritonBackend(F32, "cpu")
    q = queries(batch, 2, F32) * 8
    got = backend.attention(q, filled(backend, batch), 0, batch.meta, 1.0)
    torch.testing.assert_close(got.double(), batch.attention(q, 1.0), atol=2e-3, rtol=2e-3)


def test_blocks_before_the_window_may_be_gone():
    """Their table entries are arbitrary: here far outside the cache."""
    batch = PagedBatch.random([(299, 1), (260, 40)], 16, 1, 64)
    backend = TritonBackend(F32, "cpu")
    kv, q = filled(backend, batch), queries(batch, 2, F32)
    for s, first_query in enumerate((299, 260)):
        batch.meta.block_tables[s, : (first_query - 49) // 16] = 2**31 - 1
    got = backend.attention(q, kv, 0, batch.meta, 0.2, 50)
    torch.testing.assert_close(got.double(), batch.attention(q, 0.2, 50), atol=4e-6, rtol=4e-6)


def test_non_finite_keys_stay_in_their_sequence():
    batch = PagedBatch.random([(40, 1), (40, 1), (0, 33)], 16, 1, 64)
    q = queries(batch, 2, F32)
    expected = batch.attention(q, 0.2)
    batch.keys[1][3], batch.values[1][3] = float("nan"), float("inf")
    backend = TritonBackend(F32, "cpu")
    got = backend.attention(q, filled(backend, batch), 0, batch.meta, 0.2).double()
    assert got[1].isnan().all()
    rest = [0, *range(2, 35)]
    torch.testing.assert_close(got[rest], expected[rest], atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("lengths", [[(20, 1), (7, 0), (3, 2)], [(1100, 1), (7, 0)]])
def test_padding_tokens_get_zeros_and_empty_sequences_nothing(lengths):
    batch = PagedBatch.random(lengths, 16, 1, 64)
    q = queries(batch, 2, F32)
    padded = torch.cat([q, torch.full((2, 2, 64), float("nan"))])
    backend = TritonBackend(F32, "cpu")
    got = backend.attention(padded, filled(backend, batch), 0, batch.meta, 0.2)
    torch.testing.assert_close(got[:-2].double(), batch.attention(q, 0.2), atol=4e-6, rtol=4e-6)
    assert (got[-2:] == 0).all()


def test_a_row_depends_on_its_own_sequence_only(monkeypatch):
    """Bit for bit where the chip is busy anyway, so that no keys are split."""
    monkeypatch.setattr(backend_module, "_INTERPRETER_CHIP", Chip(processors=1, shared_bytes=232448))
    lengths = [(0, 37), (70, 1), (30, 9)]
    batch = PagedBatch.random(lengths, 16, 2, 64)
    backend = TritonBackend(F32, "cpu")
    kv, q = filled(backend, batch), queries(batch, 4, F32)
    together = backend.attention(q, kv, 0, batch.meta, 0.125)
    bounds = batch.meta.cu_seqlens_q.tolist()
    for s in range(len(lengths)):
        rows = slice(bounds[s], bounds[s + 1])
        alone = backend.attention(q[rows].contiguous(), kv, 0, batch.alone(s), 0.125)
        torch.testing.assert_close(alone, together[rows], atol=1e-6, rtol=1e-6)


def test_addresses_beyond_two_to_the_31_elements():
    """Only the pages of the blocks used take memory."""
    block_size, head_dim = 16, 64
    blocks = 2**31 // (head_dim * block_size) + 3
    backend = TritonBackend(F32, "cpu", INT8)
    try:
        kv = backend.make_kv_cache(1, blocks, block_size, 1, head_dim)
    except RuntimeError as error:
        pytest.skip(f"this machine does not give a cache of that size: {error}")
    batch = PagedBatch.random([(30, 1), (0, 5)], block_size, 1, head_dim, spare_blocks=0)
    batch.meta.block_tables[:, :2] += blocks - batch.num_blocks
    batch.fill(backend, kv)
    q = queries(batch, 3, F32)
    got = backend.attention(q, kv, 0, batch.meta, 0.125)
    assert not kv.k[0, 0].any()
    torch.testing.assert_close(got.double(), batch.attention(q, 0.125), atol=2e-2, rtol=2e-2)


def test_refuses_what_does_not_fit():
    batch = PagedBatch.random([(3, 2)], 16, 1, 64)
    backend = TritonBackend(F32, "cpu")
    kv, q = filled(backend, batch), queries(batch, 2, F32)
    for bad in (q[..., :16].contiguous(), q.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="fit"):
            backend.attention(bad, kv, 0, batch.meta, 1.0)
    with pytest.raises(TypeError, match="ReferenceKVCache"):
        backend.attention(q, ReferenceBackend().make_kv_cache(1, 4, 16, 1, 64), 0, batch.meta, 1.0)
