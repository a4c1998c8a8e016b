"""LoRA adapters as PEFT saves them: low-rank additions to a decoder's linear layers, several of them in one batch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paged_kernels.interface import Backend, GroupedLinear
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.config import ModelConfig
from paged_infer.models.weights import layer_parameters

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_TENSOR = re.compile(r"(?:base_model\.model\.)?(model\.layers\.\d+\..+)\.lora_([AB])(?:\.default)?\.weight")
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
}
"""Fields of the adapter's config that must have one of these values, if they are there."""


@dataclass(frozen=True, slots=True)
class _Addition:
    """To output columns [start, start + N) of a layer comes x @ a.T @ b.T: a [r, K], b [N, r], scaled; float32."""

    start: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as its files have it.

    Attributes:
        name: what rows call it.
        digest: of its files; adapters of the same content share cached blocks, and no others do.
        additions: parameter key (`LAYER.NAME`, as in `models.weights`) → what is added to that layer's output.
    """

    name: str
    digest: str
    additions: Mapping[str, Sequence[_Addition]]


def load_adapter(name: str, folder: Path, config: ModelConfig) -> Adapter:
    """Read a PEFT folder for a model of this config. Raises `ConfigError` naming file, field or tensors."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        digest = hashlib.sha256((folder / CONFIG).read_bytes() + (folder / WEIGHTS).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise ConfigError(f"lora {name}={folder}: {error}") from None
    for field, allowed in _UNSUPPORTED.items():
        if field in settings and settings[field] not in allowed:
            raise ConfigError(f"lora {name}={folder}: {field}={settings[field]!r} is not supported")
    tensors = dict(_tensors(name, folder))
    additions: dict[str, list[_Addition]] = {}
    for layer in range(config.num_layers):
        for parameter in layer_parameters(config, layer):
            if not parameter.adaptable:
                continue
            start = 0
            for part in parameter.parts:
                pair = tensors.pop(f"{part.name}.A", None), tensors.pop(f"{part.name}.B", None)
                if parameter.columns is not None and pair[0] is not None and pair[1] is not None:
                    a, b = _checked(f"lora {name}: {part.name}", pair[0], pair[1], parameter.columns, part.rows)
                    scale = settings["lora_alpha"] / (math.sqrt(len(a)) if settings.get("use_rslora") else len(a))
                    additions.setdefault(parameter.key, []).append(_Addition(start, a, scale * b))
                elif pair != (None, None):
                    raise ConfigError(f"lora {name}={folder}: {part.name} has only one of its two matrices")
                start += part.rows
    if tensors or not additions:
        what = f"nowhere to put {', '.join(sorted(tensors)[:8])}" if tensors else "no tensors for this model's layers"
        raise ConfigError(f"lora {name}={folder}: {what}")
    return Adapter(name, digest, additions)


def _tensors(name: str, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Matrices under the name of their layer and A or B, in float32; others under their own."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                match = _TENSOR.fullmatch(key)
                yield key if match is None else f"{match[1]}.{match[2]}", file.get_tensor(key).float()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"lora {name}={folder}: {error}") from None


def _checked(what: str, a: Tensor, b: Tensor, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    rank = len(a)
    if a.shape != (rank, columns) or b.shape != (rows, rank):
        raise ConfigError(
            f"{what}: matrices {list(a.shape)} and {list(b.shape)}, expected [r, {columns}] and [{rows}, r]"
        )
    return a, b


class Adapters:
    """Adapters packed for a backend: for each layer one pair of grouped matrices, a group for each adapter.

    Matrices of fewer ranks than an adapter's largest are filled up with zeros, as are those of adapters that leave a
    layer as it is.
    """

    def __init__(self, adapters: Sequence[Adapter], backend: Backend) -> None:
        self.index: dict[str | None, int] = {adapter.name: i for i, adapter in enumerate(adapters)}
        self._pairs: dict[str, tuple[GroupedLinear, GroupedLinear]] = {}
        for key in sorted({key for adapter in adapters for key in adapter.additions}):
            groups = [adapter.additions.get(key, ()) for adapter in adapters]
            inputs = next(addition.a.shape[1] for group in groups for addition in group)
            outputs = max(addition.start + len(addition.b) for group in groups for addition in group)
            rank = max(sum(len(addition.a) for addition in group) for group in groups)
            down, up = torch.zeros(len(groups), rank, inputs), torch.zeros(len(groups), outputs, rank)
            for g, group in enumerate(groups):
                first = 0
                for addition in group:
                    ranks = slice(first, first := first + len(addition.a))
                    down[g, ranks] = addition.a
                    up[g, addition.start : addition.start + len(addition.b), ranks] = addition.b
            self._pairs[key] = backend.make_grouped(down), backend.make_grouped(up)

    def rows(self, which: Tensor) -> AdapterRows:
        """which: [T] int64, an index into the adapters for each token of a packed batch; -1 = none."""
        return AdapterRows(self._pairs, len(self.index), which)


class AdapterRows:
    """Which adapter each token of a packed batch uses; made by `Adapters.rows`."""

    def __init__(
        self, pairs: Mapping[str, tuple[GroupedLinear, GroupedLinear]], num_adapters: int, which: Tensor
    ) -> None:
        self._pairs = pairs
        self._num_adapters = num_adapters
        self._which = which
        groups, self._order = torch.where(which < 0, num_adapters, which).sort(stable=True)
        self._offsets = torch.searchsorted(groups, torch.arange(num_adapters + 1, device=which.device)).int()

    def take(self, indices: Tensor) -> AdapterRows:
        """Of the tokens at `indices`."""
        return AdapterRows(self._pairs, self._num_adapters, self._which[indices])

    def add(self, key: str, x: Tensor, out: Tensor) -> None:
        """Add to out [T, N], in place, what the tokens' adapters make of x [T, K] in the layer `key`."""
        if key in self._pairs:
            down, up = self._pairs[key]
            change = up(down(x[self._order], self._offsets), self._offsets)
            out[:, : change.shape[1]].index_add_(0, self._order, change)
