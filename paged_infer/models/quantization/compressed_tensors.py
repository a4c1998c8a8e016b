"""compressed-tensors checkpoints, as llm-compressor writes them.

`config_groups` say for which layers (`targets`: Linear, a name, or `re:` and a pattern) weights are rounded how; layers
under `ignore` are stored as they were. Numbers of 4 bits, or of 8 without rounded activations, are packed along the
inputs (pack-quantized); others lie in int8 or float8 (int-quantized, float-quantized).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from paged_kernels.quantized import BLOCK, QuantizedWeight, WeightFormat, from_numbers, unpack
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.quantization.fp8 import scaled_weight
from paged_infer.models.quantization.scheme import setting

_METHOD = "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class _Group:
    targets: tuple[str, ...]
    format: WeightFormat
    symmetric: bool

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> _Group:
        weights, inputs = settings.get("weights"), settings.get("input_activations")
        if not isinstance(weights, Mapping):
            raise ConfigError(f"{_METHOD}: a config group without weights is not supported")
        kind = setting(_METHOD, weights, "type", "int", ("int", "float"))
        bits = setting(_METHOD, weights, "num_bits", 8, (4, 8) if kind == "int" else (8,))
        strategy = setting(_METHOD, weights, "strategy", "tensor", ("tensor", "channel", "group", "block"))
        symmetric = bool(weights.get("symmetric", True))
        if inputs is not None and (inputs.get("num_bits"), inputs.get("type", "int")) != (bits, kind):
            raise ConfigError(
                f"{_METHOD}: input_activations of {inputs.get('num_bits')} bits beside weights of {bits} are not "
                "supported"
            )
        group_size = weights.get("group_size") if strategy == "group" else None
        if strategy == "block" and list(weights.get("block_structure") or ()) != [BLOCK, BLOCK]:
            raise ConfigError(
                f"{_METHOD}: block_structure={weights.get('block_structure')} is not supported; supported: [128, 128]"
            )
        rounds = inputs is not None
        if kind == "float":
            form = WeightFormat("fp8", 8, BLOCK if strategy == "block" else None, rounds)
        elif rounds and symmetric and strategy != "group":
            form = WeightFormat("int8", 8, None, True)
        else:
            form = WeightFormat("group", bits, group_size)
        return cls(tuple(settings.get("targets") or ("Linear",)), form, symmetric)

    def covers(self, module: str) -> bool:
        return any(target == "Linear" or _matches(target, module) for target in self.targets)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")


class CompressedTensors:
    """Weights of 4 or 8 bits in groups, int8 on both sides, float8."""

    method = _METHOD
    suffixes = frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"}
    )
    marks = frozenset({"weight_scale"})
    ignored = frozenset({"input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale"})

    def __init__(self, settings: Mapping[str, Any]) -> None:
        setting(_METHOD, settings, "format", "pack-quantized", (*_FORMATS, "mixed-precision", "dense"))
        sparsity = settings.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise ConfigError(f"{_METHOD}: sparsity format {sparsity['format']!r} is not supported")
        self._groups = []
        for group in (settings.get("config_groups") or {}).values():
            setting(_METHOD, group, "format", None, (None, *_FORMATS))
            self._groups.append(_Group.read(group))

    def _group(self, module: str) -> _Group:
        found = [group for group in self._groups if group.covers(module)]
        exact = [group for group in found if "Linear" not in group.targets]
        if not found:
            raise ConfigError(f"{_METHOD}: no config group has a target for {module}, whose weight is quantised")
        return (exact or found)[0]

    def format_of(self, module: str) -> WeightFormat:
        return self._group(module).format

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        group = self._group(module)
        scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
        if "weight_packed" in tensors:
            return _packed(group.format.bits, tensors["weight_packed"], tensors, zero)
        numbers = tensors["weight"]
        if numbers.dtype == torch.int8 and ((zero is not None and bool(zero.any())) or group.format.kind == "group"):
            columns = (
                scale.reshape(-1, 1).expand(len(numbers), 1) if scale.numel() == 1 else scale.view(len(numbers), -1)
            )
            zeros = torch.zeros_like(columns) if zero is None else zero.expand_as(columns)
            codes = (numbers.to(torch.int16) + 128).to(torch.uint8)
            return from_numbers(codes.t(), columns.t(), zeros.t().float() + 128, 8, tensors.get("weight_g_idx"))
        return scaled_weight(numbers, scale, group.format.rounds_activations)


def _packed(bits: int, packed: Tensor, tensors: Mapping[str, Tensor], zero: Tensor | None) -> QuantizedWeight:
    """weight_packed [N, K * bits / 32] holds value + 2^(bits - 1), the first lowest; zero points are packed along N."""
    n = len(packed)
    k = int(tensors["weight_shape"][1]) if "weight_shape" in tensors else packed.shape[1] * 32 // bits
    numbers = unpack(packed.t().contiguous(), bits)[:k]
    scales = tensors["weight_scale"].view(n, -1).t()
    middle = 1 << (bits - 1)
    if zero is None:
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
    elif zero.dtype == torch.int32:
        zeros = unpack(zero, bits)[:n].t()
    else:
        zeros = (zero.view(n, -1).t().to(torch.int16) + middle).to(torch.uint8)
    return from_numbers(numbers, scales, zeros, bits, tensors.get("weight_g_idx"))
