"""GGUF files against the Hugging Face folders they were made from."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from paged_kernels.reference import ReferenceBackend
from safetensors.torch import save_file

from paged_infer.models.decoder import Decoder
from paged_infer.models.gguf import GGUFFile, hf_name
from paged_infer.models.source import resolve_model
from paged_infer.models.weights import CheckpointError
from tests.fixtures.checkpoints import hf_logits, random_checkpoint
from tests.models.gguf_files import gguf_name, write_gguf
from tests.models.stepper import Stepper

IDS = random.Random(0).choices(range(320), k=40)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama head_dim": ("llama", "llama", {"head_dim": 32}),
    "llama biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantisation", [Kind.F32, Kind.Q8_0])
def test_logits_equal_the_folders(tmp_path: Path, name: str, quantisation: Kind) -> None:
    backend = ReferenceBackend(torch.float32)
    family, architecture, config = MODELS[name]
    folder = random_checkpoint(tmp_path / "hf", family, **config)
    weights = write_gguf(folder, tmp_path / "model.gguf", architecture, quantisation)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    source = resolve_model(str(tmp_path / "model.gguf"))
    decoder = Decoder(source.config(), backend, source.weights())
    [found] = Stepper(decoder, backend, [IDS]).run([[(0, 40)]])
    assert (found - hf_logits(folder, IDS)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tensors_bit_for_bit(tmp_path: Path, name: str, kind: Kind) -> None:
    family, architecture, config = MODELS[name]
    folder = random_checkpoint(tmp_path / "hf", family, **config)
    expected = write_gguf(folder, tmp_path / "model.gguf", architecture, kind)
    found = dict(resolve_model(str(tmp_path / "model.gguf")).weights())
    assert found.keys() == expected.keys()
    for tensor_name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[tensor_name]), tensor_name


def test_llama3_rope_comes_as_a_tensor(tmp_path: Path) -> None:
    backend = ReferenceBackend(torch.float32)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope = {"rope_type": "llama3", "rope_theta": 1e4, **scaling}
    folder = random_checkpoint(tmp_path / "hf", "llama", rope_parameters=rope, max_position_embeddings=512)
    # head_dim 16, wavelengths 6.3, 19.9, 62.8, …; kept below 4, blended to 16, divided above
    smooth = (16 / (2 * np.pi) - 1.0) / 3.0
    divisors = [1 / ((1 - smooth) / 8 + smooth)] + [8.0] * 7
    write_gguf(folder, tmp_path / "model.gguf", "llama", rope_divisors=divisors)
    source = resolve_model(str(tmp_path / "model.gguf"))
    decoder = Decoder(source.config(), backend, source.weights())
    [found] = Stepper(decoder, backend, [IDS]).run([[(0, 40)]])
    assert (found - hf_logits(folder, IDS)).abs().max() <= 1e-4


def test_header(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "hf", "llama")
    write_gguf(folder, tmp_path / "model.gguf", "llama", Kind.Q8_0)
    file = GGUFFile(tmp_path / "model.gguf")
    theirs = gguf.GGUFReader(tmp_path / "model.gguf")
    assert "tokenizer.ggml.tokens" not in file.metadata
    for key, value in file.metadata.items():
        assert theirs.fields[key].contents() == value, key
    assert file.metadata["tokenizer.ggml.eos_token_id"] == 1
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = file.tensors[tensor.name]
        assert (info.offset, info.nbytes, info.ggml_type) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type,
        )
        assert info.shape == tuple(reversed(tensor.shape.tolist()))


def test_every_name_has_a_counterpart() -> None:
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.12.input_layernorm.weight",
        "model.layers.12.self_attn.k_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.down_proj.weight",
    ):
        assert hf_name(gguf_name(name)) == name
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


def test_a_tensor_nobody_knows_is_named(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "hf", "llama")
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "llama")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_um.weight"))
    source = resolve_model(str(path))
    with pytest.raises(
        CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight; unexpected: blk\.1\.ffn_um\.weight"
    ):
        Decoder(source.config(), ReferenceBackend(torch.float32), source.weights())


def test_damaged_files(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "hf", "llama")
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "llama")
    whole = path.read_bytes()
    damaged = {
        "not a readable GGUF": [b"", b"PK\x03\x04" + whole[4:], whole[:5], whole[:2000], whole[:200]],
        "version 9": [whole[:4] + struct.pack("<I", 9) + whole[8:]],
        "cut short": [whole[:-50]],
    }
    for message, contents in damaged.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match=message):
                GGUFFile(path)


def test_types_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 40), np.uint8), raw_dtype=Kind.Q8_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="Q8_1"):
        GGUFFile(path).tensor("token_embd.weight")
