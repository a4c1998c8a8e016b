"""The estimate for machines that are not here: arithmetic where a bound is known, and which way it bends elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paged_infer.config import ConfigError, EngineConfig
from paged_infer.job.roofline import GIB, GPUS, Machine, Workload, forecast, forecasts, layouts, parse_gpus
from paged_infer.models.config import config_from_hf

H100 = GPUS["h100"]
LOAD = Workload(rows=10_000, prompt_tokens=500, shared_tokens=0, output_tokens=200, max_output_tokens=400)


def model(**changes):
    """Llama 3 70B's shape."""
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return config_from_hf(json.loads(json.dumps({**shape, **changes})))


def run(tp=1, pp=1, dp=1, machine=H100, load=LOAD, **changes):
    return forecast(model(**changes), machine, load, tp, pp, dp, max_num_seqs=256)


def test_names_of_gpus():
    assert parse_gpus("8xH100") == (8, H100)
    assert parse_gpus("l40s") == (1, GPUS["l40s"])
    with pytest.raises(ConfigError, match="known kinds: A100"):
        parse_gpus("8xH9000")


def test_what_fits():
    assert run().why_not == "weights of 131 GiB leave no room"  # 70.6e9 weights of 2 bytes
    assert run(tp=2).weight_bytes == pytest.approx(70.6e9, rel=0.01)
    assert run(tp=4).why_not is None
    # 68.5e9 of them in layers, the rest stays in 16 bits
    assert run(tp=2, machine=replace(H100, layer_share=0.5)).weight_bytes == pytest.approx(36.4e9, rel=0.01)
    assert "80 layers" in (run(pp=81).why_not or "")
    assert "cannot be divided" in (run(tp=3).why_not or "")


def test_a_batch_of_one_takes_the_time_of_reading_the_weights():
    machine = replace(H100, step_seconds=0.0, link_seconds=0.0, link=1e30, memory_bytes=1e15)
    one = run(machine=machine, load=Workload(1, 1, 0, 100, 100))
    assert one.decode_seconds / 100 == pytest.approx(2 * 69.5e9 / machine.bandwidth, rel=0.02)
    assert run(tp=4, machine=machine, load=Workload(1, 1, 0, 100, 100)).decode_seconds == pytest.approx(
        one.decode_seconds / 4, rel=0.02
    )


def test_long_prompts_take_the_time_of_their_multiplications():
    machine = replace(H100, step_seconds=0.0, memory_bytes=1e15)
    load = Workload(2000, 1000, 0, 1, 1)
    assert run(machine=machine, load=load).prefill_seconds == pytest.approx(2e6 * 2 * 69.5e9 / machine.flops, rel=0.1)
    assert run(machine=machine, load=replace(load, shared_tokens=500)).prefill_seconds == pytest.approx(
        run(machine=machine, load=load).prefill_seconds / 2, rel=0.01
    )


def test_which_way_it_bends():
    assert run(tp=8, dp=2).seconds < 0.6 * run(tp=8).seconds
    assert run(tp=8).seconds < run(tp=4).seconds < 2.5 * run(tp=8).seconds
    slow_link = replace(H100, link=H100.link / 50)
    assert run(tp=8, machine=slow_link).seconds > 1.3 * run(tp=8).seconds
    assert run(pp=2, tp=4, machine=slow_link).seconds < run(tp=8, machine=slow_link).seconds
    assert run(tp=8, load=replace(LOAD, max_output_tokens=10**6)).seconds > run(tp=8).seconds


def test_all_layouts_use_all_devices_and_the_fastest_is_first():
    assert {tp * pp * dp for tp, pp, dp in layouts(8)} == {8}
    assert len({*layouts(8)}) == len([*layouts(8)]) == 10
    found = forecasts(model(), 8, H100, LOAD, EngineConfig())
    works = [each for each in found if each.why_not is None]
    assert [each.seconds for each in works] == sorted(each.seconds for each in works)
    assert found[: len(works)] == works
    assert 0 < works[0].kv_bytes + works[0].weight_bytes < 80 * GIB


def test_a_small_machine_is_one_like_any_other():
    laptop = Machine("cpu", 32 * GIB, 20e9, 100e9, 1e9, dtype_bytes=4)
    small = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    found = run(machine=laptop, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, **small)
    assert found.why_not is None
    assert found.num_seqs == 256
