"""What a checkpoint format is to the loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paged_kernels.quantized import QuantizedWeight, WeightFormat
from torch import Tensor

from paged_infer.config import ConfigError


class Scheme(Protocol):
    """One checkpoint format with the settings of one checkpoint.

    Attributes:
        method: its name, as `quant_method` spells it.
        suffixes: last parts of the names of a quantised layer's tensors, its bias apart.
        marks: those of them that only quantised layers have.
        ignored: last parts of tensors that nothing here needs: scales of caches and of static activations.
    """

    method: str
    suffixes: frozenset[str]
    marks: frozenset[str]
    ignored: frozenset[str]

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of layer `module` from its tensors by last part of their names.

        Raises ValueError, RuntimeError (of torch) or KeyError where they don't fit together.
        """
        ...

    def format_of(self, module: str) -> WeightFormat:
        """How the weight of a layer that is quantised will be kept. Raises `ConfigError` where nothing says."""
        ...


def setting(method: str, settings: Mapping[str, Any], name: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    """The value of a field of `quantization_config`. Raises `ConfigError` for one that is not among `allowed`."""
    value = settings.get(name, default)
    if value not in allowed:
        expected = ", ".join(str(one) for one in allowed)
        raise ConfigError(f"{method}: {name}={value!r} is not supported; supported: {expected}")
    return value
