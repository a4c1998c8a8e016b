"""Logits of every family, in every packing, against Hugging Face in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.interface import Backend
from torch import Tensor

from paged_infer.models.decoder import Decoder
from paged_infer.models.source import resolve_model
from tests.fixtures.checkpoints import hf_logits, random_checkpoint
from tests.models.stepper import Stepper

TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
WINDOW_ON_LAYER_1 = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 48}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", WINDOW_ON_LAYER_1),
    "qwen3": ("qwen3", {}),
    "qwen3 biases, window": ("qwen3", {"attention_bias": True} | WINDOW_ON_LAYER_1),
    "one key head": ("llama", {"num_key_value_heads": 1}),
}
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: random_checkpoint(root / name.replace(" ", "_"), family, **config)
        for name, (family, config) in MODELS.items()
    }


def load(folder: Path, backend: Backend) -> Decoder:
    source = resolve_model(str(folder))
    return Decoder(source.config(), backend, source.weights())


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_one_shot_chunks_and_decode(folders: dict[str, Path], backend: Backend, name: str) -> None:
    ids = tokens(45)
    expected = hf_logits(folders[name], ids)
    decoder = load(folders[name], backend)
    one_shot = [45]
    chunks = [7, 1, 13, 3, 21]
    decode = [6] + [1] * 39
    for counts in (one_shot, chunks, decode):
        [found] = Stepper(decoder, backend, [ids]).run([[(0, count)] for count in counts])
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "block_size"), [*((name, 16) for name in MODELS), ("llama", 32), ("mistral window", 32)]
)
def test_packed_batches(folders: dict[str, Path], backend: Backend, name: str, block_size: int) -> None:
    """Sequences of different ages, prefilling and decoding side by side, in changing order."""
    lengths = (33, 5, 18, 40)
    sequences = [tokens(length, seed=i) for i, length in enumerate(lengths)]
    decoder = load(folders[name], backend)
    rng = random.Random(1)
    left = dict(enumerate(lengths))
    steps = []
    while left:
        chosen = rng.sample(sorted(left), rng.randint(1, len(left)))
        work = [(s, min(left[s], rng.choice([1, 1, 3, 10]))) for s in chosen]
        for s, count in work:
            left[s] -= count
        left = {s: count for s, count in left.items() if count}
        steps.append(work)
    found = Stepper(decoder, backend, sequences, block_size).run(steps)
    for logits, ids in zip(found, sequences, strict=True):
        assert_close(logits, hf_logits(folders[name], ids))


@pytest.mark.parametrize("name", ["llama", "llama linear rope", "llama llama3 rope", "qwen3"])
def test_far_positions(tmp_path: Path, backend: Backend, name: str) -> None:
    """Rotary errors are invisible at position 0 and grow with the position."""
    family, config = MODELS[name]
    folder = random_checkpoint(tmp_path, family, max_position_embeddings=4096, **config)
    ids = tokens(2100)
    decoder = load(folder, backend)
    [found] = Stepper(decoder, backend, [ids]).run([[(0, 1024)], [(0, 1023)], *[[(0, 1)]] * 5, [(0, 48)]])
    assert_close(found[2000:], hf_logits(folder, ids)[2000:])


def test_window_counts_the_token_itself(tmp_path: Path, backend: Backend) -> None:
    """With a window of 4, token 0 reaches the logits of positions 0 to 3 of a one-layer model, and no further."""
    folder = random_checkpoint(tmp_path, "mistral", sliding_window=4, num_hidden_layers=1)
    decoder = load(folder, backend)
    ids = tokens(12)
    [found] = Stepper(decoder, backend, [ids]).run([[(0, 12)]])
    [other] = Stepper(decoder, backend, [[(ids[0] + 1) % VOCAB_SIZE, *ids[1:]]]).run([[(0, 12)]])
    change = (found - other).abs().amax(dim=1)
    assert (change[:4] > 1e-3).all()
    assert (change[4:] == 0).all()


@pytest.mark.parametrize("name", ["llama", "mistral window"])
def test_logits_only_where_asked(folders: dict[str, Path], backend: Backend, name: str) -> None:
    ids = tokens(30)
    expected = hf_logits(folders[name], ids)
    stepper = Stepper(load(folders[name], backend), backend, [ids])
    nothing = stepper.step([(0, 9)], logits_indices=[])
    assert nothing.shape == (0, VOCAB_SIZE)
    assert_close(stepper.step([(0, 20)], logits_indices=[19, 2, 2, 7]), expected[[28, 11, 11, 16]])
    assert_close(stepper.step([(0, 1)]), expected[29:])


def test_forward_leaves_its_inputs_alone(folders: dict[str, Path], backend: Backend) -> None:
    stepper = Stepper(load(folders["llama tied"], backend), backend, [tokens(8)])
    input_ids, meta = stepper.batch([(0, 8)])
    before = input_ids.clone(), meta.positions.clone(), meta.slot_mapping.clone(), meta.block_tables.clone()
    first = stepper.step([(0, 8)])
    stepper._done[0] = 0
    assert torch.equal(stepper.step([(0, 8)]), first)
    after = input_ids, meta.positions, meta.slot_mapping, meta.block_tables
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_rope_table_covers_the_positions_asked_for(folders: dict[str, Path], backend: Backend) -> None:
    source = resolve_model(str(folders["llama"]))
    decoder = Decoder(source.config(), backend, source.weights(), max_position=45)
    ids = tokens(45)
    [found] = Stepper(decoder, backend, [ids]).run([[(0, 45)]])
    assert_close(found, hf_logits(folders["llama"], ids))
