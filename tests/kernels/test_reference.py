"""The reference backend against published vectors, Hugging Face, and arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from paged_kernels import reference
from paged_kernels.interface import AttentionMeta, SamplingRows
from paged_kernels.reference import ReferenceBackend, gumbel_noise, philox4x32

from tests.kernels.paged_batch import PagedBatch

RANDOM123_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123_VECTORS)
def test_philox_known_answers(counter, key, expected):
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in words) == expected


def scalar_philox(counter: list[int], key: list[int]) -> int:
    """First output word, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0]


def test_noise_is_a_function_of_key_sample_position_and_token():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
    samples, positions, tokens = [0, 1, 2, 0, 7, 3], [0, 5, 100000, 1, 2, 3], [0, 1, 49151, 262143]
    noise = gumbel_noise(
        torch.tensor(keys),
        torch.tensor(samples, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(tokens),
    )
    for r, (key, sample, position) in enumerate(zip(keys, samples, positions, strict=True)):
        for i, token in enumerate(tokens):
            low, high = key % 2**32, key % 2**64 >> 32
            u = ((scalar_philox([token, position, sample, 0], [low, high]) >> 9) + 0.5) * 2.0**-23
            assert u == float(torch.tensor(u, dtype=torch.float32))
            assert float(noise[r, i]) == pytest.approx(-math.log(-math.log(u)), rel=2e-7, abs=1e-7)


def test_noise_is_gumbel_distributed():
    noise = gumbel_noise(torch.arange(40), *[torch.zeros(40, dtype=torch.int32)] * 2, torch.arange(5000)).double()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for x in (-1.0, 0.0, 1.0, 3.0):
        assert (noise < x).double().mean().item() == pytest.approx(math.exp(-math.exp(-x)), abs=0.005)


def rows(count: int = 1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, key=0, sample=0, position=0) -> SamplingRows:
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(count).contiguous()

    return SamplingRows(
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(key, torch.int64),
        column(sample, torch.int32),
        column(position, torch.int32),
    )


def draw(logits: list[float], count: int = 4000, vocab_size: int | None = None, **options) -> torch.Tensor:
    """Draws at `count` output positions from the same logits."""
    batch = torch.tensor([logits]).expand(count, -1).contiguous()
    options.setdefault("position", torch.arange(count))
    return ReferenceBackend().sample(batch, rows(count, **options), vocab_size or len(logits))


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


def support(**options) -> set[int]:
    return set(draw(LOGITS, **options).tolist())


def test_greedy_takes_the_lowest_id_among_equals():
    assert draw([1.0, 3.0, 2.0, 3.0], count=1, temperature=0.0).tolist() == [1]
    assert draw([-0.0, 0.0, 0.0], count=1, temperature=0.0).tolist() == [0]


@pytest.mark.parametrize(
    ("temperature", "weights"), [(1.0, [1, 4, 2, 3]), (0.5, [1, 16, 4, 9]), (2.0, [1, 2, 2**0.5, 3**0.5])]
)
def test_sampled_frequencies_are_the_softmax(temperature, weights):
    count = 20000
    frequencies = draw(LOGITS, count, temperature=temperature).bincount(minlength=4) / count
    expected = torch.tensor(weights) / sum(weights)
    assert torch.allclose(frequencies, expected, atol=4 * 0.5 / count**0.5)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_top_k_keeps_the_k_likeliest(count):
    assert support(top_k=count) == set([1, 3, 2, 0][:count])


def test_top_k_keeps_the_lowest_ids_among_equals():
    assert set(draw([1.0, 2.0, 1.0, 1.0], top_k=3).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.0, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 2, 3}),
        (0.91, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    assert support(top_p=top_p) == kept


def test_top_p_counts_what_top_k_left():
    assert support(top_k=2, top_p=0.5) == {1}  # 0.4 / 0.7 reaches 0.5; 0.4 alone would not
    assert support(top_k=2, top_p=0.6) == {1, 3}


def test_temperature_comes_before_truncation():
    assert support(temperature=0.5, top_p=0.5) == {1}  # 16 / 30 reaches it
    assert support(temperature=0.5, min_p=0.3) == {1, 3}  # 9 / 16 does, 4 / 16 does not
    assert support(temperature=1.0, min_p=0.3) == {1, 2, 3}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.26, {1, 2, 3}), (0.51, {1, 3}), (0.76, {1}), (1.0, {1})]
)
def test_min_p_is_relative_to_the_likeliest(min_p, kept):
    assert support(min_p=min_p) == kept


def test_masked_and_out_of_vocabulary_ids_are_never_drawn():
    inf = float("inf")
    assert set(draw([-inf, 0.0, -inf, 0.0, 50.0], vocab_size=4).tolist()) == {1, 3}
    assert draw([-inf, -1e30, -inf], count=1).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows_yield_minus_one_and_touch_no_other(temperature):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf] * 3, [-inf, 0.0, -inf], [0.0, 1.0, nan]])
    picks = ReferenceBackend().sample(logits, rows(5, temperature=temperature), 2)
    assert picks.tolist()[:4] == [-1, -1, -1, 1]
    assert picks[4] >= 0  # the NaN stands past the vocabulary


def test_vanishing_temperature_is_greedy():
    assert draw([5.0, 20.0, 19.999], temperature=1e-40).unique().tolist() == [1]


def test_a_row_draws_the_same_alone_and_among_others():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    batch = rows(
        6,
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1.0]),
        top_k=torch.tensor([0, 5, 0, 0, 40, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 1.0, 0.8, 1.0]),
        key=torch.arange(6),
        position=torch.arange(6),
    )
    together = ReferenceBackend().sample(logits, batch, 50)
    for r in range(6):
        one = SamplingRows(*(getattr(batch, name)[r : r + 1] for name in SamplingRows.__slots__))
        assert ReferenceBackend().sample(logits[r : r + 1], one, 50).item() == together[r]


def test_other_key_sample_or_position_gives_other_draws():
    logits = [0.0] * 1000
    base = draw(logits, 8)
    assert len(set(base.tolist())) > 5
    for change in ({"key": 1}, {"sample": 1}, {"position": torch.arange(100, 108)}, {"key": 1 << 32}):
        assert (draw(logits, 8, **change) != base).sum() >= 6


def single_sequence(tokens: int, block_size: int = 4) -> AttentionMeta:
    blocks = -(-tokens // block_size)
    return AttentionMeta(
        positions=torch.arange(tokens, dtype=torch.int32),
        slot_mapping=torch.arange(tokens),
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        max_seqlen_q=tokens,
        max_seq_len=tokens,
    )


def test_norm_and_rotary_are_llamas():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    backend, tokens, head_dim = ReferenceBackend(), 5, 8
    x, weight = torch.randn(tokens, 48), torch.randn(48)
    norm = LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data = weight
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), norm(x))

    angles = torch.arange(tokens)[:, None] * 0.3 ** torch.arange(head_dim // 2)
    qkv = torch.randn(tokens, 4, head_dim)
    cos, sin = (f(torch.cat([angles, angles], dim=-1))[None] for f in (torch.cos, torch.sin))
    q, k = apply_rotary_pos_emb(qkv[None, :, :2].transpose(1, 2), qkv[None, :, 2:3].transpose(1, 2), cos, sin)
    kv = backend.make_kv_cache(2, 3, 4, 1, head_dim)
    rope = torch.cat([angles.cos(), angles.sin()], dim=-1)
    got = backend.rope_and_store(qkv.flatten(1), single_sequence(tokens), rope, kv, 1, 2)
    torch.testing.assert_close(got, q[0].transpose(0, 1))
    keys, values = (x.flatten(0, 1)[:tokens] for x in kv.export(1))
    torch.testing.assert_close(keys, k[0].transpose(0, 1))
    torch.testing.assert_close(values, qkv[:, 3:])
    assert not any(x.any() for x in kv.export(0))


def test_add_rms_norm_updates_the_float32_residual():
    backend = ReferenceBackend(torch.bfloat16)
    x, residual = torch.full((2, 4), 0.5, dtype=torch.bfloat16), torch.full((2, 4), 256.25)
    out = backend.add_rms_norm(x, residual, torch.full((4,), 3.0), 0.0)
    assert residual.dtype == torch.float32
    assert (residual == 256.75).all()  # bfloat16 would hold 256
    assert out.dtype == torch.bfloat16
    assert (out == 3.0).all()


@pytest.mark.parametrize("window", [0, 1, 4, 7])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("queries_at_once", [1, 2, None])
def test_attention_is_the_formula(block_size, window, queries_at_once, monkeypatch):
    if queries_at_once is not None:  # for the longest sequence, of 18 keys
        monkeypatch.setattr(reference, "_SCORE_BYTES", queries_at_once * 4 * 6 * 18)
    batch = PagedBatch.random([(0, 7), (5, 1), (9, 3), (0, 1), (12, 6)], block_size, 2, 8)
    backend = ReferenceBackend()
    kv = backend.make_kv_cache(1, batch.num_blocks, block_size, 2, 8)
    batch.fill(backend, kv)
    q = torch.randn(18, 6, 8)
    got = backend.attention(q, kv, 0, batch.meta, 0.3, window)
    torch.testing.assert_close(got.double(), batch.attention(q, 0.3, window), atol=1e-6, rtol=1e-5)


def test_attention_is_torchs_for_a_whole_prompt():
    batch = PagedBatch.random([(0, 9)], 4, 2, 8)
    backend = ReferenceBackend()
    kv = backend.make_kv_cache(1, batch.num_blocks, 4, 2, 8)
    batch.fill(backend, kv)
    q = torch.randn(9, 4, 8)
    q_, k, v = (x.transpose(0, 1)[None] for x in (q, batch.keys[0], batch.values[0]))
    expected = torch.nn.functional.scaled_dot_product_attention(q_, k, v, is_causal=True, enable_gqa=True)
    got = backend.attention(q, kv, 0, batch.meta, 8**-0.5)
    torch.testing.assert_close(got, expected[0].transpose(0, 1).flatten(1))


def test_negative_slots_are_not_stored_and_copies_cover_every_layer():
    backend = ReferenceBackend()
    kv = backend.make_kv_cache(2, 3, 2, 1, 4)
    meta = single_sequence(3, 2)
    meta.slot_mapping.copy_(torch.tensor([-1, 1, 4]))
    rope = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3)
    for layer in range(2):
        backend.rope_and_store(torch.ones(3, 12) * (layer + 1), meta, rope, kv, layer, 1)
    for layer in range(2):
        k, v = kv.export(layer)
        for x in (k, v):
            assert x[:, :, 0, 0].tolist() == [[0, layer + 1], [0, 0], [layer + 1, 0]]
    kv.copy_blocks([(0, 1), (1, 2)])
    for layer in range(2):
        for x in kv.export(layer):
            assert x[:, :, 0, 3].tolist() == [[0, layer + 1]] * 3


def test_head_keeps_float32_logits_in_a_bfloat16_run():
    backend = ReferenceBackend(torch.bfloat16)
    weight = torch.tensor([[1.0, 2.0**-10], [1.0, 0.0]])
    embedding, head = backend.make_tied(weight)
    logits = head(torch.ones(1, 2, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits[0, 0] - logits[0, 1] == 2.0**-10
    assert embedding(torch.tensor([1])).dtype == torch.bfloat16
    linear = backend.make_linear(weight, torch.tensor([0.0, 5.0]))
    assert linear(torch.ones(1, 2, dtype=torch.bfloat16)).tolist() == [[1.0, 6.0]]


def test_silu_mul():
    gate_up = torch.tensor([[0.0, 2.0, -3.0, 5.0, 7.0, 11.0]])
    expected = [0.0, 2 * 7 / (1 + math.exp(-2)), -3 * 11 / (1 + math.exp(3))]
    assert ReferenceBackend().silu_mul(gate_up)[0].tolist() == pytest.approx(expected)


def test_refuses_what_it_cannot_run():
    with pytest.raises(ValueError, match="float64"):
        ReferenceBackend(torch.float64)
