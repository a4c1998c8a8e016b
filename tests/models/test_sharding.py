"""A model's shares: together they are the model, each is a model, and what cannot be cut is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from paged_infer.config import ConfigError
from paged_infer.models.sharding import check_divisible, local_config, shard, stage_layers
from paged_infer.models.source import resolve_model
from paged_infer.models.weights import assemble, parameters
from paged_infer.parallel.place import places

SIZES = [(2, 1), (4, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def checkpoint(random_model):
    def build(family):
        source = resolve_model(str(random_model(family, num_hidden_layers=3, vocab_size=131)))
        return source.config(), source

    return build


def assembled(config, weights, place):
    return {key: (weight.clone(), bias) for key, weight, bias in assemble(config, weights, place)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_shares_together_are_the_checkpoint(checkpoint, family, tp, pp):
    config, source = checkpoint(family)
    whole = assembled(config, source.weights(), places(1, 1)[0])
    ranks = places(tp, pp)
    shares = [assembled(local_config(config, rank), shard(config, source.weights(), rank), rank) for rank in ranks]
    stages = stage_layers(config, pp)
    assert [layer for stage in stages for layer in stage] == [*range(config.num_layers)]
    dim, own_q = config.head_dim, config.num_heads // tp
    for key, (weight, bias) in whole.items():
        layer, _, leaf = key.rpartition(".")
        stage = next(i for i, layers in enumerate(stages) if int(layer) in layers) if layer else None
        if stage is None:
            holders = [rank for rank in ranks if key in shares[rank.rank]]
            wanted = {"embed_tokens": 0, "norm": pp - 1, "lm_head": pp - 1}[key]
            assert {rank.pp_rank for rank in holders} >= {wanted}
            holders = [rank for rank in holders if rank.pp_rank == wanted]
            local = key
        else:
            holders = [rank for rank in ranks if rank.pp_rank == stage]
            local = f"{int(layer) - stages[stage].start}.{leaf}"
        parts = [shares[rank.rank][local][0] for rank in holders]
        assert len(parts) == tp
        if leaf in ("o_proj", "down_proj"):
            joined = torch.cat(parts, dim=1)
        elif leaf == "gate_up_proj":
            joined = torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
        elif leaf == "qkv_proj":
            q = torch.cat([part[: own_q * dim] for part in parts])
            copies = max(1, tp // config.num_kv_heads)
            k, v = (torch.cat([part[own_q * dim :].chunk(2)[which] for part in parts[::copies]]) for which in (0, 1))
            joined = torch.cat([q, k, v])
        elif key in ("embed_tokens", "lm_head"):
            joined = torch.cat(parts)
            assert not joined[len(weight) :].any()
            joined = joined[: len(weight)]
        else:
            joined = parts[0]
            assert all(torch.equal(part, joined) for part in parts)
        assert torch.equal(joined, weight), key
        if bias is not None and leaf in ("o_proj", "down_proj"):
            assert torch.equal(sum(shares[rank.rank][local][1] for rank in holders), bias)


def test_a_rank_reads_only_its_rows_of_a_file(checkpoint, random_model):
    config, source = checkpoint("llama")
    place = places(4, 1)[1]
    with safe_open(next(source.files()[0].parent.glob("*.safetensors")), framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in shard(config, stored.items(), place):
        if "q_proj" in name or "gate_proj" in name:
            assert tensor.untyped_storage().data_ptr() == stored[name].untyped_storage().data_ptr()
            assert len(tensor) == len(stored[name]) // 4


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 3, "8 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "6 key/value heads"),
        ({"intermediate_size": 98}, 4, "intermediate size 98"),
        ({"qk_norm": "projection"}, 2, "norm queries and keys over all heads"),
    ],
)
def test_what_does_not_divide_is_named(checkpoint, changes, size, words):
    config = replace(checkpoint("llama")[0], **{"num_heads": 8, "num_kv_heads": 2, **changes})
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}.*{words}"):
        check_divisible(config, size, 1)


def test_more_stages_than_layers_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="3 layers"):
        check_divisible(checkpoint("llama")[0], 1, 4)


def test_stages_cost_alike_and_the_head_counts(checkpoint):
    config = replace(checkpoint("llama")[0], num_layers=12, vocab_size=64)
    assert [len(stage) for stage in stage_layers(config, 3)] == [4, 4, 4]
    per_layer = sum(
        part.rows * parameter.columns
        for parameter in parameters(config)
        if parameter.key.startswith("0.") and parameter.columns
        for part in parameter.parts
    )
    heavy = replace(config, vocab_size=4 * per_layer // config.hidden_size)  # a head like four layers
    assert [len(stage) for stage in stage_layers(heavy, 2)] == [8, 4]
    assert [len(stage) for stage in stage_layers(config, 12)] == [1] * 12
