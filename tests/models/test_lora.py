"""LoRA adapters in the engine against Hugging Face on weights into which the adapter was multiplied."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paged_infer.config import ConfigError
from paged_infer.llm import LLM
from paged_infer.types import SamplingParams
from tests.engine.test_logprobs import prompts_of
from tests.fixtures.checkpoints import hf_greedy

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(folder: Path, base: Path, modules: Sequence[str], rank: int, seed: int, **settings: Any) -> Path:
    """A random adapter at FOLDER/adapter; FOLDER/merged is the base model with it multiplied in."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **settings}
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.split(".")[-2] not in modules or not name.endswith(".weight"):
                continue
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
            weight += scale * (b @ a)
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    (folder / "adapter").mkdir(parents=True)
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(folder / "merged")
    return folder


@pytest.fixture(scope="module")
def adapters(random_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """Name → the model that Hugging Face runs; None = the base."""
    base, folder = random_model("qwen2"), tmp_path_factory.mktemp("lora")
    return {
        None: base,
        "all": make_adapter(folder / "all", base, EVERYTHING, 4, 1) / "merged",
        "some": make_adapter(folder / "some", base, ("v_proj", "up_proj"), 2, 2, use_rslora=True) / "merged",
        "other": make_adapter(folder / "other", base, ("q_proj", "down_proj", "o_proj"), 3, 3) / "merged",
    }


def lora_of(adapters: dict[str | None, Path]) -> list[str]:
    return [f"{name}={folder.parent / 'adapter'}" for name, folder in adapters.items() if name is not None]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "reference", "max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"num_kv_blocks": 9},
        {"prefix_caching": False},
        {"speculative": "ngram"},
    ],
    ids=str,
)
def test_every_row_has_its_own_adapter(adapters: dict[str | None, Path], settings: dict[str, Any]) -> None:
    """The same prompts under every adapter in one batch, twice: a cached block never crosses over."""
    prompts = prompts_of([40, 17, 33])
    rows = [(prompt, name) for _ in range(2) for prompt in prompts for name in adapters]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, adapter=name) for _, name in rows]
    options = {"dtype": "float32", "lora": lora_of(adapters), **settings}
    with LLM(str(adapters[None]), **options) as llm:
        answers = llm.generate([prompt for prompt, _ in rows], params)
        cached = llm.engine.scheduler.stats.num_cached_tokens
    assert (cached > 0) == settings.get("prefix_caching", True)
    compared = 0
    for (prompt, name), answer in zip(rows, answers, strict=True):
        (expected,), (gaps,) = hf_greedy(adapters[name], [prompt], 12)
        certain = next((i for i, gap in enumerate(gaps) if gap < 1e-3), 12)
        assert answer.token_ids[:certain] == expected[:certain]
        assert answer.adapter == name
        compared += certain
    assert compared > 0.8 * 12 * len(rows)
    assert len({tuple(answer.token_ids) for answer in answers[:4]}) == 4


def test_samples_beams_and_scores_use_the_adapter(adapters: dict[str | None, Path]) -> None:
    (prompt,) = prompts_of([20])
    given: list[dict[str, Any]] = [
        {"beam_width": 3, "n": 3},
        {"n": 3, "temperature": 1.0, "seed": 1},
        {"prompt_logprobs": 1, "logprobs": 1},
    ]
    with LLM(str(adapters[None]), dtype="float32", lora=lora_of(adapters)) as llm:
        with_adapter = llm.generate(
            [prompt] * 3, [SamplingParams.resolve({"max_tokens": 9, "adapter": "all", **options}) for options in given]
        )
    with LLM(str(adapters["all"]), dtype="float32", tokenizer=str(adapters[None])) as llm:
        merged = llm.generate([prompt] * 3, [SamplingParams.resolve({"max_tokens": 9, **options}) for options in given])
    assert [answer.token_ids for answer in with_adapter] == [answer.token_ids for answer in merged]
    for a, b in (
        (with_adapter[-1].prompt_logprobs, merged[-1].prompt_logprobs),
        (with_adapter[-1].logprobs, merged[-1].logprobs),
    ):
        assert a is not None
        assert b is not None
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4, nan_ok=True)


def test_an_unknown_adapter_fails_alone(adapters: dict[str | None, Path]) -> None:
    with LLM(str(adapters[None]), lora=lora_of(adapters)[:1]) as llm:
        fine, unknown = llm.generate([[5], [6]], [SamplingParams(max_tokens=2, adapter=name) for name in ("all", "x")])
    assert (fine.error, unknown.error_type) == (None, "unknown_adapter")
    assert "all" in str(unknown.error)


def test_adapters_that_do_not_fit_are_refused(
    adapters: dict[str | None, Path], random_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = adapters[None]
    assert base is not None

    def refused(spec: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            LLM(str(base), lora=[spec])

    refused("x", "NAME=PATH")
    refused(f"x={tmp_path}", "adapter_config.json")
    wider = random_model("qwen2", hidden_size=128)
    refused(f"x={make_adapter(tmp_path / 'wide', wider, ('q_proj',), 2, 1) / 'adapter'}", r"q_proj.*expected")
    deeper = random_model("qwen2", num_hidden_layers=3)
    refused(f"x={make_adapter(tmp_path / 'deep', deeper, ('q_proj',), 2, 1) / 'adapter'}", r"layers\.2\.")
    refused(f"x={make_adapter(tmp_path / 'dora', base, ('q_proj',), 2, 1, use_dora=True) / 'adapter'}", "use_dora")
