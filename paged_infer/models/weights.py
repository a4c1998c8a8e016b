"""Which tensors a decoder is made of, and how a stream of checkpoint tensors becomes packed parameters.

Names are those of Hugging Face checkpoints. A checkpoint comes as (name, tensor) pairs in any order; `assemble` stacks
what is fused at run time and hands each parameter on as soon as its last part is in, so that no more than an
unfinished layer is held. What is left over or missing at the end is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from paged_kernels.quantized import GroupWeight, QuantizedWeight, ScaledWeight, stack
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.config import ModelConfig

_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_NAMES_SHOWN = 20

StoredWeight = Tensor | QuantizedWeight
"""What a checkpoint may hold under the name of a weight."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A weight that is read each time it is asked for, and not before."""

    load: Callable[[], StoredWeight]


Weight = StoredWeight | Deferred


class CheckpointError(ConfigError):
    """The model's files are damaged, incomplete, or do not fit their config; the message names file or tensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint weight `name`.weight of so many rows, and perhaps `name`.bias."""

    name: str
    rows: int
    bias: bool = False

    @property
    def bias_optional(self) -> bool:
        """Some checkpoints leave out the key bias, which is then 0: softmax hardly sees it."""
        return self.name.endswith(".k_proj")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parts stacked along their rows: a matrix [sum of rows, columns], or a vector where `columns` is None."""

    key: str
    parts: tuple[Part, ...]
    columns: int | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name → shape of everything that may be read for it."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self.parts:
            shapes[f"{part.name}.weight"] = (part.rows,) if self.columns is None else (part.rows, self.columns)
            if part.bias:
                shapes[f"{part.name}.bias"] = (part.rows,)
        return shapes


def layer_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of a decoder layer; their keys are `LAYER.NAME`."""
    source = f"model.layers.{layer}"
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def parameter(name: str, *parts: Part, columns: int | None = None) -> Parameter:
        return Parameter(f"{layer}.{name}", parts, columns)

    yield parameter("input_layernorm", Part(f"{source}.input_layernorm", hidden))
    yield parameter(
        "qkv_proj",
        Part(f"{source}.self_attn.q_proj", q_rows, config.qkv_bias),
        Part(f"{source}.self_attn.k_proj", kv_rows, config.qkv_bias),
        Part(f"{source}.self_attn.v_proj", kv_rows, config.qkv_bias),
        columns=hidden,
    )
    if config.qk_norm:
        yield parameter("q_norm", Part(f"{source}.self_attn.q_norm", config.head_dim))
        yield parameter("k_norm", Part(f"{source}.self_attn.k_norm", config.head_dim))
    yield parameter("o_proj", Part(f"{source}.self_attn.o_proj", hidden, config.o_bias), columns=q_rows)
    yield parameter("post_attention_layernorm", Part(f"{source}.post_attention_layernorm", hidden))
    yield parameter(
        "gate_up_proj",
        Part(f"{source}.mlp.gate_proj", inner, config.mlp_bias),
        Part(f"{source}.mlp.up_proj", inner, config.mlp_bias),
        columns=hidden,
    )
    yield parameter("down_proj", Part(f"{source}.mlp.down_proj", hidden, config.mlp_bias), columns=inner)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All parameters of a decoder. A tied LM head is listed too: checkpoints may bring it."""
    yield Parameter("embed_tokens", (Part("model.embed_tokens", config.vocab_size),), config.hidden_size)
    for layer in range(config.num_layers):
        yield from layer_parameters(config, layer)
    yield Parameter("norm", (Part("model.norm", config.hidden_size),))
    yield Parameter("lm_head", (Part("lm_head", config.vocab_size),), config.hidden_size)


def num_weights(config: ModelConfig) -> int:
    """Numbers in all weights and biases, tied ones counted once."""
    return sum(
        math.prod(shape)
        for parameter in parameters(config)
        if not (parameter.key == "lm_head" and config.tie_word_embeddings)
        for shape in parameter.shapes().values()
    )


def assemble(config: ModelConfig, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight, Tensor | None]]:
    """Turn checkpoint tensors into (parameter key, stacked weight, stacked bias or None), in order of completion.

    Raises `CheckpointError` at a wrong shape or a dtype that is no float of 16 bits or more, and at the stream's end
    for names nothing asks for and names that never came.
    """
    wanted = {
        name: (parameter, shape) for parameter in parameters(config) for name, shape in parameter.shapes().items()
    }
    arrived: dict[str, Weight] = {}
    unexpected: list[str] = []
    for name, tensor in weights:
        if name not in wanted:
            if not _IGNORED.fullmatch(name):
                unexpected.append(name)
            continue
        parameter, shape = wanted.pop(name)
        arrived[name] = _checked(name, tensor, shape)
        del tensor
        if all(part in arrived for part in parameter.shapes()):
            yield _stack(parameter, arrived)

    missing: list[str] = []
    for parameter in dict.fromkeys(parameter for parameter, _ in wanted.values()):
        absent = [name for name in parameter.shapes() if name in wanted]
        if parameter.key == "lm_head" and config.tie_word_embeddings:
            continue
        if absent == [f"{part.name}.bias" for part in parameter.parts if part.bias_optional]:
            yield _stack(parameter, arrived)
        else:
            missing += absent
    complaints = [
        f"{what}: {_names(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if complaints:
        raise CheckpointError(f"the checkpoint does not fit a {config.family} model; tensors {'; '.join(complaints)}")


def _checked(name: str, tensor: Weight, shape: tuple[int, ...]) -> Weight:
    if isinstance(tensor, Deferred):
        return Deferred(lambda: _check(name, tensor.load(), shape))
    return _check(name, tensor, shape)


def _check(name: str, tensor: StoredWeight, shape: tuple[int, ...]) -> StoredWeight:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(tensor.shape)}, the model's config asks for {list(shape)}"
        )
    if isinstance(tensor, Tensor) and (not tensor.is_floating_point() or tensor.itemsize < 2):
        raise CheckpointError(
            f"tensor {name} has dtype {tensor.dtype}, of which the config's quantization_config says nothing"
        )
    return tensor


def _stack(parameter: Parameter, arrived: dict[str, Weight]) -> tuple[str, Weight, Tensor | None]:
    """Take the parameter's parts out of `arrived`; biases that never came are zeros."""
    weights = [arrived.pop(f"{part.name}.weight") for part in parameter.parts]
    dtype = weights[0].dtype if isinstance(weights[0], Tensor) else torch.float32
    biases = [
        arrived.pop(f"{part.name}.bias", torch.zeros(part.rows, dtype=dtype)) for part in parameter.parts if part.bias
    ]
    return parameter.key, _join(weights), torch.cat([dense(bias) for bias in biases]) if biases else None


def _join(parts: list[Weight]) -> Weight:
    """Parts of one kind as one; of different kinds, dequantised."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, Deferred) for part in parts):
        return Deferred(lambda: stored(_join([stored(part) for part in parts])))
    quantized = [part for part in parts if isinstance(part, GroupWeight | ScaledWeight)]
    if len(quantized) == len(parts) and (stacked := stack(quantized)) is not None:
        return stacked
    return torch.cat([dense(part) for part in parts])


def stored(weight: Weight) -> StoredWeight:
    """The weight, read if it is deferred."""
    return weight.load() if isinstance(weight, Deferred) else weight


def dense(weight: Weight) -> Tensor:
    """The weight in floating point."""
    weight = stored(weight)
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def deferred(
    config: ModelConfig, entries: Iterable[tuple[str, Callable[[], StoredWeight]]]
) -> Iterator[tuple[str, Weight]]:
    """Names with the means to read them -> names and weights, the layers' matrices deferred."""
    matrices = {
        name
        for layer in range(config.num_layers)
        for parameter in layer_parameters(config, layer)
        if parameter.columns is not None
        for name in parameter.shapes()
        if not name.endswith(".bias")
    }
    for name, load in entries:
        yield name, Deferred(load) if name in matrices else load()


def _names(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
