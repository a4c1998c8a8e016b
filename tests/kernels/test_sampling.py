"""The compiled sampler against arithmetic and against the reference, on every instruction set this machine can run."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_kernels.cpu.sampling import sample
from paged_kernels.interface import SamplingRows
from paged_kernels.reference import ReferenceBackend, gumbel_noise, philox4x32
from torch import Tensor

from tests.kernels.conftest import ISAS

INF = math.inf
WORD = 0xFFFFFFFF


@pytest.fixture(params=ISAS)
def draw(request: pytest.FixtureRequest, load_kernels: Callable[[str], ctypes.CDLL]) -> Callable[..., Tensor]:
    """`draw(logits, rows, vocab_size=V)` on one instruction set."""
    library = load_kernels(request.param)

    def call(logits: Tensor, rows: SamplingRows, vocab_size: int | None = None) -> Tensor:
        return sample(library, logits, rows, logits.shape[1] if vocab_size is None else vocab_size)

    return call


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_rows(num_rows: int, **given: float | Tensor) -> SamplingRows:
    """Temperature 1, nothing cut, key 0, sample 0, positions 0, 1, 2, …; scalars count for all rows."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "noise_key": 0,
        "sample": 0,
        "position": torch.arange(num_rows),
    }
    dtypes = {"noise_key": torch.int64, "top_k": torch.int32, "sample": torch.int32, "position": torch.int32}
    return SamplingRows(
        **{
            name: torch.as_tensor(value).to(dtypes.get(name, torch.float32)).expand(num_rows).contiguous()
            for name, value in (values | given).items()
        }
    )


def take(rows: SamplingRows, index: Tensor) -> SamplingRows:
    """The rows at `index`."""
    return SamplingRows(*(getattr(rows, name)[index].contiguous() for name in SamplingRows.__slots__))


def random_keys(num_rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Keys, samples and positions from their whole ranges."""

    def draw_from(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator)

    return {
        "noise_key": draw_from(-(2**63), 2**63 - 1),
        "sample": draw_from(0, 2**31 - 1),
        "position": draw_from(0, 2**31 - 1),
    }


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def python_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & WORD, first >> 32 ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def python_noise(key: int, sample_: int, position: int, token: int) -> float:
    word = python_philox((token, position, sample_, 0), (key & WORD, key >> 32 & WORD))[0]
    return -math.log(-math.log(((word >> 9) + 0.5) / 2**23))


def chi_square(tokens: Tensor, probabilities: list[float]) -> float:
    """Pearson's statistic of drawn tokens; a token of probability 0 makes it infinite."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    assert len(counts) == len(probabilities)
    expected = [len(tokens) * p for p in probabilities]
    return sum((c - e) ** 2 / e if e > 0 else (INF if c else 0.0) for c, e in zip(counts, expected, strict=True))


# Quantiles of chi-square at 1 - 1e-4, by degrees of freedom.
CHI_SQUARE_LIMIT = {1: 15.2, 2: 18.5, 3: 21.2, 63: 112.0}


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    """The vectors published with Random123, for the oracle of this file and for the reference."""
    assert python_philox(counter, key) == words
    tensors = [torch.tensor([x]) for x in (*counter, *key)]
    result = philox4x32(tuple(tensors[:4]), tuple(tensors[4:]))  # type: ignore[arg-type]
    assert tuple(int(word) for word in result) == words


def test_noise_is_the_specified_one(draw: Callable[..., Tensor]) -> None:
    """Between two tokens, the choice flips exactly where the logit gap crosses the difference of their noise."""
    generator = seeded(1)
    num_rows, vocab_size = 200, 70
    keys = random_keys(num_rows, generator)
    pairs = torch.stack([torch.randperm(vocab_size, generator=generator)[:2] for _ in range(num_rows)])
    gaps = []
    for row, (a, b) in enumerate(pairs.tolist()):
        key, number, position = (int(keys[name][row]) for name in ("noise_key", "sample", "position"))
        gaps.append(python_noise(key, number, position, b) - python_noise(key, number, position, a))
    for shift, winner in ((2e-5, 0), (-2e-5, 1)):
        logits = torch.full((num_rows, vocab_size), -INF)
        logits.scatter_(1, pairs, torch.tensor([[gap + shift, 0.0] for gap in gaps]))
        assert torch.equal(draw(logits, make_rows(num_rows, **keys)), pairs[:, winner])


@pytest.mark.parametrize(("position", "bits"), [(14170020, 2**23 - 1), (3137668, 0)])
def test_noise_at_its_ends(draw: Callable[..., Tensor], position: int, bits: int) -> None:
    """The largest noise there is lifts a token 16.6 above its logit; the smallest is finite."""
    assert python_philox((1, position, 0, 0), (0, 0))[0] >> 9 == bits
    gap = -math.log(-math.log((bits + 0.5) / 2**23)) - python_noise(0, 0, position, 0)
    for shift, winner in ((2e-5, 0), (-2e-5, 1)):
        logits = torch.full((1, 200), -INF)
        logits[0, :2] = torch.tensor([gap + shift, 0.0])
        assert draw(logits, make_rows(1, position=position)).tolist() == [winner]


@pytest.mark.parametrize("varied", ["noise_key", "high key", "sample", "position"])
def test_noise_depends_on_each_of_its_words(draw: Callable[..., Tensor], varied: str) -> None:
    values = torch.arange(64)
    given = {"noise_key": values << 32} if varied == "high key" else {varied: values}
    flat = torch.zeros(64, 1000)
    tokens = draw(flat, make_rows(64, **{"position": 3, **given}))
    assert len(set(tokens.tolist())) > 50
    assert len(set(draw(flat, make_rows(64, position=3)).tolist())) == 1


def test_temperature_shapes_the_distribution(draw: Callable[..., Tensor]) -> None:
    p = [0.1, 0.2, 0.3, 0.4]
    logits = torch.tensor(p).log().expand(20000, 4).contiguous()
    squares = [x * x / sum(y * y for y in p) for x in p]
    for temperature, expected, other in ((1.0, p, squares), (0.5, squares, p)):
        tokens = draw(logits, make_rows(20000, temperature=temperature))
        assert chi_square(tokens, expected) < CHI_SQUARE_LIMIT[3] < chi_square(tokens, other)


def test_every_token_of_a_flat_row_is_equally_likely(draw: Callable[..., Tensor]) -> None:
    """No position in vectors, chunks or blocks of candidates is favoured, nor any left out."""
    num_rows, vocab_size = 2048, 6400
    tokens = torch.cat([draw(torch.zeros(256, vocab_size), make_rows(256, noise_key=key)) for key in range(8)])
    assert len(tokens) == num_rows
    assert chi_square(tokens // 100, [1 / 64] * 64) < CHI_SQUARE_LIMIT[63]
    assert chi_square(tokens % 64, [1 / 64] * 64) < CHI_SQUARE_LIMIT[63]


@pytest.mark.parametrize(
    ("p", "options", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 2, "top_p": 0.5}, [0, 0, 0, 1]),  # top-p first would keep 2 and 3
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 2, "top_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.5}, [0, 0, 3 / 7, 4 / 7]),
        ([0.1, 0.2, 0.3, 0.4], {"min_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),
        ([0.3, 0.4, 0.3, 0.0], {"top_p": 0.6, "min_p": 0.1}, [3 / 7, 4 / 7, 0, 0]),  # of equals, the lowest id
    ],
)
def test_truncation_in_order(
    draw: Callable[..., Tensor], p: list[float], options: dict[str, float], expected: list[float]
) -> None:
    tokens = draw(torch.tensor(p).log().expand(5000, 4).contiguous(), make_rows(5000, **options))
    freedom = sum(x > 0 for x in expected) - 1
    assert chi_square(tokens, expected) < CHI_SQUARE_LIMIT.get(freedom, 1e-9)


def test_temperature_comes_before_min_p(draw: Callable[..., Tensor]) -> None:
    """Before temperature, min-p would keep 0 and 1 alone."""
    p = [0.6, 0.25, 0.1, 0.05]
    roots = [math.sqrt(x) for x in p[:3]]
    tokens = draw(torch.tensor(p).log().expand(5000, 4).contiguous(), make_rows(5000, temperature=2.0, min_p=0.3))
    assert chi_square(tokens, [*(x / sum(roots) for x in roots), 0.0]) < CHI_SQUARE_LIMIT[2]


def every_combination(vocab_size: int) -> dict[str, Tensor]:
    temperatures = (0.0, 0.01, 0.7, 1.0, 3.0)
    top_ks = (-1, 0, 1, 2, 50, vocab_size - 1, vocab_size, 10**7)
    combinations = itertools.product(temperatures, top_ks, (1.0, 0.0, 1e-8, 0.3, 0.9, 0.9999), (0.0, 0.05, 1.0))
    columns = torch.tensor(list(combinations), dtype=torch.float64).T
    return dict(zip(("temperature", "top_k", "top_p", "min_p"), columns, strict=True))


def assert_same_choice(ours: Tensor, logits: Tensor, rows: SamplingRows, vocab_size: int) -> None:
    """Equal to the reference, but where two scores lie within rounding of each other."""
    theirs = ReferenceBackend().sample(logits, rows, vocab_size)
    differing = (ours != theirs).nonzero().flatten()
    if len(differing) == 0:
        return
    assert int(ours.min()) >= -1
    noise = gumbel_noise(
        *(getattr(rows, n)[differing] for n in ("noise_key", "sample", "position")), torch.arange(vocab_size)
    )
    scores = logits[differing, :vocab_size] / rows.temperature[differing, None] + noise
    picked = [scores.gather(1, ids[differing, None]) for ids in (ours, theirs)]
    assert (picked[0] - picked[1]).abs().max() < 1e-5
    assert len(differing) <= 2


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 17, 63, 64, 65, 1000])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_agrees_with_the_reference(draw: Callable[..., Tensor], vocab_size: int, spread: float) -> None:
    """All combinations of options, with ties (of 0 and -0 too), masked ids and columns beyond the vocabulary."""
    options = every_combination(vocab_size)
    num_rows = len(options["top_k"])
    generator = seeded(vocab_size)
    logits = torch.randn(num_rows, vocab_size + 3, generator=generator) * spread
    logits[:, ::5] = logits[:, ::5].round()
    logits[:, 2::7] = -INF
    rows = make_rows(num_rows, **options, **random_keys(num_rows, generator))
    assert_same_choice(draw(logits, rows, vocab_size), logits, rows, vocab_size)


def test_agrees_with_the_reference_on_a_large_vocabulary(draw: Callable[..., Tensor]) -> None:
    generator = seeded(5)
    options = [
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for temperature in (0.7, 2.0)
        for top_k, top_p, min_p in [(0, 1, 0), (50, 1, 0), (50, 0.9, 0), (0, 0.9, 0), (0, 0.999, 0.01), (2000, 0.5, 0)]
    ]
    columns = {name: torch.tensor([float(row[name]) for row in options]) for name in options[0]}
    for spread in (0.5, 4.0):
        logits = torch.randn(len(options), 49152, generator=generator) * spread
        logits[:, 1::2] = logits[:, 1::2].bfloat16().float()
        rows = make_rows(len(options), **columns, **random_keys(len(options), generator))
        assert_same_choice(draw(logits, rows), logits, rows, 49152)


def test_columns_beyond_the_vocabulary_are_never_drawn(draw: Callable[..., Tensor]) -> None:
    logits = torch.randn(1000, 80, generator=seeded(2))
    logits[:, 64:] = 5.0
    logits[::2, 79] = math.nan
    for temperature in (0.0, 1.0):
        rows = make_rows(1000, temperature=temperature)
        tokens = draw(logits, rows, 64)
        assert int(tokens.max()) < 64
        assert torch.equal(tokens, draw(logits[:, :64].contiguous(), rows))


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("at", [0, 8, 63, 64, 96, 99])
def test_a_row_that_is_not_finite_fails_alone(draw: Callable[..., Tensor], bad: float, at: int) -> None:
    options = {
        "temperature": torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1]),
        "top_k": torch.tensor([0, 0, 5, 0, 0, 0, 5, 0]),
        "top_p": torch.tensor([1, 1, 1, 0.5, 1, 1, 1, 0.5]),
    }
    logits = torch.randn(8, 100, generator=seeded(3))
    logits[:, 5] = -INF
    rows = make_rows(8, **options)
    good = draw(logits, rows)
    assert int(good.min()) >= 0
    logits[:4, at] = bad
    assert draw(logits, rows).tolist() == [-1] * 4 + good[4:].tolist()


def test_a_row_with_everything_masked_fails_alone(draw: Callable[..., Tensor]) -> None:
    logits = torch.full((4, 100), -INF)
    logits[:, 99] = 1e4
    logits[1::2, 99] = -INF
    for temperature in (0.0, 1.0):
        assert draw(logits, make_rows(4, temperature=temperature)).tolist() == [99, -1, 99, -1]
        assert draw(logits, make_rows(4, temperature=temperature), 99).tolist() == [-1] * 4


@pytest.mark.parametrize("first", [0, 1, 8, 15, 63, 64, 500, 998])
def test_greedy_ties_go_to_the_lowest_id(draw: Callable[..., Tensor], first: int) -> None:
    logits = torch.full((1, 1000), -1.0)
    logits[0, first:] = torch.where(torch.arange(1000 - first) % 3 == 0, -0.0, 0.0)
    logits[0, first + 1 : first + 2] = -0.5
    assert draw(logits, make_rows(1, temperature=0.0)).tolist() == [first]


def test_scores_that_tie_go_to_the_lowest_id(draw: Callable[..., Tensor]) -> None:
    """Logits so large that the noise vanishes in rounding leave nothing but ties."""
    logits = torch.full((50, 300), 1e9)
    logits[:, :7] = -INF
    assert draw(logits, make_rows(50)).tolist() == [7] * 50
    assert draw(logits, make_rows(50, top_k=40)).tolist() == [7] * 50


def test_settings_that_mean_off_change_nothing(draw: Callable[..., Tensor]) -> None:
    generator = seeded(6)
    logits = torch.randn(300, 257, generator=generator)
    keys = random_keys(300, generator)
    plain = draw(logits, make_rows(300, **keys))
    for off in ({"top_k": -1}, {"top_k": 257}, {"top_k": 258}, {"top_k": 10**7}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(draw(logits, make_rows(300, **keys, **off)), plain)
    assert not torch.equal(draw(logits, make_rows(300, **keys, top_k=20)), plain)


def test_settings_that_leave_one_token_are_greedy(draw: Callable[..., Tensor]) -> None:
    logits = torch.randn(300, 257, generator=seeded(7)).bfloat16().float()
    greedy = logits.argmax(dim=-1)
    assert not torch.equal(draw(logits, make_rows(300)), greedy)
    for one in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-8}, {"top_p": 1e-3}, {"temperature": 1e-45}):
        assert torch.equal(draw(logits, make_rows(300, **one)), greedy)


@pytest.mark.parametrize("top_k", [2, 130, 299])
def test_exactly_k_survive_and_of_equals_the_lowest(draw: Callable[..., Tensor], top_k: int) -> None:
    logits = torch.zeros(1, 5000)
    tied = torch.arange(11, 5000, 16)[:300]
    logits[0, tied] = 3.0
    logits[0, 4999] = 3.5
    tokens = draw(logits.expand(6000, -1).contiguous(), make_rows(6000, top_k=top_k))
    assert set(tokens.tolist()) == {4999, *tied[: top_k - 1].tolist()}


def test_k_survivors_may_stand_far_apart(draw: Callable[..., Tensor]) -> None:
    logits = torch.full((1, 2000), -100.0)
    logits[0, ::100] = -0.01 * torch.arange(20)
    for top_k in (2, 7, 19):
        tokens = draw(logits.expand(2000, -1).contiguous(), make_rows(2000, top_k=top_k))
        assert sorted(set(tokens.tolist())) == [100 * i for i in range(top_k)]


def test_min_p_one_keeps_all_of_the_likeliest(draw: Callable[..., Tensor]) -> None:
    """A logit one step of rounding below the maximum is out."""
    logits = torch.tensor([0.5, 0.1, 0.5, math.nextafter(0.5, 0) - 2**-25, 0.5]).expand(3000, 5).contiguous()
    assert logits[0, 3] < 0.5
    tokens = draw(logits, make_rows(3000, min_p=1.0, temperature=2.0))
    assert chi_square(tokens, [1 / 3, 0, 1 / 3, 0, 1 / 3]) < CHI_SQUARE_LIMIT[2]


def test_extreme_masks_do_not_hide_the_rest(draw: Callable[..., Tensor]) -> None:
    """Masks that are merely very negative leave truncation exact."""
    generator = seeded(8)
    logits = torch.randn(40, 5000, generator=generator)
    logits[:, 100:4900] = torch.finfo(torch.float32).min
    rows = make_rows(40, **random_keys(40, generator), top_k=torch.arange(40) * 7, top_p=0.95, min_p=1e-3)
    tokens = draw(logits, rows)
    assert ((tokens < 100) | (tokens >= 4900)).all()
    assert_same_choice(tokens, logits, rows, 5000)


def test_a_row_is_the_same_in_any_batch(draw: Callable[..., Tensor]) -> None:
    generator = seeded(9)
    options = every_combination(300)
    chosen = torch.randperm(len(options["top_k"]), generator=generator)[:60]
    rows = make_rows(60, **{name: column[chosen] for name, column in options.items()}, **random_keys(60, generator))
    logits = torch.randn(60, 300, generator=generator)
    together = draw(logits, rows)
    alone = [int(draw(logits[i : i + 1], take(rows, torch.tensor([i])))) for i in range(60)]
    assert together.tolist() == alone
    shuffled = torch.randperm(60, generator=generator)
    assert torch.equal(draw(logits[shuffled].contiguous(), take(rows, shuffled)), together[shuffled])
    torch.set_num_threads(2)
    assert torch.equal(draw(logits, rows), together)


def test_bad_arguments_are_named(draw: Callable[..., Tensor]) -> None:
    logits, rows = torch.zeros(2, 10), make_rows(2)
    for bad in (logits.double(), logits[:, ::2], logits[0]):
        with pytest.raises(ValueError, match="logits"):
            draw(bad, rows, 5)
    for vocab_size in (0, 11):
        with pytest.raises(ValueError, match="vocab_size"):
            draw(logits, rows, vocab_size)
    with pytest.raises(ValueError, match="temperature"):
        draw(logits, make_rows(3))
    with pytest.raises(ValueError, match="top_k"):
        draw(logits, SamplingRows(*(getattr(rows, n).float() for n in SamplingRows.__slots__)))
