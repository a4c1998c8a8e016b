"""float8 checkpoints as transformers, DeepSeek and FBGEMM write them.

Scales are one for the whole weight, one for each output, or one for each block of 128 x 128 (`weight_scale_inv`, by
which a number is multiplied, in spite of its name). Activations are rounded with scales of their own as they come;
static ones that a checkpoint brings are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from paged_kernels.quantized import BLOCK, QuantizedWeight, ScaledWeight, WeightFormat
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.quantization.scheme import setting


class FP8:
    """float8_e4m3fn weights."""

    suffixes = frozenset({"weight", "weight_scale", "weight_scale_inv"})
    marks = frozenset({"weight_scale", "weight_scale_inv"})
    ignored = frozenset({"input_scale", "activation_scale", "k_scale", "v_scale", "kv_scale", "input_scale_ub"})

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.method: str = settings["quant_method"]
        setting(self.method, settings, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
        block = settings.get("weight_block_size")
        if block is not None and list(block) != [BLOCK, BLOCK]:
            raise ConfigError(f"{self.method}: weight_block_size={block} is not supported; supported: [128, 128]")
        self._blocks = block is not None

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        scale = tensors.get("weight_scale_inv")
        return scaled_weight(tensors["weight"], tensors["weight_scale"] if scale is None else scale, True)

    def format_of(self, module: str) -> WeightFormat:
        return WeightFormat("fp8", 8, BLOCK if self._blocks else None, True)


def scaled_weight(numbers: Tensor, scales: Tensor, rounds_activations: bool) -> ScaledWeight:
    """numbers [N, K] with a scale for all of it, for each output ([N] or [N, 1]) or for each block of 128 x 128."""
    n, k = numbers.shape
    scales = scales.to(torch.float32)
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1)
    elif scales.shape == (n,):
        scales = scales[:, None]
    elif scales.shape != (n, 1) and scales.shape != (-(-n // BLOCK), -(-k // BLOCK)):
        raise ValueError(f"scales {list(scales.shape)} beside numbers [{n}, {k}]")
    return ScaledWeight(numbers.contiguous(), scales.contiguous(), rounds_activations)
