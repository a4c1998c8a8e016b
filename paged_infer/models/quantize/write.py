"""Writes quantised weights as a folder that transformers and compressed-tensors, vLLM and this package read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from paged_kernels.quantized import GroupWeight, QuantizedWeight, WeightFormat, pack
from safetensors.torch import save_file
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.safetensors import INDEX
from paged_infer.models.source import GGUFSource, ModelSource
from paged_infer.models.weights import StoredWeight

SHARD_BYTES = 2 << 30

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "generation_config.json",
)


class CheckpointWriter:
    """A folder of safetensors shards, each written when it is full; `finish` adds index, config and tokenizer.

    Raises `ConfigError` where the folder holds something already.
    """

    def __init__(self, folder: Path, source: ModelSource, dtype: torch.dtype) -> None:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._source, self._dtype = folder, source, dtype
        self._shard: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._shards: list[list[str]] = []
        self._format: WeightFormat | None = None
        self._plain: list[str] = []

    def add(self, name: str, weight: StoredWeight) -> None:
        """One weight under its Hugging Face name; floating point ones of two dimensions in the writer's dtype."""
        if isinstance(weight, Tensor):
            matrix = weight.dim() > 1 and weight.is_floating_point()
            if matrix:
                self._plain.append(name.removesuffix(".weight"))
            tensors = {name: weight.to("cpu", self._dtype if matrix else weight.dtype, copy=True)}
        else:
            self._format = weight.format
            module = name.removesuffix(".weight")
            tensors = {f"{module}.{part}": tensor for part, tensor in _parts(weight).items()}
        for tensor_name, tensor in tensors.items():
            self._shard[tensor_name] = tensor.cpu().contiguous()
            self._bytes += tensor.nbytes
        if self._bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._shard:
            return
        save_file(self._shard, self._folder / f"model-{len(self._shards):05d}.safetensors", metadata={"format": "pt"})
        self._shards.append(list(self._shard))
        self._total += self._bytes
        self._shard, self._bytes = {}, 0

    def finish(self) -> None:
        """Whatever else a model's folder needs."""
        self._flush()
        count = len(self._shards)
        where: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"model-{number:05d}.safetensors").rename(self._folder / final)
            where |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        config = _hf_config(self._source) | {"dtype": str(self._dtype).removeprefix("torch.")}
        config["quantization_config"] = self._settings()
        (self._folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        for pattern in _COPIED:
            for path in self._source.tokenizer_folder().glob(pattern):
                shutil.copy(path, self._folder / path.name)

    def _settings(self) -> dict[str, Any]:
        kept = self._format
        if kept is None:
            raise ConfigError("no layer of this model can be quantised")
        weights: dict[str, Any] = {"num_bits": kept.bits, "type": "float" if kept.kind == "fp8" else "int"}
        if kept.kind == "group":
            weights |= {"strategy": "group", "group_size": kept.group_size, "symmetric": False, "dynamic": False}
        else:
            weights |= {"strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = None
        if kept.rounds_activations:
            inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token", "symmetric": True, "dynamic": True}
        layout = {"group": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[kept.kind]
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted({*(name for name in self._plain if "embed" not in name), "lm_head"}),
        }


def _parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    """A weight's tensors as compressed-tensors names and packs them."""
    if not isinstance(weight, GroupWeight):
        return {"weight": weight.numbers, "weight_scale": weight.row_scales().float()}
    if weight.permutation is not None:
        raise ValueError("a weight whose inputs are in another order cannot be written")
    n, k = weight.shape
    if n % (32 // weight.bits):
        raise ConfigError(f"a layer of {n} outputs cannot be packed: expected a multiple of {32 // weight.bits}")
    return {
        "weight_packed": weight.qweight.t(),
        "weight_scale": weight.scales.t(),
        "weight_zero_point": pack(weight.zeros.t(), weight.bits),
        "weight_shape": torch.tensor([n, k]),
    }


def _hf_config(source: ModelSource) -> dict[str, Any]:
    """The `config.json` of the model; a GGUF's is made by transformers."""
    if isinstance(source, GGUFSource):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
        found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        return {key: value for key, value in found.items() if key != "quantization_config"}
    path = next(path for path in source.files() if path.name == "config.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded
