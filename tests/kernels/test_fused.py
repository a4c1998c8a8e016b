"""Norms, rotary embedding with the store, and the gated activation against their formulas in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from paged_kernels.cpu.kv_cache import CpuKVCache
from paged_kernels.cpu.ops import FusedOps
from paged_kernels.interface import AttentionMeta
from torch import Tensor

from tests.kernels.conftest import ISAS

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest, load_kernels: Callable[[str], ctypes.CDLL]) -> FusedOps:
    return FusedOps(load_kernels(request.param))


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rounded(got: Tensor, exact: Tensor, relative: float = 1e-6) -> None:
    """Within `relative` of the exact value; a bfloat16 result within half a unit in its last place besides."""
    if got.dtype == BF16:
        relative += 2.0**-8
    torch.testing.assert_close(got.double(), exact, rtol=relative, atol=1e-7)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (3, 7), (2, 8), (5, 33), (4, 576), (1, 1003)])
def test_rms_norm(ops, tokens, hidden, dtype):
    x, weight = random(0, tokens, hidden), random(1, hidden)
    got = ops.rms_norm(x, weight, 1e-5, dtype)
    assert got.dtype == dtype
    assert_rounded(got, rms_norm(x, weight, 1e-5))


def test_rms_norm_of_tiny_and_large_rows(ops):
    """eps decides for tiny rows; large ones do not overflow in the sum of squares."""
    x = torch.stack([torch.zeros(40), torch.full((40,), 1e-4), torch.full((40,), 1e17)])
    assert_rounded(ops.rms_norm(x, torch.ones(40), 1e-6, F32), rms_norm(x, torch.ones(40), 1e-6))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 5), (3, 576), (7, 100)])
def test_add_rms_norm(ops, tokens, hidden, dtype):
    x, residual, weight = random(0, tokens, hidden).to(dtype), random(1, tokens, hidden), random(2, hidden)
    expected = residual + x.float()
    got = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert got.dtype == dtype
    assert_rounded(got, rms_norm(expected, weight, 1e-5))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 5), (2, 16), (5, 1536), (1, 100)])
def test_silu_mul(ops, tokens, size, dtype):
    gate_up = (random(0, tokens, 2 * size) * 10).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("approximate", [False, True])
def test_gelu_mul(ops, approximate, dtype):
    gate_up = torch.cat([torch.linspace(-8, 8, 301), random(0, 301)])[None].to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = F.gelu(gate, approximate="tanh" if approximate else "none") * up
    relative = 2.0**-8 if dtype == BF16 else 0
    torch.testing.assert_close(ops.gelu_mul(gate_up, approximate).double(), exact, atol=2e-6, rtol=1e-5 + relative)


def test_silu_is_accurate_over_the_whole_range(ops):
    gate = torch.cat([torch.linspace(-87, 87, 20000), torch.tensor([-1e30, -200.0, -90.0, 200.0, 1e30, 0.0])])
    got = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(got.double(), gate.double() * torch.sigmoid(gate.double()), rtol=1e-6, atol=1e-36)


def test_rows_with_nan_touch_no_other_row(ops):
    x = random(0, 3, 40)
    clean = ops.rms_norm(x, torch.ones(40), 1e-5, F32), ops.silu_mul(x)
    x[1] = float("nan")
    for before, after in zip(clean, (ops.rms_norm(x, torch.ones(40), 1e-5, F32), ops.silu_mul(x)), strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])
        assert after[1].isnan().all()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, heads, head_dim], angles [T, half]: dims i and half + i are one complex number, turned by angle i."""
    half = angles.shape[1]
    turned = (
        torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize(("activations", "kv_dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size", "normed"),
    [(9, 3, 64, 64, 16, False), (4, 1, 128, 128, 32, True), (2, 2, 80, 20, 48, False), (3, 1, 96, 46, 16, True)],
)
def test_rope_and_store(ops, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, normed, activations, kv_dtype):
    """Cells of the cache that no token goes to keep their NaN."""
    num_blocks, layer = 5, 1
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:23]
    slots[[4, 22]] = -1
    tokens = len(slots)
    positions = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:tokens]
    angles = torch.arange(60).double()[:, None] * 0.7 ** torch.arange(rotary_dim // 2)
    rope = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    qkv = random(2, tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(activations)
    q_norm, k_norm = (random(3, head_dim), random(4, head_dim)) if normed else (None, None)
    kv = CpuKVCache(2, num_blocks, block_size, num_kv_heads, head_dim, kv_dtype)
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    meta = AttentionMeta(
        positions.int(), slots, *[torch.zeros(1, dtype=torch.int32)] * 2, torch.zeros(1, 1).int(), 1, 1
    )

    got = ops.rope_and_store(qkv, meta, rope, kv, layer, num_heads, q_norm, k_norm, 1e-6)

    heads = qkv.double().view(tokens, -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if normed:
        q, k = rms_norm(q, q_norm, 1e-6), rms_norm(k, k_norm, 1e-6)
    q, k = rotated(q, angles[positions]), rotated(k, angles[positions])
    assert got.dtype == activations
    tolerance = {"rtol": 2.0**-8, "atol": 1e-5} if BF16 in (activations, kv_dtype) else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got.double(), q, **tolerance)
    stored = slots >= 0
    for exported, expected in zip(kv.export(layer), (k, v), strict=True):
        cells = exported.flatten(0, 1)
        torch.testing.assert_close(cells[slots[stored]].double(), expected[stored], **tolerance)
        assert cells.isnan().all(dim=(1, 2)).sum() == len(cells) - stored.sum()
    assert all(x.isnan().all() for x in kv.export(0))


def test_two_threads_write_the_two_tokens_of_a_pair(ops):
    """Neighbouring bfloat16 tokens share a 32-bit word, and the middle of the batch is where the threads meet."""
    tokens, head_dim = 31, 16
    kv = CpuKVCache(1, 2, 16, 1, head_dim, BF16)
    meta = AttentionMeta(
        torch.zeros(tokens, dtype=torch.int32),
        torch.arange(tokens),
        *[torch.zeros(1, dtype=torch.int32)] * 2,
        torch.zeros(1, 1).int(),
        1,
        1,
    )
    rope = torch.tensor([[1.0] * 8 + [0.0] * 8])
    for repeat in range(50):
        qkv = random(repeat, tokens, 3 * head_dim).bfloat16().float()
        ops.rope_and_store(qkv, meta, rope, kv, 0, 1, None, None, 0.0)
        for exported, column in zip(kv.export(0), (1, 2), strict=True):
            stored = qkv[:, column * head_dim : (column + 1) * head_dim]
            assert torch.equal(exported.flatten(0, 1)[:tokens, 0], stored)


def test_refuses_tensors_that_do_not_fit(ops):
    x, weight = torch.ones(2, 8), torch.ones(8)
    for call in (
        lambda: ops.rms_norm(x.double(), weight, 1e-5, F32),
        lambda: ops.rms_norm(x, torch.ones(7), 1e-5, F32),
        lambda: ops.rms_norm(x.T.contiguous().T, weight, 1e-5, F32),
        lambda: ops.rms_norm(x, weight, 1e-5, torch.float16),
        lambda: ops.add_rms_norm(x, torch.ones(3, 8), weight, 1e-5),
        lambda: ops.add_rms_norm(x.half(), x, weight, 1e-5),
        lambda: ops.silu_mul(torch.ones(2, 7)),
        lambda: ops.silu_mul(x[:, ::2]),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
