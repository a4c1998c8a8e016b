"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kernels.quantized import QuantizedWeight, WeightFormat, from_gptq
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.quantization.scheme import setting


class GPTQ:
    """2, 3, 4 or 8 bits, groups of inputs (group_size −1 = all of them), perhaps in the order of activation."""

    method = "gptq"
    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    marks = frozenset({"qweight"})
    ignored = frozenset[str]()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits: int = setting("gptq", settings, "bits", 4, (2, 3, 4, 8))
        layout = setting("gptq", settings, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
        self._v2 = layout == "gptq_v2"
        self._group_size: int = settings.get("group_size", 128)
        changed = [rule for rule in settings.get("dynamic") or {} if not rule.startswith("-:")]
        if changed:
            raise ConfigError(f"gptq: other settings for some layers (dynamic: {changed[0]}) are not supported")

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        return from_gptq(
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            tensors.get("g_idx"),
            bits=self._bits,
            v2=self._v2,
        )

    def format_of(self, module: str) -> WeightFormat:
        return WeightFormat("group", max(self._bits, 4), self._group_size if self._group_size > 0 else None)
