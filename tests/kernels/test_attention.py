"""Paged attention on every backend, dtype and instruction set against float64 on keys and values kept aside."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_kernels.cpu.kv_cache import CpuKVCache
from paged_kernels.cpu.ops import FusedOps
from paged_kernels.interface import AttentionMeta
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from tests.kernels.conftest import ISAS
from tests.kernels.paged_batch import PagedBatch

F32, BF16 = torch.float32, torch.bfloat16
Load = Callable[[str], ctypes.CDLL]

MIXED = [(0, 37), (700, 1), (130, 20), (0, 1), (5, 1), (511, 1), (512, 1), (250, 53), (31, 2), (1029, 3)]
"""(cached, new) tokens: whole prompts, chunks in mid-sequence, decodes; across panels, chunks and splits."""


class Ops:
    """The attention half of a backend, for a pair of dtypes that the whole backend might not choose on this machine."""

    def __init__(self, library: ctypes.CDLL, activations: torch.dtype, kv: torch.dtype) -> None:
        self.activation_dtype, self.kv_dtype = activations, kv
        self.ops = FusedOps(library)

    def rope_and_store(self, qkv: Tensor, meta: AttentionMeta, rope: Tensor, kv: CpuKVCache, layer: int, heads: int):
        return self.ops.rope_and_store(qkv, meta, rope, kv, layer, heads, None, None, 0.0)

    def cache(self, batch: PagedBatch, fill: bool = True) -> CpuKVCache:
        """Every slot that no token of the batch has been stored to holds NaN."""
        num_kv_heads, head_dim = batch.keys[0].shape[1:]
        kv = CpuKVCache(1, batch.num_blocks, batch.block_size, num_kv_heads, head_dim, self.kv_dtype)
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
        if fill:
            batch.fill(self, kv)
        return kv

    def attention(
        self, q: Tensor, kv: CpuKVCache, meta: AttentionMeta, scale: float, window: int = 0, **options: Any
    ) -> Tensor:
        return self.ops.attention(q, kv, 0, meta, scale, window, **options)

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        """float32: rounding of sums of weights that add to one. bfloat16: q, weights and output each round at 2^-9."""
        tolerance = 4e-6 if self.activation_dtype == F32 else 2e-2
        assert got.dtype == self.activation_dtype
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


DTYPES = [(F32, F32), (F32, BF16), (BF16, BF16)]


@pytest.fixture(params=DTYPES, ids=["f32", "f32-bf16kv", "bf16"])
def dtypes(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype]:
    return request.param


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest, load_kernels: Load, dtypes: tuple[torch.dtype, torch.dtype]) -> Ops:
    return Ops(load_kernels(request.param), *dtypes)


@pytest.fixture
def native(load_kernels: Load) -> Ops:
    return Ops(load_kernels("native"), F32, F32)


def queries(batch: PagedBatch, num_heads: int, dtype: torch.dtype) -> Tensor:
    shape = (len(batch.meta.positions), num_heads, batch.keys[0].shape[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (9, 3, 64, 16, 0),
        (4, 1, 80, 32, 0),
        (2, 2, 96, 16, 100),
        (4, 1, 128, 48, 130),
        (9, 1, 256, 16, 0),
        (5, 1, 16, 32, 4),
        (7, 7, 48, 16, 1),
        (64, 1, 32, 16, 600),
    ],
)
def test_mixed_batches(ops, num_heads, num_kv_heads, head_dim, block_size, window):
    batch = PagedBatch.random(MIXED, block_size, num_kv_heads, head_dim, round_to=ops.kv_dtype)
    q = queries(batch, num_heads, ops.activation_dtype)
    scale = head_dim**-0.5
    got = ops.attention(q, ops.cache(batch), batch.meta, scale, window)
    ops.assert_close(got, batch.attention(q, scale, window))


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(native, window, softcap, with_sinks):
    """Scores beyond the cap, and sinks from hardly any weight to nearly all; whole and split sequences."""
    batch = PagedBatch.random(MIXED, 16, 2, 32)
    q = queries(batch, 6, F32) * 6
    sinks = torch.tensor([-50.0, -2.0, 0.0, 2.0, 5.0, 90.0]) if with_sinks else None
    got = native.attention(q, native.cache(batch), batch.meta, 0.3, window, softcap=softcap, sinks=sinks)
    expected = batch.attention(q, 0.3, window, softcap, sinks)
    tolerance = 3e-5  # the capped scores' own rounding, in the exponent
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("sink", "weight"), [(2.0, 0.10651), (0.0, 1 / 3), (20.0, 0.0)])
def test_a_sink_is_one_more_key_without_a_value(native, sink, weight):
    """Two keys of score 0."""
    batch = PagedBatch.random([(1, 1)], 16, 1, 16)
    q = torch.zeros(1, 1, 16)
    got = native.attention(q, native.cache(batch), batch.meta, 1.0, sinks=torch.tensor([sink]))
    torch.testing.assert_close(got[0], weight * batch.values[0].sum(dim=0)[0], atol=2e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("window", [0, 129])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (4, 1), (9, 1)])
def test_every_shape(ops, num_heads, num_kv_heads, head_dim, block_size, window):
    test_mixed_batches(ops, num_heads, num_kv_heads, head_dim, block_size, window)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 128, 129, 511, 512, 513, 640, 1024, 1025])
def test_decode_at_the_edges_of_panels_chunks_and_splits(native, length):
    batch = PagedBatch.random([(length - 1, 1)], 16, 1, 16, seed=length)
    q = queries(batch, 3, F32)
    for window in (0, 1, 2, 128, length - 1, length, length + 1):
        if window >= 0:
            got = native.attention(q, native.cache(batch), batch.meta, 0.5, window)
            native.assert_close(got, batch.attention(q, 0.5, window))


def test_large_scores_do_not_overflow(ops):
    """Scores in the thousands, the largest first, in the middle, last. Their own rounding is 1e-4 in the exponent."""
    batch = PagedBatch.random([(999, 1), (0, 300), (600, 40)], 16, 1, 64, round_to=ops.kv_dtype)
    for keys, place in zip(batch.keys, (0, 150, 630), strict=True):
        keys[place] *= 32
    q = queries(batch, 2, ops.activation_dtype) * 8
    expected = batch.attention(q, 1.0)
    tolerance = 2e-3 if ops.activation_dtype == F32 else 2e-2
    got = ops.attention(q, ops.cache(batch), batch.meta, 1.0)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_agrees_with_the_reference_backend(native):
    batch = PagedBatch.random(MIXED, 16, 3, 64)
    reference = ReferenceBackend()
    kv = reference.make_kv_cache(1, batch.num_blocks, 16, 3, 64)
    batch.fill(reference, kv)
    q = queries(batch, 9, F32)
    for window in (0, 200):
        expected = reference.attention(q, kv, 0, batch.meta, 0.125, window)
        native.assert_close(native.attention(q, native.cache(batch), batch.meta, 0.125, window), expected.double())


def test_a_row_depends_on_its_own_sequence_only(ops):
    """Bit for bit: alone or in a batch, on one thread or two."""
    batch = PagedBatch.random(MIXED, 16, 3, 64, round_to=ops.kv_dtype)
    kv = ops.cache(batch)
    q = queries(batch, 9, ops.activation_dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = ops.attention(q, kv, batch.meta, 0.125)
        torch.set_num_threads(1)
        assert torch.equal(ops.attention(q, kv, batch.meta, 0.125), together)
    finally:
        torch.set_num_threads(threads)
    bounds = batch.meta.cu_seqlens_q.tolist()
    for s in range(len(MIXED)):
        rows = slice(bounds[s], bounds[s + 1])
        assert torch.equal(ops.attention(q[rows], kv, batch.alone(s), 0.125), together[rows])


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_neighbours_behind_the_same_blocks(ops, block_size, with_sinks):
    """Beams, forks of a fork, a prefix longer than a split, one that ends within a chunk: bit for bit as alone."""
    lengths = [300, 290, 301, 333, 1100, 600, 1300, 40, 200, 199, 200, 577, 578, 700, 5, 900, 300]
    batch = PagedBatch.random([(n, 1) for n in lengths], block_size, 3, 64, round_to=ops.kv_dtype)
    for first, others, tokens in (
        (0, [1, 2, 3], 288),
        (4, [5, 6], 576),
        (8, [9, 10], 144),
        (11, [12, 13], 576),
        (12, [13], 576),
        (15, [16], 48),
    ):
        batch.share(first, others, tokens)
    kv = ops.cache(batch)
    q = queries(batch, 9, ops.activation_dtype)
    sinks = torch.linspace(-2, 3, 9) if with_sinks else None
    together = ops.attention(q, kv, batch.meta, 0.125, sinks=sinks)
    ops.assert_close(together, batch.attention(q, 0.125, sinks=sinks))
    for s in range(len(lengths)):
        assert torch.equal(ops.attention(q[s : s + 1], kv, batch.alone(s), 0.125, sinks=sinks), together[s : s + 1])


@pytest.mark.parametrize("window", [0, 40, 600])
def test_a_prompt_in_chunks_is_the_prompt_at_once(ops, window):
    """Bit for bit, in chunks of many tokens or one, before and past the keys of one part."""
    whole = PagedBatch.random([(0, 1300)], 16, 1, 64, round_to=ops.kv_dtype)
    kv = ops.cache(whole)
    q = queries(whole, 3, ops.activation_dtype)
    at_once = ops.attention(q, kv, whole.meta, 0.125, window)
    edges = [0, 100, 177, 178, 500, 520, 530, 900, 901, 1023, 1024, 1025, 1299, 1300]
    for start, stop in itertools.pairwise(edges):
        chunk = PagedBatch.random([(start, stop - start)], 16, 1, 64).meta
        meta = AttentionMeta(
            chunk.positions,
            whole.meta.slot_mapping[start:stop],
            chunk.cu_seqlens_q,
            chunk.seq_lens,
            whole.meta.block_tables,
            chunk.max_seqlen_q,
            chunk.max_seq_len,
        )
        assert torch.equal(ops.attention(q[start:stop], kv, meta, 0.125, window), at_once[start:stop]), (start, stop)


def test_window_counts_the_query_itself(native):
    """Window 4 at position p sees keys p-3 .. p: changing key p-4 changes nothing, changing p-3 does."""
    batch = PagedBatch.random([(0, 12)], 16, 1, 16)
    q = queries(batch, 1, F32)
    before = native.attention(q, native.cache(batch), batch.meta, 0.25, 4)
    batch.values[0][0] += 1
    after = native.attention(q, native.cache(batch), batch.meta, 0.25, 4)
    changed = (before != after).any(dim=1)
    assert changed.tolist() == [True] * 4 + [False] * 8


def test_blocks_before_the_window_may_be_gone(ops):
    """Their table entries are arbitrary: here far outside the cache."""
    batch = PagedBatch.random([(299, 1), (260, 40)], 16, 1, 32, round_to=ops.kv_dtype)
    kv = ops.cache(batch)
    q = queries(batch, 2, ops.activation_dtype)
    expected = batch.attention(q, 0.2, 50)
    for s, first_query in enumerate((299, 260)):
        batch.meta.block_tables[s, : (first_query - 49) // 16] = 2**31 - 1
    ops.assert_close(ops.attention(q, kv, batch.meta, 0.2, 50), expected)


def test_non_finite_keys_stay_in_their_sequence(ops):
    batch = PagedBatch.random([(40, 1), (40, 1), (0, 33)], 16, 1, 32, round_to=ops.kv_dtype)
    q = queries(batch, 2, ops.activation_dtype)
    expected = batch.attention(q, 0.2)
    batch.keys[1][3], batch.values[1][3] = float("nan"), float("inf")
    got = ops.attention(q, ops.cache(batch), batch.meta, 0.2)
    assert got[1].isnan().all()
    ops.assert_close(got[[0, *range(2, 35)]], expected[[0, *range(2, 35)]])


def test_padding_tokens_get_zeros_and_empty_sequences_nothing(ops):
    batch = PagedBatch.random([(20, 1), (7, 0), (3, 2)], 16, 1, 32, round_to=ops.kv_dtype)
    q = queries(batch, 2, ops.activation_dtype)
    padded = torch.cat([q, torch.full((2, 2, 32), float("nan"), dtype=q.dtype)])
    got = ops.attention(padded, ops.cache(batch), batch.meta, 0.2)
    ops.assert_close(got[:3], batch.attention(q, 0.2))
    assert (got[3:] == 0).all()


@pytest.mark.parametrize("kv_dtype", [F32, BF16])
def test_addresses_beyond_two_to_the_31_elements(load_kernels, kv_dtype):
    """Only the pages of the blocks used take memory."""
    num_kv_heads, head_dim, block_size = 1, 64, 16
    blocks = 2**31 // (num_kv_heads * head_dim * block_size) + 3
    try:
        kv = CpuKVCache(1, blocks, block_size, num_kv_heads, head_dim, kv_dtype)
    except OSError as error:
        pytest.skip(f"this machine does not map a cache of that size: {error}")
    ops = Ops(load_kernels("native"), F32, kv_dtype)
    batch = PagedBatch.random([(30, 1), (0, 5)], block_size, num_kv_heads, head_dim, round_to=kv_dtype, spare_blocks=0)
    batch.meta.block_tables[:, :2] += blocks - batch.num_blocks
    batch.fill(ops, kv)
    q = queries(batch, 3, F32)
    ops.assert_close(ops.attention(q, kv, batch.meta, 0.125), batch.attention(q, 0.125))
    assert not kv.k[0, 0].any()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_cache_exports_what_was_stored_and_copies_blocks_in_every_layer(load_kernels, dtype):
    ops = Ops(load_kernels("native"), F32, dtype)
    batch = PagedBatch.random([(0, 40)], 16, 2, 32, round_to=dtype, spare_blocks=1)
    kv = CpuKVCache(2, 4, 16, 2, 32, dtype)
    batch.fill(ops, kv, layer=1)
    assert not any(x.any() for x in kv.export(0))
    table = batch.meta.block_tables[0, :3].long()
    spare = ({0, 1, 2, 3} - set(table.tolist())).pop()
    for exported, stored in zip(kv.export(1), (batch.keys[0], batch.values[0]), strict=True):
        assert torch.equal(exported[table].flatten(0, 1)[:40], stored)
        assert not exported[spare].any()
        assert not exported[table[2], 8:].any()
    kv.copy_blocks([(int(table[1]), spare), (spare, int(table[0]))])
    for exported, stored in zip(kv.export(1), (batch.keys[0], batch.values[0]), strict=True):
        for block in (spare, table[0], table[1]):
            assert torch.equal(exported[block], stored[16:32])
    assert kv.nbytes == 2 * 2 * 4 * 16 * 2 * 32 * dtype.itemsize


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [(8, 64, F32), (24, 64, F32), (16, 40, F32), (0, 64, F32), (16, 64, torch.half)],
)
def test_cache_refuses_what_the_layout_cannot_hold(block_size, head_dim, dtype):
    with pytest.raises(ValueError, match=r"multiple of 16|float32 or bfloat16"):
        CpuKVCache(1, 2, block_size, 1, head_dim, dtype)


def test_refuses_tensors_that_do_not_fit(native):
    batch = PagedBatch.random([(3, 2)], 16, 1, 32)
    kv, q = native.cache(batch), queries(batch, 2, F32)
    wrong_meta = AttentionMeta(*(getattr(batch.meta, name) for name in AttentionMeta.__slots__))
    object.__setattr__(wrong_meta, "block_tables", batch.meta.block_tables.long())
    for bad_q, bad_kv, bad_meta in (
        (q.transpose(0, 1).contiguous().transpose(0, 1), kv, batch.meta),
        (q.double(), kv, batch.meta),
        (q.bfloat16(), kv, batch.meta),
        (q[..., :16].contiguous(), kv, batch.meta),
        (q, CpuKVCache(1, 4, 16, 3, 32, F32), batch.meta),
        (q, kv, wrong_meta),
    ):
        with pytest.raises(ValueError, match=r"expected|need|fit"):
            native.attention(bad_q, bad_kv, bad_meta, 1.0)
    with pytest.raises(IndexError):
        native.ops.attention(q, kv, 1, batch.meta, 1.0, 0)
