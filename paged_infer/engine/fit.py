"""What a model's weights take in each format, by formula, and which GPUs hold that."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paged_kernels.quantized import WeightFormat

from paged_infer.models.config import ModelConfig
from paged_infer.models.weights import layer_parameters, num_weights

GPUS = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9, "192 GB": 192e9}
"""Memory of common cards: RTX 3090 and 4090, L40S, A100 and H100, H200, B200."""

_FORMATS = {
    "16 bits": None,
    "int8, fp8": WeightFormat("int8", 8, None, True),
    "int4, groups of 64": WeightFormat("group", 4, 64),
}


LAYER_SHARE = {"none": 1.0, "int8": 0.5, "fp8": 0.5, "int4": 0.27}
"""Bytes of the layers' matrices beside 16 bits, by `--quantization`; scales and zero points included."""


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Bytes of the layers' matrices in a format, and of all weights with the others in 16 bits."""

    name: str
    layer_bytes: int
    total_bytes: int


def weight_sizes(model: ModelConfig) -> list[WeightSize]:
    """In 16, 8 and 4 bits, scales and zero points included."""
    shapes = [
        (part.rows, parameter.columns)
        for layer in range(model.num_layers)
        for parameter in layer_parameters(model, layer)
        if parameter.columns is not None
        for part in parameter.parts
    ]
    plain = sum(2 * rows * columns for rows, columns in shapes)
    others = 2 * num_weights(model) - plain
    sizes = []
    for name, kept in _FORMATS.items():
        layers = plain if kept is None else sum(kept.bytes_of(rows, columns) for rows, columns in shapes)
        sizes.append(WeightSize(name, layers, layers + others))
    return sizes


def gpus_for(total_bytes: int, gpu: str, utilization: float) -> int:
    """Cards of that kind whose memory, as far as it may be used, holds the weights; none is left for the KV cache."""
    return math.ceil(total_bytes / (GPUS[gpu] * utilization))
