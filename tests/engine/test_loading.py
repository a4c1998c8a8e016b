"""Weights rounded on the way, left on disk, or made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.reference import ReferenceBackend
from safetensors.torch import load_file
from torch import Tensor

from paged_infer.config import ConfigError, EngineConfig
from paged_infer.engine.fit import gpus_for, weight_sizes
from paged_infer.engine.loading import load_decoder, model_source, weight_bytes
from paged_infer.models.config import config_from_hf
from paged_infer.text.tokenizer import Tokenizer
from tests.fixtures.checkpoints import hf_logits
from tests.models.stepper import Stepper

IDS = random.Random(0).choices(range(320), k=40)


def logits(folder: Path, **settings: Any) -> Tensor:
    config = EngineConfig(model=str(folder), **settings)
    source, backend = model_source(config), ReferenceBackend(torch.float32)
    decoder = load_decoder(config, source, backend, Tokenizer.load(source.tokenizer_folder()), 64)
    return Stepper(decoder, backend, [IDS]).run([[(0, 24)], [(0, 16)]])[0]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_left_on_disk_compute_the_same(random_model: Callable[..., Path], family: str) -> None:
    folder = random_model(family, num_hidden_layers=3)
    assert (logits(folder, offload="disk") - hf_logits(folder, IDS)).abs().max() <= 1e-4


def test_offloading_counts_two_matrices(random_model: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(random_model("llama", num_hidden_layers=3)), offload="disk")
    plain = EngineConfig(model=config.model)
    source, backend = model_source(config), ReferenceBackend(torch.float32)
    tensors = load_file(Path(config.model) / "model.safetensors")
    layers = [tensor.nbytes for name, tensor in tensors.items() if name.endswith("_proj.weight")]
    everything = weight_bytes(plain, source, backend)
    assert everything == sum(tensor.nbytes for tensor in tensors.values())
    assert weight_bytes(config, source, backend) == everything - sum(layers) + 2 * max(layers)


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_rounded_on_the_way(random_model: Callable[..., Path], quantization: str) -> None:
    folder = random_model("llama", hidden_size=128, intermediate_size=192)
    exact = hf_logits(folder, IDS)
    error = (logits(folder, quantization=quantization) - exact).square().mean() / exact.square().mean()
    assert 0 < error < {"int8": 0.02, "fp8": 0.1, "int4": 0.5}[quantization]


def test_rounded_with_the_text_that_is_given(random_model: Callable[..., Path]) -> None:
    """The same text gives the same weights, another other ones; a short one is filled up."""
    folder = str(random_model("llama", hidden_size=128, intermediate_size=192))

    def found(text: str | None) -> Tensor:
        return logits(Path(folder), quantization="int8", calibration=text)

    given = found("def f(x): return x * x")
    assert torch.equal(given, found("def f(x): return x * x"))
    assert not torch.equal(given, found("0 1 2 3 4 5 6 7 8 9 " * 1000))
    assert not torch.equal(given, found(None))


def test_made_up_weights(random_model: Callable[..., Path], tmp_path: Path) -> None:
    """Only the config and the tokenizer are needed; the same weights come each time."""
    folder = random_model("llama")
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    once, again = (logits(tmp_path, load_format="dummy") for _ in range(2))
    assert once.isfinite().all()
    assert once.std() > 0
    assert torch.equal(once, again)


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="paged-infer quantize"):
        EngineConfig(quantization="int8", offload="disk")


def test_sizes_of_a_70b() -> None:
    model = config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        }
    )
    sixteen, eight, four = weight_sizes(model)
    assert round(sixteen.total_bytes / 1e9) == 141
    assert sixteen.layer_bytes == 80 * 2 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672)
    assert 0.5 <= eight.layer_bytes / sixteen.layer_bytes < 0.505
    assert 0.25 <= four.layer_bytes / sixteen.layer_bytes < 0.28
    assert [gpus_for(size.total_bytes, "80 GB", 0.9) for size in (sixteen, eight, four)] == [2, 2, 1]
