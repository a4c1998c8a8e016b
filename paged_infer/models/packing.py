"""Linear layers out of whatever a checkpoint holds."""

from __future__ import annotations

import logging
from collections import Counter

from paged_kernels.interface import Backend, Linear
from torch import Tensor

from paged_infer.models.weights import Weight

logger = logging.getLogger(__name__)


class LinearPacker:
    """Makes a backend's linear layers, dequantising weights it has no kernel for; `report` says which those were."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dequantized: Counter[str] = Counter()

    def __call__(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Tensor):
            return self._backend.make_linear(weight, bias)
        linear = self._backend.make_quantized(weight, bias)
        if linear is None:
            self._dequantized[str(weight.format)] += 1
            linear = self._backend.make_linear(weight.dequantize(), bias)
        return linear

    def report(self) -> None:
        """One line for each format that was dequantised."""
        for kind, count in self._dequantized.items():
            logger.warning(
                "no %s kernel for %s: %d layers dequantised to %s at load",
                self._backend.name,
                kind,
                count,
                str(self._backend.dtype).removeprefix("torch."),
            )
