"""Norms, rotary embedding with the store, activations and the cache, under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from paged_kernels.interface import AttentionMeta
from paged_kernels.reference import ReferenceBackend
from paged_kernels.triton.backend import TritonBackend
from paged_kernels.triton.kv_cache import TritonKVCache
from torch import Tensor

from tests.kernels.test_fused import random, rms_norm, rotated
from tests.pairwise import pairwise

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
ROUNDING = {F32: 2e-6, F16: 2.0**-11, BF16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16])


def assert_rounded(got: Tensor, exact: Tensor, absolute: float = 1e-6) -> None:
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[got.dtype] * 1.01 + 1e-6, atol=absolute)


@DTYPES
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (3, 7), (5, 33), (4, 576), (1, 1003)])
def test_norms(tokens, hidden, dtype):
    backend = TritonBackend(dtype, "cpu")
    x, residual, weight = random(0, tokens, hidden), random(1, tokens, hidden), random(2, hidden)
    got = backend.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert_rounded(got, rms_norm(x, weight, 1e-5))
    x = x.to(dtype)
    expected = residual + x.float()
    got = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert_rounded(got, rms_norm(expected, weight, 1e-5))


def test_norm_of_rows_with_a_stride():
    x = random(0, 4, 50)
    got = TritonBackend(F32, "cpu").rms_norm(x[:, 10:43], torch.ones(33), 1e-5)
    assert_rounded(got, rms_norm(x[:, 10:43], torch.ones(33), 1e-5))


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 5), (2, 1536), (1, 1100)])
def test_gated_activations(tokens, size, dtype):
    backend = TritonBackend(dtype, "cpu")
    gate_up = (random(0, tokens, 2 * size) * 5).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(backend.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)
    for approximate in (False, True):
        exact = F.gelu(gate, approximate="tanh" if approximate else "none") * up
        assert_rounded(backend.gelu_mul(gate_up, approximate), exact, 1e-5)  # 1 + erf(-4) cancels in float32
        assert_rounded(ReferenceBackend(dtype).gelu_mul(gate_up, approximate), exact, 1e-5)


def store_meta(slots: Tensor, positions: Tensor) -> AttentionMeta:
    one = torch.zeros(1, dtype=torch.int32)
    return AttentionMeta(positions.int(), slots, one, one, one[None], 1, 1)


ROPE_SHAPES = {  # heads, key heads, head_dim, rotary_dim, block size, which are normed
    "d64": (9, 3, 64, 64, 16, ""),
    "d128": (4, 1, 128, 128, 32, "qk"),
    "d80": (2, 2, 80, 20, 48, "q"),
    "d96": (3, 1, 96, 46, 16, "k"),
    "d256": (16, 1, 256, 256, 16, "qk"),
}


@pytest.mark.parametrize(
    "row",
    pairwise({"shape": list(ROPE_SHAPES), "dtype": [F32, F16, BF16], "kv_dtype": [None, INT8, FP8]}),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_rope_and_store(row):
    """Cells of the cache that no token goes to keep what they had."""
    num_heads, num_kv_heads, head_dim, rotary_dim, block_size, norms = ROPE_SHAPES[row["shape"]]
    dtype, kv_dtype = row["dtype"], row["kv_dtype"]
    num_blocks, layer = 3, 1
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:6]
    slots[[2, 5]] = -1
    tokens = len(slots)
    positions = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:tokens]
    angles = torch.arange(60).double()[:, None] * 0.7 ** torch.arange(rotary_dim // 2)
    rope = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    qkv = random(2, tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    qkv[0, num_heads * head_dim :] = 0  # a zero head has no scale
    q_norm = random(3, head_dim) if "q" in norms else None
    k_norm = random(4, head_dim) if "k" in norms else None
    meta = store_meta(slots, positions)
    caches = []
    for backend in (TritonBackend(dtype, "cpu", kv_dtype), ReferenceBackend(dtype, "cpu", kv_dtype)):
        kv = backend.make_kv_cache(2, num_blocks, block_size, num_kv_heads, head_dim)
        if kv_dtype is None:
            kv.k.fill_(float("nan"))
            kv.v.fill_(float("nan"))
        q = backend.rope_and_store(qkv, meta, rope, kv, layer, num_heads, q_norm, k_norm, 1e-6)
        caches.append((kv, q))
    (kv, got), (reference_kv, reference_q) = caches

    heads = qkv.double().view(tokens, -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm, 1e-6)
    k = k if k_norm is None else rms_norm(k, k_norm, 1e-6)
    q, k = rotated(q, angles[positions]), rotated(k, angles[positions])
    assert got.dtype == dtype
    rounding = {"rtol": ROUNDING[dtype] * 1.01 + 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.double(), q, **rounding)
    torch.testing.assert_close(got, reference_q, **rounding)
    stored = slots >= 0
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots[stored]] = False
    for exported, twin, expected in zip(kv.export(layer), reference_kv.export(layer), (k, v), strict=True):
        cells, exact = exported.flatten(0, 1), expected[stored]
        found = cells[slots[stored]].double()
        if kv_dtype is None:
            torch.testing.assert_close(found, exact, **rounding)
            assert cells[untouched].isnan().all()
        else:  # half a step of int8; of fp8, 2^-4 of the number, or half of its least step
            largest = exact.abs().amax(dim=-1, keepdim=True)
            allowed = largest / 127 * 0.501 if kv_dtype == INT8 else exact.abs() * 2**-4 + largest / 448 * 2**-9
            assert ((found - exact).abs() <= allowed + 1e-6).all()
            steps = (found - twin.flatten(0, 1)[slots[stored]].double()).abs() / allowed.clamp(min=1e-6)
            assert steps.max() <= 2.1  # rounding on either side of a half step
            assert (cells[untouched] == 0).all()


@pytest.mark.parametrize("kv_dtype", [F32, F16, INT8, FP8])
def test_copies_reach_every_layer_and_happen_in_order(kv_dtype):
    kv = TritonKVCache(2, 6, 16, 1, 16, kv_dtype, torch.device("cpu"))
    for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=torch.Generator().manual_seed(0)))
    before = [kv.export(layer) for layer in range(2)]
    kv.copy_blocks([(0, 1), (1, 2), (3, 0), (4, 3)])
    for layer, tensors in enumerate(before):
        for old, new in zip(tensors, kv.export(layer), strict=True):
            assert torch.equal(new, old[[3, 0, 0, 4, 4, 5]])


@pytest.mark.parametrize("kv_dtype", [F32, BF16, INT8, FP8])
def test_bytes_of_a_block_are_those_of_the_cache(kv_dtype):
    for backend in (TritonBackend(F32, "cpu", kv_dtype), ReferenceBackend(F32, "cpu", kv_dtype)):
        kv = backend.make_kv_cache(3, 7, 16, 2, 64)
        assert backend.kv_bytes_per_block(3, 16, 2, 64) * 7 == kv.nbytes


def test_refuses_tensors_that_do_not_fit():
    backend = TritonBackend(F32, "cpu")
    x, weight = torch.ones(2, 8), torch.ones(8)
    kv = backend.make_kv_cache(1, 2, 16, 1, 64)
    meta = store_meta(torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    rope = torch.ones(4, 64)
    for call in (
        lambda: backend.rms_norm(x, torch.ones(7), 1e-5),
        lambda: backend.rms_norm(x.T.contiguous().T, weight, 1e-5),
        lambda: backend.add_rms_norm(x, torch.ones(3, 8), weight, 1e-5),
        lambda: backend.silu_mul(torch.ones(2, 7)),
        lambda: backend.silu_mul(x[:, ::2]),
        lambda: backend.rope_and_store(torch.ones(2, 191), meta, rope, kv, 0, 1),
        lambda: backend.rope_and_store(torch.ones(2, 192), meta, rope[:, :63], kv, 0, 1),
        lambda: backend.rope_and_store(torch.ones(2, 192), meta, torch.ones(4, 66), kv, 0, 1),
        lambda: TritonBackend(torch.float64, "cpu"),
        lambda: TritonKVCache(1, 2, 16, 1, 64, torch.int16, torch.device("cpu")),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
