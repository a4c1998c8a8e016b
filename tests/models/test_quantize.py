"""Rounding a model: what each method gains, that folding changes nothing, and that others read what is written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from paged_kernels.quantized import QuantizedWeight, round_group_weight
from paged_kernels.reference import ReferenceBackend
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from paged_infer.cli.app import app
from paged_infer.config import ConfigError
from paged_infer.models.decoder import Decoder
from paged_infer.models.quantize import Method, make_method, quantized_weights
from paged_infer.models.quantize.calibration import builtin_text
from paged_infer.models.quantize.methods import AWQ, GPTQ, Int8, Nearest
from paged_infer.models.source import resolve_model
from paged_infer.models.weights import StoredWeight, dense
from tests.fixtures.checkpoints import hf_logits
from tests.models.stepper import Stepper

IDS = random.Random(0).choices(range(320), k=24)
ROWS = torch.tensor(random.Random(1).choices(range(320), k=4 * 64)).view(4, 64)


def rounded(folder: Path, method: Method) -> dict[str, StoredWeight]:
    found: dict[str, StoredWeight] = {}
    quantized_weights(resolve_model(str(folder)), ReferenceBackend(torch.float32), method, ROWS, found.__setitem__)
    return found


def logits(folder: Path, weights: dict[str, StoredWeight]) -> Tensor:
    backend = ReferenceBackend(torch.float32)
    decoder = Decoder(resolve_model(str(folder)).config(), backend, iter(weights.items()))
    return Stepper(decoder, backend, [IDS]).run([[(0, len(IDS))]])[0]


def with_outliers(folder: Path, tmp_path: Path) -> Path:
    """A copy whose norms make some channels forty times as large, which the weights after them undo."""
    copy = tmp_path / "outliers"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    channels = torch.ones(64)
    channels[[3, 17, 40]] = 40
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensors[name] = tensor * channels
        elif any(part in name for part in ("q_proj.w", "k_proj.w", "v_proj.w", "gate_proj", "up_proj")):
            tensors[name] = tensor / channels
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@dataclass(frozen=True)
class AlmostExact:
    """8 bits for every 16 inputs, each input scaled by a number of its own."""

    calibrated: bool = True

    def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> Tensor:
        q, d = sharing
        channels = torch.rand(weight.shape[1] // q, generator=torch.Generator().manual_seed(0)) * 7.5 + 0.5
        return channels.view(-1, 1, d).expand(-1, q, -1).reshape(-1)

    def round(self, weight: Tensor, x: Tensor) -> QuantizedWeight:
        return round_group_weight(weight, 8, 16, torch.float32)


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("qwen2", {}), ("llama", {"mlp_bias": True})])
def test_folding_changes_nothing(random_model: Callable[..., Path], family: str, options: dict[str, bool]) -> None:
    """Norms, value rows and their biases, upward rows: each takes exactly what was taken from the weights after it."""
    folder = random_model(family, **options)
    exact = hf_logits(folder, IDS)
    found = logits(folder, rounded(folder, AlmostExact()))
    assert (found - exact).square().mean() <= 0.01 * exact.square().mean()


def test_smoothing_pays_where_activations_have_outliers(random_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_outliers(random_model("llama"), tmp_path)
    exact = hf_logits(folder, IDS)

    class Plain(Int8):
        def input_scales(self, weight: Tensor, x: Tensor, sharing: tuple[int, int]) -> None:
            return None

    smooth, plain = ((logits(folder, rounded(folder, method)) - exact).square().mean() for method in (Int8(), Plain()))
    assert smooth < plain / 4


def test_calibrated_methods_beat_the_nearest_number() -> None:
    """Squared error of a layer's product, inputs correlated and some of them large."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    x = torch.randn(512, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    x += 0.3 * torch.randn(512, 128, generator=generator)
    x[:, [5, 77]] *= 20

    def error(method: Method) -> float:
        scales = method.input_scales(weight, x, (1, 128))
        scales = torch.ones(128) if scales is None else scales
        product = (x / scales) @ method.round(weight * scales, x / scales).dequantize().t()
        return (product - x @ weight.t()).square().mean().item()

    nearest = error(Nearest(32))
    assert error(AWQ(32)) < 0.7 * nearest
    assert error(GPTQ(32)) < 0.3 * nearest


@pytest.mark.parametrize("method", ["awq", "gptq", "int4", "int8", "fp8"])
def test_every_layer_is_rounded_and_little_is_lost(random_model: Callable[..., Path], method: str) -> None:
    folder = random_model("llama")
    found = rounded(folder, make_method(method, 32))
    originals = load_file(folder / "model.safetensors")
    assert found.keys() == originals.keys()
    for name, weight in found.items():
        assert isinstance(weight, Tensor) != name.endswith("_proj.weight"), name
        assert dense(weight).shape == originals[name].shape
    exact = hf_logits(folder, IDS)
    error = (logits(folder, found) - exact).square().mean() / exact.square().mean()
    assert error < {"int8": 0.02, "fp8": 0.1}.get(method, 0.3)


def quantize(*arguments: object) -> None:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("method", ["awq", "gptq", "int4", "int8", "fp8"])
def test_transformers_reads_it_back(random_model: Callable[..., Path], tmp_path: Path, method: str) -> None:
    """compressed-tensors unpacks the very numbers our own reader does, and its model gives our logits."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder, out = random_model("llama", tie_word_embeddings=True), tmp_path / "out"
    quantize(folder, out, "--method", method, "--group-size", 32, "--calibration-tokens", 64)
    theirs = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    state = theirs.state_dict()
    ours = dict(resolve_model(str(out)).weights())
    for name, weight in ours.items():
        if name.endswith("_proj.weight"):
            assert not isinstance(weight, Tensor)
        assert torch.allclose(dense(weight).float(), state[name].float(), rtol=1e-2, atol=1e-3), name
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS]), use_cache=False).logits[0]
    error = (logits(out, ours) - expected).square().mean() / expected.square().mean()
    assert error < {"int8": 0.01, "fp8": 0.1}.get(method, 1e-5)  # activations too are rounded, each in its own way
    written = json.loads((out / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (out / "tokenizer.json").exists()


def test_refusals(random_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = random_model("llama")
    (tmp_path / "file").write_text("")
    for arguments, named in (
        ((folder, tmp_path, "--method", "int8"), "not empty"),
        ((folder, tmp_path / "out", "--method", "int3"), "int3"),
        ((folder, tmp_path / "out2", "--method", "int4", "--group-size", 48), "group_size=48"),
        ((folder, tmp_path / "out3", "--method", "awq", "--calibration", tmp_path / "none"), "cannot be read"),
        ((folder, tmp_path / "out4", "--method", "awq", "--calibration", tmp_path / "file"), "too few"),
    ):
        with pytest.raises(ConfigError, match=named):
            quantize(*arguments)
    quantize(folder, tmp_path / "once", "--method", "int8")
    with pytest.raises(ConfigError, match="once is quantised already; give the unquantised model"):
        quantize(tmp_path / "once", tmp_path / "twice", "--method", "int8")


def test_the_builtin_text_is_text() -> None:
    assert len(builtin_text()) > 50_000
