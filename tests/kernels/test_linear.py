"""Packed linears and embeddings against exact products in float64.

The tolerance is that of a float32 sum: a dropped, doubled or misplaced product is orders of magnitude larger.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from paged_kernels.cpu.backend import CpuBackend
from paged_kernels.cpu.linear import OneDnnLinear, PackedEmbedding, PackedLinear, PackedWeight, has_bf16_dot
from paged_kernels.interface import Backend
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from tests.kernels.conftest import ISAS

Load = Callable[[str], ctypes.CDLL]

ODD_SHAPES = [
    (1, 1),
    (1, 7),
    (15, 8),
    (16, 16),
    (17, 3),
    (33, 31),
    (48, 577),
    (100, 1153),
]
"""(N, K): below, at and past a panel of 16 or 32 columns; K odd, shorter than the unrolled loop, past a block of K."""

MODEL_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Each output within float32 rounding of its own sum: K terms, of the size those terms have."""
    magnitude = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    error = (got.double() - exact(x, weight, bias)).abs()
    assert got.dtype == torch.float32
    assert not got.isnan().any()
    assert (error <= 1e-6 * magnitude + 1e-30).all(), f"off by {(error / magnitude).max():.1e} of the terms' size"


def random(generator: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(generator)).to(dtype)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors are full of NaN, so that a cell nobody writes shows."""
    empty = torch.empty

    def poisoned(*size: int, **options: object) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), ODD_SHAPES)
def test_every_row_count_of_odd_shapes(load_kernels: Load, isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias = random(1, n, k, dtype=dtype), random(2, n)
    linear = PackedLinear(PackedWeight(load_kernels(isa), weight, dtype), bias, torch.float32)
    for tokens in range(1, 28):
        x = random(100 + tokens, tokens, k)
        assert_product(linear(x), x, weight, bias)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), MODEL_SHAPES)
def test_model_shapes(load_kernels: Load, isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight = random(1, n, k, dtype=dtype)
    linear = PackedLinear(PackedWeight(load_kernels(isa), weight, dtype), None, torch.float32)
    for tokens in (1, 64, 131):
        x = random(100 + tokens, tokens, k)
        assert_product(linear(x), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_a_wide_weight(load_kernels: Load, dtype: torch.dtype) -> None:
    """Several blocks of rows and of K at once, and more tokens than one block of rows."""
    weight, bias, x = random(1, 70, 2500, dtype=dtype), random(2, 70), random(3, 517, 2500)
    linear = PackedLinear(PackedWeight(load_kernels("native"), weight, dtype), bias, torch.float32)
    assert_product(linear(x), x, weight, bias)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_share_the_work_without_gap_or_overlap(load_kernels: Load, threads: int) -> None:
    weight = random(1, 50, 40)
    linear = PackedLinear(PackedWeight(load_kernels("native"), weight, torch.float32), None, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 3, 13, 64):
            x = random(100 + tokens, tokens, 40)
            assert_product(linear(x), x, weight, None)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads(load_kernels: Load, isa: str, dtype: torch.dtype) -> None:
    weight, bias, x = random(1, 100, 1201, dtype=dtype), random(2, 100), random(3, 200, 1201)
    linear = PackedLinear(PackedWeight(load_kernels(isa), weight, dtype), bias, torch.float32)
    whole = linear(x)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for start, stop in ((0, 1), (199, 200), (7, 9), (50, 53), (100, 117), (1, 200)):
            assert torch.equal(linear(x[start:stop]), whole[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_beyond_a_row_is_multiplied(load_kernels: Load, dtype: torch.dtype) -> None:
    """x as a view whose neighbours are NaN: K = 5 must not read a sixth element."""
    wide = torch.full((7, 12), float("nan"))
    wide[:, 3:8] = random(1, 7, 5)
    weight = random(2, 20, 5, dtype=dtype)
    linear = PackedLinear(PackedWeight(load_kernels("native"), weight, dtype), None, torch.float32)
    assert_product(linear(wide[:, 3:8]), wide[:, 3:8], weight, None)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("isa", ["native", pytest.param("avx512-simde", marks=pytest.mark.full)])
@pytest.mark.parametrize(("n", "k"), [*ODD_SHAPES, (96, 1300)])
def test_bf16_dot_products(load_kernels: Load, isa: str, n: int, k: int) -> None:
    """The product of bfloat16 activations and weights is summed in float32, the same whatever the batch."""
    library = load_kernels(isa)
    if isa == "native" and not has_bf16_dot(library):
        pytest.skip("this processor has no bf16 dot products")
    weight, bias = random(1, n, k, dtype=torch.bfloat16), random(2, n)
    packed = PackedWeight(library, weight, torch.bfloat16)
    linear, rounding = (PackedLinear(packed, bias, dtype) for dtype in (torch.float32, torch.bfloat16))
    for tokens in range(1, 28):
        x = random(100 + tokens, tokens, k, dtype=torch.bfloat16)
        found = linear(x)
        assert_product(found, x, weight, bias)
        assert torch.equal(rounding(x), found.bfloat16())
        assert torch.equal(linear(x[-1:]), found[-1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_head_share_one_weight(load_kernels: Load, isa: str, dtype: torch.dtype) -> None:
    weight = random(1, 83, 37, dtype=dtype)
    packed = PackedWeight(load_kernels(isa), weight, dtype)
    ids = torch.tensor([0, 82, 15, 16, 17, 31, 32, 33, 0, 81])
    assert torch.equal(PackedEmbedding(packed, torch.float32)(ids), weight[ids].float())
    assert torch.equal(PackedEmbedding(packed, torch.bfloat16)(ids), weight[ids].bfloat16())
    assert packed.data.nbytes < 2 * weight.nbytes
    x = random(2, 3, 37)
    assert_product(PackedLinear(packed, None, torch.float32)(x), x, weight, None)


def test_a_float32_run_halves_a_weight_only_where_nothing_is_lost(load_kernels: Load) -> None:
    backend = CpuBackend(load_kernels("native"), torch.float32)
    coarse, fine, x = random(1, 64, 48, dtype=torch.bfloat16), random(2, 64, 48), random(3, 5, 48)
    first_row_coarse = torch.cat([coarse[:1].float(), fine[1:]])
    for weight in (coarse, coarse.float(), fine, first_row_coarse):
        assert_product(backend.make_linear(weight)(x), x, weight, None)
        assert torch.equal(backend.make_embedding(weight)(torch.arange(64)), weight.float())


@pytest.mark.skipif(not OneDnnLinear.works(torch.bfloat16), reason="this torch has no such products")
def test_deterministic_products_are_ours_where_onednn_would_be_faster(
    load_kernels: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_kernels("native")
    if not has_bf16_dot(library):
        pytest.skip("no bf16 products here")
    monkeypatch.setattr("paged_kernels.cpu.backend.cpu_flags", lambda: {"amx_bf16"})
    weight = random(1, 40, 24)
    assert isinstance(CpuBackend(library, torch.bfloat16).make_linear(weight), OneDnnLinear)
    assert isinstance(CpuBackend(library, torch.bfloat16, deterministic=True).make_linear(weight), PackedLinear)


def test_a_bfloat16_run_rounds_weights_once(load_kernels: Load) -> None:
    backend = CpuBackend(load_kernels("native"), torch.bfloat16)
    weight, x = random(1, 40, 24), random(2, 5, 24, dtype=torch.bfloat16)
    head = backend.make_head(weight)(x.to(backend.activation_dtype))
    assert_product(head, x, weight.bfloat16(), None)


def test_empty_batches(load_kernels: Load) -> None:
    packed = PackedWeight(load_kernels("native"), random(1, 20, 8), torch.float32)
    assert PackedLinear(packed, None, torch.float32)(torch.empty(0, 8)).shape == (0, 20)
    assert PackedEmbedding(packed, torch.float32)(torch.empty(0, dtype=torch.int64)).shape == (0, 8)


def test_wrong_arguments_are_refused(load_kernels: Load) -> None:
    packed = PackedWeight(load_kernels("native"), random(1, 20, 8), torch.float32)
    linear, embedding = PackedLinear(packed, None, torch.float32), PackedEmbedding(packed, torch.float32)
    for x in (torch.zeros(2, 9), torch.zeros(8), torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8).bfloat16()):
        with pytest.raises(ValueError, match="x: "):
            linear(x)
    for ids in ([20], [-1]):
        with pytest.raises(IndexError, match=r"0\.\.19"):
            embedding(torch.tensor(ids))
    with pytest.raises(ValueError, match="bias"):
        PackedLinear(packed, torch.zeros(1), torch.float32)


def test_onednn_linear() -> None:
    if not OneDnnLinear.works(torch.float32):
        pytest.skip("this torch has no prepacked oneDNN linear")
    weight, bias, x = random(1, 50, 30), random(2, 50), random(3, 7, 30)
    assert_product(OneDnnLinear(weight, bias)(x), x, weight, bias)


def test_onednn_probe_notices_wrong_results_and_missing_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def _reorder_linear_weight(weight: Tensor, batch: int) -> Tensor:
            return weight

        @staticmethod
        def _linear_pointwise(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
            return x @ weight.T  # no bias

    monkeypatch.setattr(torch.ops, "mkldnn", Wrong)
    assert not OneDnnLinear.works(torch.float32)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not OneDnnLinear.works(torch.float32)


@pytest.mark.parametrize("shape", [(40, 96), (33, 3)], ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_grouped_linear(load_kernels: Load, name: str, shape: tuple[int, int], poisoned_empty: None) -> None:
    """A group without rows, and rows behind the last group: zeros, without a bias."""
    backend: Backend = CpuBackend(load_kernels("native"), torch.float32) if name == "cpu" else ReferenceBackend()
    weight, bias = random(0, 4, *shape), random(1, 4, shape[0])
    offsets = torch.tensor([0, 3, 3, 20, 21], dtype=torch.int32)
    x = random(2, 24, shape[1])
    got = backend.make_grouped(weight, bias)(x, offsets)
    for group, start, stop in ((0, 0, 3), (2, 3, 20), (3, 20, 21)):
        assert_product(got[start:stop], x[start:stop], weight[group], bias[group])
    assert (got[21:] == 0).all()
