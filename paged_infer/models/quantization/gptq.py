"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paged_kernels.quantized import GroupWeight, QuantizedWeight, WeightFormat, from_gptq
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.quantization.scheme import setting

logger = logging.getLogger(__name__)


class GPTQ:
    """2, 3, 4 or 8 bits, groups of inputs (group_size −1 = all of them), perhaps in the order of activation.

    The zero points of a checkpoint that calls itself symmetric are the middle of the range. Where they are not, the
    label is wrong, of the symmetry or of the version, and nothing but the weights' use can tell which: it is warned of,
    once.
    """

    method = "gptq"
    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    marks = frozenset({"qweight"})
    ignored = frozenset[str]()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._bits: int = setting("gptq", settings, "bits", 4, (2, 3, 4, 8))
        layout = setting("gptq", settings, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
        self._v2 = layout == "gptq_v2"
        self._group_size: int = settings.get("group_size", 128)
        self._doubtful = settings.get("sym") is True
        changed = [rule for rule in settings.get("dynamic") or {} if not rule.startswith("-:")]
        if changed:
            raise ConfigError(f"gptq: other settings for some layers (dynamic: {changed[0]}) are not supported")

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        weight = from_gptq(
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            tensors.get("g_idx"),
            bits=self._bits,
            v2=self._v2,
        )
        if self._doubtful:
            self._check_symmetry(module, weight)
        return weight

    def _check_symmetry(self, module: str, weight: GroupWeight) -> None:
        middle, less = 1 << self._bits - 1, 0 if self._v2 else 1
        others = weight.zeros[weight.zeros != middle]
        if not len(others):
            return
        self._doubtful = False
        logger.warning(
            "%s.qzeros: stored zero point %d in a symmetric %d-bit checkpoint of checkpoint_format %r, which would "
            "store %d; should answers be nonsense, set checkpoint_format to %r in config.json, otherwise sym to false",
            module,
            int(others[0]) - less,
            self._bits,
            "gptq_v2" if self._v2 else "gptq",
            middle - less,
            "gptq" if self._v2 else "gptq_v2",
        )

    def format_of(self, module: str) -> WeightFormat:
        return WeightFormat("group", max(self._bits, 4), self._group_size if self._group_size > 0 else None)
