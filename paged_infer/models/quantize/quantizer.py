"""One pass over calibration text in which every linear layer rounds itself when its inputs come.

The decoder is the one that runs models, with layers of another kind: called with the inputs of all calibration tokens,
a layer reads its weight, has it rounded by the method, and answers with the rounded one's product. So each layer sees
inputs that the rounding before it has already bent, and no more than one layer's weight is held.

Division of inputs (see `methods`) goes where it costs nothing: into the norm before, into the value rows before the
attention's output, into the upward rows before the downward ones. Rows rounded already take it into their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from paged_kernels.interface import Backend, Linear
from paged_kernels.quantized import QuantizedWeight
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.config import ModelConfig
from paged_infer.models.decoder import Decoder
from paged_infer.models.packing import LinearPacker
from paged_infer.models.quantize.calibration import BLOCK_SIZE, one_layer_cache, whole_batch
from paged_infer.models.quantize.methods import Method
from paged_infer.models.source import ModelSource, native
from paged_infer.models.weights import StoredWeight, Weight, deferred, dense, layer_parameters

_QUANTIZED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

Emit = Callable[[str, StoredWeight], None]


@dataclass(slots=True)
class _Layer:
    """What is known of a decoder layer so far: rounded weights, and factors for what comes before them."""

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class _RoundingPacker(LinearPacker):
    """Linear layers that round themselves; `done` is told of each decoder layer when the next one begins."""

    def __init__(
        self, config: ModelConfig, backend: Backend, method: Method, done: Callable[[int, _Layer], None]
    ) -> None:
        super().__init__(backend)
        self._config = config
        self._method = method
        self._done = done
        self._number, self._layer = 0, _Layer()

    def finish(self) -> None:
        """The layer in hand is complete."""
        self._done(self._number, self._layer)
        self._layer = _Layer()

    def __call__(self, key: str, weight: Weight, bias: Tensor | None) -> Linear:
        number, _, name = key.partition(".")
        if name not in _QUANTIZED:
            return super().__call__(key, weight, bias)
        bias = None if bias is None else bias.float()
        return _RoundingLinear(self, int(number), name, weight, bias)

    def round(self, number: int, name: str, weight: Tensor, x: Tensor) -> Tensor:
        """Weight [N, K] for inputs x [T, K]; returns what the layer now multiplies x with."""
        if number != self._number:
            self.finish()
            self._number = number
        layer, method = self._layer, self._method
        scales = self._scales(name, weight, x)
        if scales is None:
            rounded = method.round(weight, x)
            layer.weights[name] = rounded
            return rounded.dequantize()
        rounded = method.round(weight * scales, x / scales)
        layer.weights[name] = rounded
        if name in ("qkv_proj", "gate_up_proj"):
            norm = "input_layernorm" if name == "qkv_proj" else "post_attention_layernorm"
            layer.norms[norm] = 1 / scales
        else:
            before = "qkv_proj" if name == "o_proj" else "gate_up_proj"
            factors = 1 / self._channels(name, scales)
            total = layer.weights[before].shape[0]
            layer.rows[before] = torch.cat([factors.new_ones(total - len(factors)), factors])
        return rounded.dequantize() / scales

    def _scales(self, name: str, weight: Tensor, x: Tensor) -> Tensor | None:
        """What the inputs may be divided by, None where nothing before the layer can take it."""
        after_norm = name in ("qkv_proj", "gate_up_proj")
        if (after_norm and self._config.norms == "post") or (name == "down_proj" and not self._config.gated):
            return None
        sharing = (1, weight.shape[1])
        if name == "o_proj":
            sharing = (self._config.num_heads // self._config.num_kv_heads, self._config.head_dim)
        return self._method.input_scales(weight, x, sharing)

    def _channels(self, name: str, scales: Tensor) -> Tensor:
        """From the inputs of a layer to the rows before it that they come from."""
        if name != "o_proj":
            return scales
        return scales.view(self._config.num_kv_heads, -1, self._config.head_dim)[:, 0].reshape(-1)


class _RoundingLinear:
    def __init__(self, packer: _RoundingPacker, number: int, name: str, weight: Weight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packer, self._number, self._name = packer, number, name
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        weight = dense(self._weight).to(x.device, torch.float32)
        rounded = self._packer.round(self._number, self._name, weight, x.float())
        return F.linear(x.float(), rounded, self._bias).to(x.dtype)


def quantized_weights(source: ModelSource, backend: Backend, method: Method, rows: Tensor, emit: Emit) -> None:
    """Hand on every weight of the model under its Hugging Face name, the layers' matrices rounded.

    Args:
        backend: runs the calibration.
        rows: [R, L] int64, token ids; one short row does for a method that is not calibrated.
        emit: takes a name and a weight, layer by layer as they are done.

    Raises `ConfigError` where a layer's size does not suit the method.
    """
    config = native(source.config(), "quantising")
    if config.naming.transposed:
        raise ConfigError(f"models of family {config.family} have their matrices transposed: they cannot be quantised")
    stored_names = {config.naming.usual(name): name for name, _ in source.entries()}
    readers = {config.naming.usual(name): read for name, read in source.entries()}
    ids, meta, blocks = whole_batch(rows, backend.device)

    def done(number: int, layer: _Layer) -> None:
        for name, weight in _outcome(config, number, layer, readers):
            del readers[name]
            emit(stored_names[name], weight)

    packer = _RoundingPacker(config, backend, method, done)
    decoder = Decoder(
        config,
        one_layer_cache(backend),
        deferred(config, readers.items()),
        max_position=rows.shape[1],
        packer=packer,
    )
    kv = backend.make_kv_cache(1, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    with torch.inference_mode():
        decoder.hidden(ids, meta, kv, torch.arange(len(ids), device=backend.device))
    packer.finish()
    for name, read in readers.items():
        emit(stored_names[name], read())


def _outcome(
    config: ModelConfig, number: int, layer: _Layer, readers: Mapping[str, Callable[[], StoredWeight]]
) -> Iterator[tuple[str, StoredWeight]]:
    """The weights of a decoder layer that the pass has changed, under the names of `readers`."""
    for parameter in layer_parameters(config, number):
        key = parameter.key.partition(".")[2]
        if key in layer.norms:
            part, factors = parameter.parts[0], layer.norms[key].cpu()
            weight = dense(readers[part.weight]()).float() + config.norm_offset
            yield part.weight, weight * factors - config.norm_offset
            if part.bias:
                yield f"{part.name}.bias", dense(readers[f"{part.name}.bias"]()).float() * factors
        if key not in layer.weights:
            continue
        rounded, scales = layer.weights[key], layer.rows.get(key)
        if scales is not None:
            rounded = rounded.scale_rows(scales)
        start = 0
        for part in parameter.parts:
            stop = start + part.rows
            yield part.weight, rounded.rows(start, stop)
            bias = f"{part.name}.bias"
            if scales is not None and bias in readers:
                yield bias, dense(readers[bias]()).float() * scales[start:stop].cpu()
            start = stop
