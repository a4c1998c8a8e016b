"""A model cut over several devices: which rows and columns of which weights each of them holds.

Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): the matrices that read the residual stream are cut along their
outputs, those that write to it along their inputs, so that the ranks of a stage add up what they have once after
attention and once after the MLP. Embedding and LM head are cut along the vocabulary, padded to a whole number of rows
for each rank. Key/value heads are held by several ranks where there are more ranks than heads. Pipeline parallelism
cuts the layers into stages.

A rank's share is a model like any other: `local_config` describes it and `shard` turns a checkpoint's tensors into its
own, so that all else need not know. A tensor that is a view of a file is read as far as the rank needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from paged_kernels.quantized import stack
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.models.config import ModelConfig
from paged_infer.models.weights import Parameter, StoredWeight, Weight, dense, parameters, stored
from paged_infer.parallel.place import Place

_Cut = Callable[[StoredWeight], StoredWeight]


def check_divisible(config: ModelConfig, tp_size: int, pp_size: int) -> None:
    """Raise `ConfigError` naming what cannot be cut into so many parts."""

    def refuse(what: str) -> None:
        raise ConfigError(f"tensor_parallel_size={tp_size}: {what}")

    if tp_size > 1:
        if config.num_heads % tp_size:
            refuse(f"{config.num_heads} attention heads cannot be divided by it")
        if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
            refuse(f"{config.num_kv_heads} key/value heads can neither be divided by it nor each be held so many times")
        experts = config.experts
        if (experts is None or len(experts.layers) < config.num_layers) and config.intermediate_size % tp_size:
            refuse(f"the MLP's intermediate size {config.intermediate_size} cannot be divided by it")
        if experts is not None and experts.intermediate_size % tp_size:
            refuse(f"the experts' intermediate size {experts.intermediate_size} cannot be divided by it")
        if experts is not None and experts.shared_size % tp_size:
            refuse(f"the shared expert's intermediate size {experts.shared_size} cannot be divided by it")
        if config.qk_norm == "projection":
            refuse(f"{config.family} models norm queries and keys over all heads, which cannot be cut")
        if experts is not None and not all("{}" in name for name in config.naming.expert_gate_up):
            refuse(f"the experts of {config.family} models are stored in one piece, which cannot be cut")
    if pp_size > config.num_layers:
        raise ConfigError(f"pipeline_parallel_size={pp_size}: the model has {config.num_layers} layers")


def stage_layers(config: ModelConfig, pp_size: int) -> list[range]:
    """The layers of each stage: contiguous, at least one, and so that the dearest stage is as cheap as possible.

    A layer costs the weights a token passes through in it; the last stage also has the LM head.
    """
    head = config.vocab_size * config.hidden_size
    costs = [_layer_cost(config, layer) for layer in range(config.num_layers)]
    costs[-1] += head
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    best: list[list[tuple[int, int]]] = [[(sums[end], 0) for end in range(count + 1)]]
    for stage in range(1, pp_size):
        best.append(
            [
                min(
                    ((max(best[-1][begin][0], sums[end] - sums[begin]), begin) for begin in range(stage, end)),
                    default=(sums[-1] + 1, 0),
                )
                for end in range(count + 1)
            ]
        )
    bounds = [count]
    for stage in range(pp_size - 1, 0, -1):
        bounds.append(best[stage][bounds[-1]][1])
    bounds.append(0)
    bounds.reverse()
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _layer_cost(config: ModelConfig, layer: int) -> int:
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    experts = config.experts
    if experts is not None and layer in experts.layers:
        return attention + 3 * config.hidden_size * (experts.top_k * experts.intermediate_size + experts.shared_size)
    return attention + (2 + config.gated) * config.hidden_size * config.intermediate_size


def local_config(config: ModelConfig, place: Place) -> ModelConfig:
    """The model that this rank runs."""
    size = place.tp_size
    layers = stage_layers(config, place.pp_size)[place.pp_rank]
    experts = config.experts
    if experts is not None:
        own = frozenset(layer - layers.start for layer in experts.layers if layer in layers)
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // size,
            shared_size=experts.shared_size // size,
            layers=own,
        )
    return replace(
        config,
        vocab_size=-(-config.vocab_size // size),
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=max(1, config.intermediate_size // size),
        num_layers=len(layers),
        windows=config.windows[layers.start : layers.stop],
        ropes=config.ropes[layers.start : layers.stop],
        experts=experts if experts is not None and experts.layers else None,
    )


def shard(config: ModelConfig, weights: Iterable[tuple[str, Weight]], place: Place) -> Iterator[tuple[str, Weight]]:
    """A checkpoint's tensors -> those of this rank, under the names that its `local_config` gives them.

    Low-bit weights stay so; those that cannot be cut along their inputs are dequantised. Tensors that nothing is known
    about pass through, for whoever puts the model together to complain of.
    """
    names, layers = config.naming, stage_layers(config, place.pp_size)[place.pp_rank]
    own = {parameter.key for parameter in parameters(config, place)}
    cuts: dict[str, tuple[str, _Cut] | None] = {}
    for parameter in parameters(config):
        layer, _, leaf = parameter.key.partition(".")
        is_layer = layer.isdigit()
        wanted = int(layer) in layers if is_layer else parameter.key in own
        for name, cut in _cuts(config, parameter, leaf if is_layer else parameter.key, place):
            local = name
            if is_layer:
                prefix = f"{names.layers}.{layer}."
                local = f"{names.layers}.{int(layer) - layers.start}.{name.removeprefix(prefix)}"
            cuts[name] = (local, cut) if wanted else None
    for stored_name, tensor in weights:
        name = names.usual(stored_name)
        if name not in cuts:
            yield stored_name, tensor
            continue
        found = cuts[name]
        if found is not None:
            local, cut = found
            yield local, tensor if cut is _same else cut(stored(tensor))


def _cuts(config: ModelConfig, parameter: Parameter, leaf: str, place: Place) -> Iterator[tuple[str, _Cut]]:
    """For each checkpoint tensor of a parameter, what the rank takes of it."""
    rank, size = place.tp_rank, place.tp_size
    spans: list[list[tuple[int, int]]] = []
    if size == 1:
        pass
    elif leaf in ("embed_tokens", "lm_head"):
        rows = -(-config.vocab_size // size)
        for part in parameter.parts:
            yield part.weight, _padded(rank * rows, rows)
        return
    elif leaf == "qkv_proj":
        spans = _by_part(parameter, _qkv_spans(config, rank, size))
    elif leaf == "sinks":
        heads = config.num_heads // size
        spans = [[(rank * heads, (rank + 1) * heads)]]
    elif leaf.endswith("gate_up_proj"):
        if ".experts." in f".{leaf}":
            spans = [[_share(part.rows, rank, size)] for part in parameter.parts]
        else:
            total = sum(part.rows for part in parameter.parts)
            halves = total // (1 + config.gated) if not leaf.startswith("shared") else total // 2
            each = [
                (start + begin, start + end)
                for start in range(0, total, halves)
                for begin, end in [_share(halves, rank, size)]
            ]
            spans = _by_part(parameter, each)
    elif leaf.endswith(("o_proj", "down_proj")):
        assert parameter.columns is not None
        span = _share(parameter.columns, rank, size)
        for part in parameter.parts:
            yield part.weight, _columns(span, parameter.transposed)
            if part.bias:
                yield f"{part.name}.bias", _same if rank == 0 else _zeros
        return
    for i, part in enumerate(parameter.parts):
        whole = not spans
        yield part.weight, _same if whole else _rows(spans[i], parameter.transposed and parameter.columns is not None)
        if part.bias:
            yield f"{part.name}.bias", _same if whole else _rows(spans[i], False)


def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    return count * rank // size, count * (rank + 1) // size


def _qkv_spans(config: ModelConfig, rank: int, size: int) -> list[tuple[int, int]]:
    """Rows of the queries, keys and values of a rank in the three stacked."""
    dim, kv_heads = config.head_dim, config.num_kv_heads
    q_rows, kv_rows = config.num_heads * dim, kv_heads * dim
    begin, end = _share(q_rows, rank, size)
    own = max(1, kv_heads // size)
    first = rank * kv_heads // size
    k = q_rows + first * dim, q_rows + (first + own) * dim
    return [(begin, end), k, (k[0] + kv_rows, k[1] + kv_rows)]


def _by_part(parameter: Parameter, spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans of all parts stacked -> for each part, those in it, counted from its first row."""
    found: list[list[tuple[int, int]]] = []
    start = 0
    for part in parameter.parts:
        stop = start + part.rows
        found.append([(begin - start, end - start) for begin, end in spans if start <= begin and end <= stop])
        start = stop
    return found


def _same(weight: StoredWeight) -> StoredWeight:
    return weight


def _zeros(bias: StoredWeight) -> Tensor:
    return torch.zeros_like(dense(bias))


def _rows(spans: list[tuple[int, int]], transposed: bool) -> _Cut:
    def cut(weight: StoredWeight) -> StoredWeight:
        if not (isinstance(weight, Tensor) or transposed):
            low_bit = stack([weight.rows(begin, end) for begin, end in spans])
            assert low_bit is not None, "parts of one weight are alike"
            return low_bit
        tensor, dim = dense(weight), 1 if transposed else 0
        parts = [tensor.narrow(dim, begin, end - begin) for begin, end in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

    return cut


def _columns(span: tuple[int, int], transposed: bool) -> _Cut:
    begin, end = span

    def cut(weight: StoredWeight) -> StoredWeight:
        if not (isinstance(weight, Tensor) or transposed) and (low_bit := weight.columns(begin, end)) is not None:
            return low_bit
        return dense(weight).narrow(0 if transposed else 1, begin, end - begin)

    return cut


def _padded(start: int, rows: int) -> _Cut:
    def cut(weight: StoredWeight) -> Tensor:
        own = dense(weight)[start : start + rows]
        missing = rows - len(own)
        return own if not missing else torch.cat([own, own.new_zeros(missing, own.shape[1])])

    return cut
