"""Every family's logits against Hugging Face in float32, beyond windows and over alternating layers."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.dispatch import make_backend
from paged_kernels.interface import Backend
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from paged_infer.layers.mlp import route
from paged_infer.llm import LLM
from paged_infer.models.decoder import Decoder
from paged_infer.models.gpt_oss import dequantize_mxfp4
from paged_infer.models.source import resolve_model
from paged_infer.types import SamplingParams
from tests.engine.test_engine import assert_greedy_equal, greedy, prompts_of
from tests.fixtures.checkpoints import hf_logits, hf_model, random_checkpoint
from tests.models.stepper import Stepper

TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 7.0, 8.0],
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "smollm3 window": ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 5}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 48, "sliding_window": 6, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
    ),
    "phi3": ("phi3", {}),
    "phi3 partial, longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "sliding_window": 20,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 7}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "gpt2": ("gpt2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn factors": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2_moe": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 80, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe window": ("qwen3_moe", EXPERTS | {"use_sliding_window": True, "sliding_window": 4}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "intermediate_size": 96,
            "sliding_window": 6,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: random_checkpoint(root / name.replace(" ", "_"), family, **{"num_hidden_layers": 4, **config})
        for name, (family, config) in FAMILIES.items()
    }


@functools.cache
def logits_once(folder: Path, ids: tuple[int, ...]) -> Tensor:
    return hf_logits(folder, ids)


def load(folder: Path, backend: Backend, max_position: int | None = None) -> Decoder:
    source = resolve_model(str(folder))
    return Decoder(source.config(), backend, source.weights(), max_position=max_position)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_one_shot_chunks_and_decode(folders: dict[str, Path], backend: Backend, name: str) -> None:
    """Two sequences side by side, in one piece, and in pieces down to single tokens."""
    sequences = [tokens(45), tokens(33, seed=1)]
    changed = [*sequences[0][:35], (sequences[0][35] + 1) % VOCAB_SIZE, *sequences[0][36:]]
    *expected, of_changed = (logits_once(folders[name], tuple(ids)) for ids in (*sequences, changed))
    assert (expected[0] - of_changed)[-1].abs().max() > 1e-2
    decoder = load(folders[name], backend)
    pieces = [[(0, 7), (1, 20)], [(0, 1), (1, 1)], [(0, 13)], *[[(1, 1), (0, 2)]] * 12]
    for steps in ([[(0, 45), (1, 33)]], pieces):
        found = Stepper(decoder, backend, sequences).run(steps)
        for logits, wanted in zip(found, expected, strict=True):
            assert_close(logits, wanted)


def test_short_and_long_factors_follow_the_positions_there_can_be(folders: dict[str, Path], backend: Backend) -> None:
    """Hugging Face takes the long factors for sequences beyond the original context; here it must for shorter ones."""
    folder = folders["phi3 partial, longrope"]
    ids = tokens(30)
    short = hf_logits(folder, ids)
    [found] = Stepper(load(folder, backend, max_position=32), backend, [ids]).run([[(0, 10)], [(0, 20)]])
    assert_close(found, short)
    rotary = hf_model(folder).model.rotary_emb
    before = rotary.original_inv_freq
    try:
        rotary.original_inv_freq = (
            before / torch.tensor(LONGROPE["long_factor"]) * torch.tensor(LONGROPE["short_factor"])
        )
        long = hf_logits(folder, ids)
    finally:
        rotary.original_inv_freq = before
    assert (long - short).abs().max() > 1e-2
    [found] = Stepper(load(folder, backend, max_position=33), backend, [ids]).run([[(0, 10)], [(0, 20)]])
    assert_close(found, long)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "gpt2", "qwen2_moe", "gpt_oss"])
def test_rows_through_the_engine(folders: dict[str, Path], name: str) -> None:
    """Chunks, prefix hits, and a pool that is too small for all rows."""
    common = prompts_of([40])[0]
    prompts = [common + rest for rest in prompts_of([1, 20, 33, 7, 5, 11, 2], seed=1)]
    with LLM(str(folders[name]), dtype="float32", num_kv_blocks=16, max_num_batched_tokens=24) as llm:
        answers = llm.generate(prompts, greedy(12))
    assert_greedy_equal(folders[name], prompts, [answer.token_ids for answer in answers], 12)
    assert sum(answer.cached_tokens for answer in answers) >= 32


def test_logprobs_are_of_capped_logits(folders: dict[str, Path]) -> None:
    ids = tokens(20)
    with LLM(str(folders["gemma2"]), dtype="float32", num_kv_blocks=16) as llm:
        [answer] = llm.generate([ids], SamplingParams(max_tokens=1, logprobs=5))
    expected = hf_logits(folders["gemma2"], ids)[-1]
    assert expected.abs().max() < 5
    assert answer.logprobs is not None
    found = dict(zip(answer.logprobs.top_token_ids[0], answer.logprobs.top_logprobs[0], strict=True))
    best = expected.log_softmax(dim=-1).topk(5)
    assert found == pytest.approx(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-4)


def test_norm_weights_are_added_to_one_in_float32(tmp_path: Path) -> None:
    """1 + 2^-8 is 1 in bfloat16; the last norm multiplies by it all the same."""
    from safetensors.torch import load_file, save_file

    found = []
    folder = random_checkpoint(tmp_path, "gemma", head_dim=32)
    for weight in (0.0, 2.0**-8):
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
        tensors["model.norm.weight"].fill_(weight)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        backend = ReferenceBackend(torch.bfloat16)
        found += Stepper(load(folder, backend), backend, [tokens(20)]).run([[(0, 20)]])
    one, more = (logits.flatten().double() for logits in found)
    assert (one @ more / (one @ one)).item() == pytest.approx(1 + 2.0**-8, abs=1e-3)


def test_dynamic_frequencies_end_with_the_models_own_context(tmp_path: Path) -> None:
    """Beyond it they would change under keys that are cached: no row gets there, whatever length is asked for."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = random_checkpoint(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    with LLM(str(folder), dtype="float32", max_model_len=128, num_kv_blocks=16) as llm:
        inside, beyond = llm.generate([tokens(40), tokens(70)], greedy(60))
    assert len(inside.token_ids) == 24
    assert beyond.error is not None
    assert "64" in beyond.error


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_on_triton(folders: dict[str, Path], name: str) -> None:
    """Interpreted: what the kernels make of softcaps, sinks, windows and experts."""
    backend = make_backend("cpu", torch.float32, "triton")
    ids = tokens(12)
    [found] = Stepper(load(folders[name], backend), backend, [ids]).run([[(0, 11)], [(0, 1)]])
    assert_close(found, hf_logits(folders[name], ids))


def test_experts_weights() -> None:
    """Of router logits 2, 1, 0, -1 the two best."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for renormalise, expected in ((False, [0.6439, 0.2369]), (True, [0.7311, 0.2689])):
        weights, experts = route(logits, 2, renormalise)
        assert weights[0].tolist() == pytest.approx(expected, abs=1e-4)
        assert experts.tolist() == [[0, 1]]


def test_mxfp4() -> None:
    """Every number there is at three scales, packed by hand: the earlier of two in the low bits."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = list(range(16)) * 2
    packed = [codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)]
    blocks = torch.tensor([[packed, packed, packed]], dtype=torch.uint8)
    scales = torch.tensor([[127, 124, 130]], dtype=torch.uint8)
    expected = torch.tensor([[number * 2.0**exponent for exponent in (0, -3, 3) for number in numbers * 2]])
    assert torch.equal(dequantize_mxfp4(blocks, scales).float(), expected)


def test_gpt_oss_in_mxfp4(folders: dict[str, Path], tmp_path: Path, backend: Backend) -> None:
    """The experts' weights rounded to MXFP4: stored so, and stored as the floats that stand for."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folders["gpt_oss"] / "model.safetensors")
    floats, packed = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = weight.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        floats[name] = dequantize_mxfp4(blocks, scales, torch.float32).transpose(1, 2).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    found = []
    for kind, stored in (("floats", floats), ("packed", packed)):
        folder = tmp_path / kind
        folder.mkdir()
        config = json.loads((folders["gpt_oss"] / "config.json").read_text())
        if kind == "packed":
            config["quantization_config"] = {"quant_method": "mxfp4"}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(stored, folder / "model.safetensors")
        found += Stepper(load(folder, backend), backend, [tokens(20)]).run([[(0, 20)]])
    assert torch.equal(found[0], found[1])
    assert_close(found[0], hf_logits(tmp_path / "floats", tokens(20)))


def renamed(source: Path, folder: Path, config: dict[str, Any], rename: Callable[[str], str]) -> Path:
    """A copy of a checkpoint with other tensor names, some tensors that are no weights, and another config."""
    from safetensors.torch import load_file, save_file

    tensors = {rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if "gpt2" in source.name else {}
    tensors |= {"vision_tower.embeddings.weight": torch.ones(2)} if "gemma3" in source.name else {}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_names_of_the_first_gpt2_files(folders: dict[str, Path], tmp_path: Path, backend: Backend) -> None:
    """Without a prefix, and with the causal masks that were saved beside the weights."""
    config = json.loads((folders["gpt2"] / "config.json").read_text())
    folder = renamed(folders["gpt2"], tmp_path, config, lambda name: name.removeprefix("transformer."))
    [found] = Stepper(load(folder, backend), backend, [tokens(20)]).run([[(0, 20)]])
    assert_close(found, hf_logits(folders["gpt2"], tokens(20)))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_vision_model(folders: dict[str, Path], tmp_path: Path, backend: Backend, prefix: str) -> None:
    text = json.loads((folders["gemma3"] / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    folder = renamed(folders["gemma3"], tmp_path, config, lambda name: name.replace("model.", prefix, 1))
    assert resolve_model(str(folder)).config().eos_token_ids == {1, 106}
    [found] = Stepper(load(folder, backend), backend, [tokens(20)]).run([[(0, 20)]])
    assert_close(found, hf_logits(folders["gemma3"], tokens(20)))
