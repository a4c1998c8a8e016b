"""Quantised checkpoints against Hugging Face's model over the weights they stand for."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.interface import Backend
from paged_kernels.quantized import GroupWeight, ScaledWeight
from paged_kernels.reference import ReferenceBackend
from safetensors.torch import load_file, save_file
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.decoder import Decoder
from paged_infer.models.sharding import local_config, shard
from paged_infer.models.source import resolve_model
from paged_infer.models.weights import CheckpointError, assemble, dense
from paged_infer.parallel.place import places
from tests.fixtures.checkpoints import hf_logits, hf_model
from tests.models import quantized_files as files
from tests.models.stepper import Stepper

IDS = random.Random(0).choices(range(320), k=20)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def ct(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers.1.mlp.down_proj"],
    }


WEIGHT_ONLY = {
    "gptq": (files.gptq(4, 32), GPTQ),
    "gptq v2, act-order": (
        files.gptq(4, 32, v2=True, act_order=True),
        GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True},
    ),
    "gptq, act-order, one group": (files.gptq(4, -1, act_order=True), GPTQ | {"group_size": -1}),
    "gptq v1 by name, symmetric": (
        files.gptq(4, 32, symmetric=True),
        GPTQ | {"checkpoint_format": "gptq", "sym": True},
    ),
    "gptq 2 bits": (files.gptq(2, 16), GPTQ | {"bits": 2, "group_size": 16}),
    "gptq 3 bits": (files.gptq(3, 32), GPTQ | {"bits": 3}),
    "gptq 8 bits": (files.gptq(8, -1), GPTQ | {"bits": 8, "group_size": -1}),
    "awq": (files.awq(32), AWQ),
    "w4a16": (
        files.pack_quantized(4, 32),
        ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
    ),
    "w4a16 asymmetric, act-order": (
        files.pack_quantized(4, 32, symmetric=False, act_order=True),
        ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    ),
    "w8a16": (
        files.pack_quantized(8, -1),
        ct("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    ),
    "fp8 weights only": (
        files.float8("channel"),
        ct("naive-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    ),
}

INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT8 = INT8 | {"type": "float"}
ROUNDING = {
    "w8a8": (files.int_quantized, ct("int-quantized", INT8, num_bits=8, type="int", strategy="channel")),
    "fp8 tensor": (files.float8("tensor"), FP8),
    "fp8 blocks": (files.float8("block", "weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]}),
    "fbgemm": (files.float8("channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "w8a8 float": (
        files.float8("channel"),
        ct("float-quantized", FLOAT8, num_bits=8, type="float", strategy="channel"),
    ),
}


def decoder_logits(folder: Path, backend: Backend) -> Tensor:
    source = resolve_model(str(folder))
    decoder = Decoder(source.config(), backend, source.weights())
    return Stepper(decoder, backend, [IDS]).run([[(0, len(IDS))]])[0]


@pytest.fixture
def write(tmp_path: Path, random_model: Callable[..., Path]) -> Callable[..., tuple[Path, Path]]:
    def make(packer: files.Packer, settings: dict[str, Any], **overrides: Any) -> tuple[Path, Path]:
        plain = random_model("qwen2", hidden_size=128, intermediate_size=256, **overrides)
        kept = ("layers.1.mlp.down_proj",) if settings["quant_method"] == "compressed-tensors" else ()
        return files.write(tmp_path, plain, packer, settings, kept)

    return make


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weight_only(write: Callable[..., tuple[Path, Path]], backend: Backend, name: str) -> None:
    quantized, exact = write(*WEIGHT_ONLY[name])
    assert (decoder_logits(quantized, backend) - hf_logits(exact, IDS)).abs().max() <= 1e-3


def test_awq_as_compressed_tensors_unpacks_it(write: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Its converter knows AutoAWQ's packing; transformers runs what comes out, and we read it in either form."""
    convert = pytest.importorskip("compressed_tensors.entrypoints.convert")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    quantized, _ = write(*WEIGHT_ONLY["awq"])
    converter = convert.AutoAWQConverter.from_autoawq_config(AWQ)
    converted = tmp_path / "converted"
    shutil.copytree(quantized, converted)
    tensors = load_file(quantized / "model.safetensors")
    wide = {name: tensor.float() if name.endswith(".scales") else tensor for name, tensor in tensors.items()}
    save_file(converter.process(wide), converted / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = converter.update_config(None).model_dump(mode="json")
    (converted / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(
        converted, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    state = theirs.state_dict()
    for folder in (quantized, converted):
        weights = dict(resolve_model(str(folder)).weights())
        kept = {name: weight for name, weight in weights.items() if isinstance(weight, GroupWeight)}
        assert len(kept) == 14
        for name, weight in kept.items():
            assert torch.equal(weight.dequantize(), state[name]), name
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS]), use_cache=False).logits[0]
    backend = ReferenceBackend(torch.float32)
    assert (decoder_logits(quantized, backend) - expected).abs().max() <= 1e-4


def grouped_otherwise(name: str) -> bool:
    """Whether a cut along the inputs takes some of each group."""
    return "act-order" in name and "one group" not in name


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ROUNDING])
def test_shares_of_ranks_are_those_of_the_exact_weights(write: Callable[..., tuple[Path, Path]], name: str) -> None:
    """In as few bits as they were, but for inputs grouped in another order and blocks that are cut through."""
    quantized, exact = write(*(WEIGHT_ONLY | ROUNDING)[name])
    config = resolve_model(str(exact)).config()
    for place in places(2, 1):
        local = local_config(config, place)
        found, expected = (
            {
                key: weight
                for key, weight, _ in assemble(local, shard(config, resolve_model(str(folder)).weights(), place), place)
            }
            for folder in (quantized, exact)
        )
        assert found.keys() == expected.keys()
        for key, weight in expected.items():
            assert torch.allclose(dense(found[key]).float(), dense(weight), atol=1e-6), key
            cut_through = "o_proj" in key if name == "fp8 blocks" else grouped_otherwise(name)
            kept = key == "1.down_proj" and (WEIGHT_ONLY | ROUNDING)[name][1]["quant_method"] == "compressed-tensors"
            if key.endswith("_proj") and not kept and not (cut_through and key.endswith(("o_proj", "down_proj"))):
                assert not isinstance(found[key], Tensor), key


@pytest.mark.parametrize("v2", [False, True], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("case", ["right", "wrong", "asymmetric"])
def test_zero_points_that_contradict_the_label_are_warned_of(
    write: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture, v2: bool, case: str
) -> None:
    """4 bits whose middle is 8: version 1 stores 7, version 2 stores 8."""
    label, other = ("gptq_v2", "gptq") if v2 else ("gptq", "gptq_v2")
    packer = files.gptq(4, 32, v2=v2 != (case == "wrong"), symmetric=case != "asymmetric")
    settings = GPTQ | {"checkpoint_format": label, "sym": case != "asymmetric"}
    quantized, _ = write(packer, settings, num_hidden_layers=1)
    source = resolve_model(str(quantized))
    with caplog.at_level(logging.WARNING, "paged_infer"):
        assert len(dict(source.weights())) > 7
    said = [record.getMessage() for record in caplog.records]
    if case != "wrong":
        assert said == []
        return
    assert len(said) == 1
    stored, expected = (7, 8) if v2 else (8, 7)
    for part in (".qzeros: ", f"zero point {stored} ", repr(label), f"store {expected}", f"format to {other!r}"):
        assert part in said[0]


def rounded(x: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    """x with every group of its elements rounded to the dtype's numbers."""
    groups = x.unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(dim=-1, keepdim=True) / (127 if dtype == torch.int8 else 448)
    numbers = groups / scales.clamp(min=1e-12)
    numbers = numbers.round() if dtype == torch.int8 else numbers.to(dtype).float()
    return (numbers * scales).flatten(-2)


@pytest.mark.parametrize("name", ROUNDING)
def test_activations_rounded_too(write: Callable[..., tuple[Path, Path]], backend: Backend, name: str) -> None:
    """Hugging Face's linear layers see inputs rounded a token at a time; on the CPU kernels float8 ones are exact."""
    packer, settings = ROUNDING[name]
    quantized, exact = write(packer, settings)
    dtype = torch.int8 if name == "w8a8" else torch.float8_e4m3fn
    hooks = []
    if not (backend.name == "cpu" and dtype == torch.float8_e4m3fn):
        kept = "layers.1.mlp.down_proj" if settings["quant_method"] == "compressed-tensors" else "lm_head"
        for module_name, module in hf_model(exact).named_modules():
            if module_name.endswith("_proj") and kept not in module_name:
                size = 128 if "blocks" in name else module.in_features
                hooks.append(
                    module.register_forward_pre_hook(lambda _, inputs, size=size: rounded(inputs[0], dtype, size))
                )
    try:
        expected = hf_logits(exact, IDS)
    finally:
        for hook in hooks:
            hook.remove()
    error = (decoder_logits(quantized, backend) - expected).abs()
    # a rounding that falls the other way moves a logit by far more than float32's noise, but few do
    assert error.median() <= 1e-3
    assert error.max() <= 0.02 * expected.abs().max()


def test_parts_stay_low_bit_when_stacked(write: Callable[..., tuple[Path, Path]]) -> None:
    for number, (packer, settings, kind) in enumerate(
        [
            (*WEIGHT_ONLY["gptq v2, act-order"], GroupWeight),
            (*WEIGHT_ONLY["awq"], GroupWeight),
            (*ROUNDING["fp8 tensor"], ScaledWeight),
            (*ROUNDING["fp8 blocks"], ScaledWeight),
        ]
    ):
        quantized, exact = write(packer, settings, num_hidden_layers=1, bos_token_id=number)
        source = resolve_model(str(quantized))
        found = {key: weight for key, weight, _ in assemble(source.config(), source.weights())}
        for key in ("0.qkv_proj", "0.o_proj", "0.gate_up_proj", "0.down_proj"):
            assert isinstance(found[key], kind), (settings, key)
        tensors = load_file(exact / "model.safetensors")
        stacked = torch.cat([tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.allclose(found["0.qkv_proj"].dequantize(), stacked, atol=1e-6)
        quantized.rename(quantized.with_name(f"done{number}"))
        exact.rename(exact.with_name(f"exact{number}"))


@pytest.mark.parametrize(
    ("packer", "settings"),
    [
        (files.gptq(4, 96), GPTQ | {"group_size": 96}),
        (files.awq(96), AWQ | {"group_size": 96}),
        (files.pack_quantized(4, 96), ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=96)),
        (files.awq(64), AWQ),
    ],
)
def test_groups_that_do_not_divide_the_inputs_are_refused(
    write: Callable[..., tuple[Path, Path]], packer: files.Packer, settings: dict[str, Any]
) -> None:
    """They would be read as groups of another size."""
    quantized, _ = write(packer, settings, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"proj: its .* tensors do not fit together"):
        dict(resolve_model(str(quantized)).weights())


def test_a_format_without_kernel_is_dequantised_and_said(
    write: Callable[..., tuple[Path, Path]], backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = write(*WEIGHT_ONLY["awq"])
    with caplog.at_level(logging.WARNING):
        decoder_logits(quantized, backend)
    said = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
    assert said == (
        []
        if backend.name == "cpu"
        else ["no reference kernel for int4 weight-only: 8 layers dequantised to float32 at load"]
    )


def test_bytes_of_low_bit_weights(write: Callable[..., tuple[Path, Path]]) -> None:
    quantized, exact = write(*WEIGHT_ONLY["awq"])
    source, plain = resolve_model(str(quantized)), resolve_model(str(exact))
    linear = sum(
        tensor.numel()
        for name, tensor in load_file(exact / "model.safetensors").items()
        if name.endswith("_proj.weight")
    )
    everything = plain.weight_bytes(torch.bfloat16)
    assert source.weight_bytes(torch.bfloat16) == everything
    assert source.weight_bytes(torch.bfloat16, lambda kept: kept.bits == 4) == everything - 2 * linear + (
        linear // 2 + linear // 32 * 3
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*awq, compressed-tensors"),
        ({"bits": 4}, "'unknown'"),
        (GPTQ | {"bits": 5}, "bits=5"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (FP8 | {"weight_block_size": [64, 64]}, "64, 64"),
        (ct("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4"),
        (ct("pack-quantized", INT8, num_bits=4, type="int", strategy="channel"), "input_activations"),
        (ct("int-quantized", INT8, num_bits=8, type="int") | {"sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
    ],
)
def test_settings_refused_by_name(
    write: Callable[..., tuple[Path, Path]], settings: dict[str, Any], named: str
) -> None:
    quantized, _ = write(files.awq(32), AWQ)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=named):
        resolve_model(str(quantized)).config()


HALF_OF_THE_INPUTS = {"qweight": 64, "qzeros": 2, "scales": 2}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors, name: tensors.pop(f"{name}.qzeros"), "qzeros is missing"),
        (
            lambda tensors, name: tensors.update({f"{name}.scales": tensors[f"{name}.scales"][:3]}),
            "do not fit together",
        ),
        (
            lambda tensors, name: tensors.update(
                {f"{name}.{part}": tensors[f"{name}.{part}"][:rows] for part, rows in HALF_OF_THE_INPUTS.items()}
            ),
            "has shape",
        ),
        (lambda tensors, name: tensors.update({f"{name}.g_idx": tensors[f"{name}.scales"].clone()}), "unexpected"),
    ],
)
def test_layers_refused_by_name(
    write: Callable[..., tuple[Path, Path]], backend: Backend, change: Callable[..., Any], named: str
) -> None:
    quantized, _ = write(*WEIGHT_ONLY["awq"])
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    change(tensors, name)
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}.*{named}|{named}.*{name}"):
        decoder_logits(quantized, backend)
