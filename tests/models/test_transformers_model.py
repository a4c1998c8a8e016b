"""Models that only transformers knows, over our cache: its own logits, and refusals with the reason."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from paged_kernels.interface import Backend

from paged_infer.config import ConfigError
from paged_infer.llm import LLM
from paged_infer.models.config import ModelConfig
from paged_infer.models.source import resolve_model
from paged_infer.models.transformers_model import TransformersConfig, TransformersModel
from tests.engine.test_engine import assert_greedy_equal, greedy, prompts_of
from tests.fixtures.checkpoints import hf_logits, random_checkpoint
from tests.models.stepper import Stepper

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),  # layer norms, partial rotation, attention and MLP side by side
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "cohere2": ("cohere2", {"sliding_window": 6, "logit_scale": 0.7}),  # pairwise rotation, scaled logits
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),  # learned positions with an offset
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("transformers")
    return {
        name: random_checkpoint(root / name, family, num_hidden_layers=3, **config)
        for name, (family, config) in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_pieces(folders: dict[str, Path], backend: Backend, name: str) -> None:
    config = resolve_model(str(folders[name])).config()
    assert isinstance(config, TransformersConfig)
    model = TransformersModel(config, backend, max_position=64)
    choose = random.Random(0)
    sequences = [choose.choices(range(320), k=count) for count in (45, 33)]
    pieces = [[(0, 7), (1, 20)], [(0, 1), (1, 1)], [(0, 13)], *[[(1, 1), (0, 2)]] * 12]
    found = Stepper(model, backend, sequences).run(pieces)
    for logits, ids in zip(found, sequences, strict=True):
        assert (logits - hf_logits(folders[name], ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["gpt_neox", "cohere2"])
def test_rows_through_the_engine(folders: dict[str, Path], caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Chunks, prefix hits and a pool that is too small."""
    common = prompts_of([40])[0]
    prompts = [common + rest for rest in prompts_of([1, 20, 33, 7], seed=1)]
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(folders[name]), dtype="float32", num_kv_blocks=16, max_num_batched_tokens=24) as llm,
    ):
        answers = llm.generate(prompts, greedy(12))
    assert_greedy_equal(folders[name], prompts, [answer.token_ids for answer in answers], 12)
    assert sum(answer.cached_tokens for answer in answers) >= 32
    notices = [record for record in caplog.records if "transformers" in record.getMessage()]
    assert len(notices) == 1
    assert name in notices[0].getMessage()


def test_a_native_family_on_request(tmp_path: Path) -> None:
    folder = str(random_checkpoint(tmp_path, "llama"))
    assert isinstance(resolve_model(folder).config(), ModelConfig)
    assert isinstance(resolve_model(folder, "transformers").config(), TransformersConfig)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("mamba", {"state_size": 8}, "linear_attention"),
        ("bloom", {}, "attention of its own"),
        ("falcon", {}, "attention of its own"),
        ("qwen3_next", {}, "linear_attention"),
        ("t5", {}, "it has an encoder"),
        ("starcoder2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_refused_with_the_reason(tmp_path: Path, family: str, config: dict[str, Any], reason: str) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        resolve_model(str(tmp_path)).config()


def test_only_native_models_on_request(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM is not supported"):
        resolve_model(str(folders["gpt_neox"]), "native").config()


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(ConfigError, match="trust-remote-code"):
        resolve_model(str(tmp_path)).config()


def test_no_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters need a native model"):
        LLM(str(folders["gpt_neox"]), dtype="float32", num_kv_blocks=8, lora=(f"a={tmp_path}",))
