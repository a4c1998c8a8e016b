"""Checkpoints that are sharded, incomplete, too full, oddly ordered or oddly typed."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.reference import ReferenceBackend
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paged_infer.models.decoder import Decoder
from paged_infer.models.source import resolve_model
from paged_infer.models.weights import CheckpointError, assemble, num_weights
from tests.fixtures.checkpoints import hf_logits, random_checkpoint
from tests.models.stepper import Stepper

IDS = random.Random(0).choices(range(320), k=20)


def logits(folder: Path, weights: Iterator[tuple[str, Tensor]] | None = None) -> Tensor:
    backend = ReferenceBackend(torch.float32)
    source = resolve_model(str(folder))
    decoder = Decoder(source.config(), backend, source.weights() if weights is None else weights)
    return Stepper(decoder, backend, [IDS]).run([[(0, len(IDS))]])[0]


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of the folder's one weights file."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def shard(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def test_sharded(tmp_path: Path) -> None:
    folder = shard(random_checkpoint(tmp_path, "qwen3"))
    assert (logits(folder) - hf_logits(folder, IDS)).abs().max() <= 1e-4


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shard(random_checkpoint(tmp_path, "llama"))
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        logits(folder)


def test_index_that_is_none(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors.index.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        logits(folder)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path, "llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=str(path)):
        logits(tmp_path)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        logits(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.self_attn.v_proj.bias",
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = edit(random_checkpoint(tmp_path, "qwen3", attention_bias=True), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"missing: {name}$"):
        logits(folder)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight", "model.layers.0.mlp.rotary_emb"],
)
def test_unexpected_tensors_are_named(tmp_path: Path, name: str) -> None:
    folder = edit(random_checkpoint(tmp_path, "llama"), lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=f"unexpected: {name}$"):
        logits(folder)


def test_many_names_are_cut(tmp_path: Path) -> None:
    extra = {f"extra.{i}": torch.ones(1) for i in range(30)}
    folder = edit(random_checkpoint(tmp_path, "llama"), lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"extra\.0.* and 10 more$"):
        logits(folder)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = edit(random_checkpoint(tmp_path, "llama"), lambda tensors: tensors.update({name: torch.ones(64, 64)}))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[64, 64\].* \[32, 64\]"):
        logits(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = edit(
        random_checkpoint(tmp_path, "llama"),
        lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}),
    )
    with pytest.raises(CheckpointError, match=f"{name} has dtype"):
        logits(folder)


def test_key_bias_left_out_is_zero(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen2")
    biases = [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)]

    def zero(tensors: dict[str, Tensor]) -> None:
        for name in biases:
            tensors[name].zero_()

    edit(folder, zero)
    expected = hf_logits(folder, IDS)
    edit(folder, lambda tensors: [tensors.pop(name) for name in biases])
    assert (logits(folder) - expected).abs().max() <= 1e-4


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    expected = hf_logits(folder, IDS)
    names = ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]
    edit(folder, lambda tensors: tensors.update({name: torch.ones(8) for name in names}))
    assert (logits(folder) - expected).abs().max() <= 1e-4


def test_tied_head_in_the_checkpoint(tmp_path: Path) -> None:
    """A copy of the embedding changes nothing; a different head is used, as Hugging Face does."""
    folder = random_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    expected = hf_logits(folder, IDS)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert (logits(folder) - expected).abs().max() <= 1e-4
    other = random_checkpoint(tmp_path / "other", "llama", tie_word_embeddings=True)
    edit(other, lambda tensors: tensors.update({"lm_head.weight": -tensors["model.embed_tokens.weight"]}))
    found = logits(other)
    assert (found - hf_logits(other, IDS)).abs().max() <= 1e-4
    assert (found - expected).abs().max() > 1


def test_any_order(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen2")
    weights = list(resolve_model(str(folder)).weights())
    random.Random(3).shuffle(weights)
    assert (logits(folder, iter(weights)) - hf_logits(folder, IDS)).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    edit(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    assert (logits(folder) - hf_logits(folder, IDS)).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes(tmp_path: Path, family: str, tied: bool) -> None:
    folder = random_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    source = resolve_model(str(folder))
    assert num_weights(source.config()) == count
    assert source.weight_bytes(torch.bfloat16) == 2 * count
    assert source.weight_bytes(torch.float32) == 4 * count


def test_tensors_are_let_go_early(tmp_path: Path) -> None:
    """While a checkpoint streams in, no more than one fused matrix and its parts are alive."""
    folder = random_checkpoint(tmp_path, "llama", num_hidden_layers=6)
    source = resolve_model(str(folder))
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def watched() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in source.weights():
            copy = tensor.clone()
            del tensor
            alive.add(copy)
            most = max(most, len(alive))
            yield name, copy
            del copy

    for _key, weight, bias in assemble(source.config(), watched()):
        del weight, bias
    assert 3 <= most <= 6
