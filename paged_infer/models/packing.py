"""Linear layers out of whatever a checkpoint holds."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from paged_kernels.interface import Backend, Linear
from torch import Tensor

from paged_infer.models.weights import Weight, stored

logger = logging.getLogger(__name__)


class LinearPacker:
    """Makes a backend's linear layers, dequantising weights it has no kernel for; `report` says which those were."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dequantized: Counter[str] = Counter()

    def takes(self, key: str, weight: Weight) -> bool:
        """Whether the parameter `key` is one of the layers' matrices, experts' apart."""
        return key[0].isdigit() and ".experts." not in key and not (isinstance(weight, Tensor) and weight.dim() == 1)

    def __call__(self, key: str, weight: Weight, bias: Tensor | None) -> Linear:
        weight = stored(weight)
        if isinstance(weight, Tensor):
            return self._backend.make_linear(weight, bias)
        linear = self._backend.make_quantized(weight, bias)
        if linear is None:
            self._dequantized[str(weight.format)] += 1
            linear = self._backend.make_linear(weight.dequantize(), bias)
        return linear

    def dense(self, weight: Weight) -> Tensor:
        """A weight that is needed in floating point whatever the backend."""
        weight = stored(weight)
        if isinstance(weight, Tensor):
            return weight
        self._dequantized[str(weight.format)] += 1
        return weight.dequantize()

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


class OffloadingPacker(LinearPacker):
    """Makes linear layers whose weights stay on disk: each is read when its turn comes, the next ones meanwhile.

    A pass reads the whole model once, whatever its number of rows, so it pays for large batches alone.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._layers: list[_OffloadedLinear] = []
        self._readers = ThreadPoolExecutor(_READERS, "weights")

    def __call__(self, key: str, weight: Weight, bias: Tensor | None) -> Linear:
        bias = None if bias is None else bias.clone()
        layer = _OffloadedLinear(self, key, weight, bias)
        self._layers.append(layer)
        self._layers.sort(key=_turn)
        for number, other in enumerate(self._layers):
            other.turn = number
        return layer

    def make(self, layer: _OffloadedLinear) -> Linear:
        """Read and pack a layer."""
        return super().__call__(layer.key, layer.weight, layer.bias)

    def take(self, layer: _OffloadedLinear) -> Linear:
        """The layer, read ahead if its turn was foreseen; starts to read those that follow."""
        ahead, layer.ahead = layer.ahead, None
        linear = self.make(layer) if ahead is None else ahead.result()
        for number in range(1, min(_READERS + 1, len(self._layers))):
            following = self._layers[(layer.turn + number) % len(self._layers)]
            if following.ahead is None:
                following.ahead = self._readers.submit(self.make, following)
        return linear


_READERS = 2
"""One packs while another waits for the disk; each holds a matrix."""

_ORDER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def _turn(layer: _OffloadedLinear) -> tuple[int, int]:
    number, _, name = layer.key.partition(".")
    return int(number), _ORDER.index(name) if name in _ORDER else len(_ORDER)


class _OffloadedLinear:
    def __init__(self, packer: OffloadingPacker, key: str, weight: Weight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.key, self.weight, self.bias = key, weight, bias
        self.turn = 0
        self.ahead: Future[Linear] | None = None
        self._packer = packer

    def __call__(self, x: Tensor) -> Tensor:
        return self._packer.take(self)(x)
