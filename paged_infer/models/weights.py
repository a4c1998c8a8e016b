"""Which tensors a decoder is made of, and how a stream of checkpoint tensors becomes packed parameters.

Names are those of Hugging Face checkpoints. A checkpoint comes as (name, tensor) pairs in any order; `assemble` stacks
what is fused at run time and hands each parameter on as soon as its last part is in, so that no more than an
unfinished layer is held. What is left over or missing at the end is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from paged_kernels.quantized import GroupWeight, QuantizedWeight, ScaledWeight, stack
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models import gpt_oss
from paged_infer.models.config import ExpertsConfig, ModelConfig
from paged_infer.parallel.place import WHOLE, Place

_NAMES_SHOWN = 20

StoredWeight = Tensor | QuantizedWeight
"""What a checkpoint may hold under the name of a weight."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A weight that is read each time it is asked for, and not before; of this shape, once that is known."""

    load: Callable[[], StoredWeight]
    shape: tuple[int, ...] = ()


Weight = StoredWeight | Deferred


class CheckpointError(ConfigError):
    """The model's files are damaged, incomplete, or do not fit their config; the message names file or tensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint weight `name`.weight of so many rows, or just `name` where `bare`, and perhaps `name`.bias."""

    name: str
    rows: int
    bias: bool = False
    bare: bool = False

    @property
    def weight(self) -> str:
        return self.name if self.bare else f"{self.name}.weight"

    @property
    def bias_optional(self) -> bool:
        """Some checkpoints leave out the key bias, which is then 0: softmax hardly sees it."""
        return self.name.endswith(".k_proj")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parts stacked along their rows: a matrix [sum of rows, columns], or a vector where `columns` is None.

    Attributes:
        transposed: the checkpoint has the matrices as [columns, rows].
        adaptable: a LoRA adapter may add to its parts.
    """

    key: str
    parts: tuple[Part, ...]
    columns: int | None = None
    transposed: bool = False
    adaptable: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name → shape of everything that may be read for it."""
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self.parts:
            if self.columns is None:
                shapes[part.weight] = (part.rows,)
            else:
                shapes[part.weight] = (self.columns, part.rows) if self.transposed else (part.rows, self.columns)
            if part.bias:
                shapes[f"{part.name}.bias"] = (part.rows,)
        return shapes


def layer_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of a decoder layer; their keys are `LAYER.NAME`."""
    names, hidden = config.naming, config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    source = f"{names.layers}.{layer}"

    def matrix(key: str, spelled: Sequence[str], rows: Sequence[int], columns: int, bias: bool = False) -> Parameter:
        if len(spelled) < len(rows):
            rows = [sum(rows)]
        parts = (Part(f"{source}.{name}", count, bias) for name, count in zip(spelled, rows, strict=True))
        return Parameter(f"{layer}.{key}", tuple(parts), columns, names.transposed, adaptable=True)

    def norm(key: str, name: str, size: int = hidden) -> Parameter:
        return Parameter(f"{layer}.{key}", (Part(f"{source}.{name}", size, config.layer_norm),))

    if config.norms != "post":
        yield norm("input_layernorm", names.input_layernorm)
        yield norm("post_attention_layernorm", names.post_attention_layernorm)
    if config.norms != "pre":
        yield norm("attention_norm", names.attention_norm)
        yield norm("mlp_norm", names.mlp_norm)
    yield matrix("qkv_proj", names.qkv_proj, (q_rows, kv_rows, kv_rows), hidden, config.qkv_bias)
    if config.qk_norm is not None:
        whole = config.qk_norm == "projection"
        yield norm("q_norm", "self_attn.q_norm", q_rows if whole else config.head_dim)
        yield norm("k_norm", "self_attn.k_norm", kv_rows if whole else config.head_dim)
    if config.sinks:
        yield Parameter(f"{layer}.sinks", (Part(f"{source}.self_attn.sinks", config.num_heads, bare=True),))
    yield matrix("o_proj", (names.o_proj,), (hidden,), q_rows, config.o_bias)
    experts = config.experts
    if experts is not None and layer in experts.layers:
        yield from _expert_parameters(config, experts, f"{layer}.", source)
        return
    inner = config.intermediate_size
    yield matrix("gate_up_proj", names.gate_up_proj, (inner,) * (1 + config.gated), hidden, config.mlp_bias)
    yield matrix("down_proj", (names.down_proj,), (hidden,), inner, config.mlp_bias)


def _expert_parameters(config: ModelConfig, experts: ExpertsConfig, key: str, source: str) -> Iterator[Parameter]:
    """Of one layer; the experts' matrices are stacked along their rows, one expert after the other."""
    names, hidden, inner, bias = config.naming, config.hidden_size, experts.intermediate_size, config.mlp_bias
    yield Parameter(f"{key}router", (Part(f"{source}.{names.router}", experts.num_experts, bias),), hidden)

    def stacked(spelled: Sequence[str], rows: int) -> tuple[Part, ...]:
        """The parts of a matrix with so many rows for each expert."""
        if "{}" not in spelled[0]:
            return (Part(f"{source}.{spelled[0]}", experts.num_experts * rows, bias),)
        each = rows // len(spelled)
        return tuple(
            Part(f"{source}.{name.format(expert)}", each, bias)
            for expert in range(experts.num_experts)
            for name in spelled
        )

    yield Parameter(f"{key}experts.gate_up_proj", stacked(names.expert_gate_up, 2 * inner), hidden)
    yield Parameter(f"{key}experts.down_proj", stacked((names.expert_down,), hidden), inner)
    if experts.shared_size:
        shared = f"{source}.mlp.shared_expert"
        gate_up = tuple(Part(f"{shared}.{name}", experts.shared_size) for name in ("gate_proj", "up_proj"))
        yield Parameter(f"{key}shared_expert.gate_up_proj", gate_up, hidden)
        yield Parameter(f"{key}shared_expert.down_proj", (Part(f"{shared}.down_proj", hidden),), experts.shared_size)
        yield Parameter(f"{key}shared_expert_gate", (Part(f"{source}.mlp.shared_expert_gate", 1),), hidden)


def parameters(config: ModelConfig, place: Place = WHOLE) -> Iterator[Parameter]:
    """All parameters of a decoder. A tied LM head is listed too: checkpoints may bring it.

    Of a stage of a pipeline, those beside its layers are at the ends; a tied head needs the embedding at the last.
    """
    names, hidden = config.naming, config.hidden_size
    if place.is_first or (place.is_last and config.tie_word_embeddings):
        yield Parameter("embed_tokens", (Part(names.embed_tokens, config.vocab_size),), hidden)
    if config.learned_positions and place.is_first:
        yield Parameter("embed_positions", (Part(names.embed_positions, config.max_position_embeddings),), hidden)
    for layer in range(config.num_layers):
        yield from layer_parameters(config, layer)
    if not place.is_last:
        return
    yield Parameter("norm", (Part(names.norm, hidden, config.layer_norm),))
    yield Parameter("lm_head", (Part("lm_head", config.vocab_size),), hidden)


def num_weights(config: ModelConfig) -> int:
    """Numbers in all weights and biases, tied ones counted once."""
    return sum(
        math.prod(shape)
        for parameter in parameters(config)
        if not (parameter.key == "lm_head" and config.tie_word_embeddings)
        for shape in parameter.shapes().values()
    )


def assemble(
    config: ModelConfig, weights: Iterable[tuple[str, Weight]], place: Place = WHOLE
) -> Iterator[tuple[str, Weight, Tensor | None]]:
    """Turn checkpoint tensors into (parameter key, stacked weight, stacked bias or None), in order of completion.

    Raises `CheckpointError` at a wrong shape or a dtype that is no float of 16 bits or more, and at the stream's end
    for names nothing asks for and names that never came.
    """
    wanted = {
        name: (parameter, shape)
        for parameter in parameters(config, place)
        for name, shape in parameter.shapes().items()
    }
    arrived: dict[str, Weight] = {}
    unexpected: list[str] = []
    naming = config.naming
    if config.experts is not None and config.experts.clamp is not None:
        weights = gpt_oss.unpacked(cast("Iterable[tuple[str, Tensor]]", weights))
    for stored_name, tensor in weights:
        name = naming.usual(stored_name)
        if name not in wanted:
            if not re.fullmatch(naming.ignored, name):
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
        return Deferred(lambda: _check(name, tensor.load(), shape), shape)
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
    weights = [arrived.pop(part.weight) for part in parameter.parts]
    dtype = weights[0].dtype if isinstance(weights[0], Tensor) else torch.float32
    if parameter.transposed:
        weights = [_transposed(weight) for weight in weights]
    biases = [
        arrived.pop(f"{part.name}.bias", torch.zeros(part.rows, dtype=dtype)) for part in parameter.parts if part.bias
    ]
    return parameter.key, _join(weights), torch.cat([dense(bias) for bias in biases]) if biases else None


def _transposed(weight: Weight) -> Weight:
    if isinstance(weight, Deferred):
        return Deferred(lambda: dense(weight).t(), weight.shape[::-1])
    return dense(weight).t()


def _join(parts: list[Weight]) -> Weight:
    """Parts of one kind as one; of different kinds, dequantised."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, Deferred) for part in parts):
        shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
        return Deferred(lambda: stored(_join([stored(part) for part in parts])), shape)
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
    """Names with the means to read them -> names and weights, the layers' matrices deferred, experts' apart."""
    matrices = {
        name
        for layer in range(config.num_layers)
        for parameter in layer_parameters(config, layer)
        if parameter.columns is not None and ".experts." not in parameter.key
        for name in (part.weight for part in parameter.parts)
    }
    for name, load in entries:
        yield name, Deferred(load) if config.naming.usual(name) in matrices else load()


def _names(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
