"""AWQ checkpoints, as AutoAWQ writes them.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_kernels.quantized import QuantizedWeight, WeightFormat, from_awq
from torch import Tensor

from paged_infer.models.quantization.scheme import setting


class AWQ:
    """4 bits with zero points, packed for the GEMM kernels."""

    method = "awq"
    suffixes = frozenset({"qweight", "qzeros", "scales"})
    marks = frozenset({"qweight"})
    ignored = frozenset[str]()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        setting("awq", settings, "bits", 4, (4,))
        setting("awq", settings, "version", "gemm", ("gemm", "GEMM"))
        setting("awq", settings, "zero_point", True, (True,))
        self._group_size: int = settings.get("group_size", 128)

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        return from_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"])

    def format_of(self, module: str) -> WeightFormat:
        return WeightFormat("group", 4, self._group_size if self._group_size > 0 else None)
