"""Puts an engine together from settings: model files → weights → decoder, cache, runner, scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from paged_kernels.cpu.build import KernelsUnavailable
from paged_kernels.dispatch import has_fast_bf16, make_backend
from paged_kernels.interface import Backend

from paged_infer.config import ConfigError, EngineConfig, cache_dir
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.draft_model import DraftModelProposer
from paged_infer.engine.engine import Engine
from paged_infer.engine.gpu import gpu_execution, measured_plan
from paged_infer.engine.gpu_memory import free_gpu_bytes
from paged_infer.engine.memory import MemoryPlan, plan
from paged_infer.engine.pipelined_runner import PipelinedRunner
from paged_infer.engine.runner import ModelRunner, Runner
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.speculative import NGramProposer, Proposer, Speculator, SuffixProposer
from paged_infer.engine.structured import Grammars
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.models.config import ModelConfig
from paged_infer.models.decoder import Decoder
from paged_infer.models.digest import sampled_digest
from paged_infer.models.generation import eos_token_ids, sampling_defaults
from paged_infer.models.lora import Adapter, load_adapter
from paged_infer.models.source import AnyConfig, ModelSource, resolve_model
from paged_infer.models.transformers_model import AnyModel, TransformersConfig, TransformersModel
from paged_infer.text.tokenizer import Tokenizer

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}

ADMISSION_WINDOW = 4096
"""Waiting rows among which the `auto` order chooses."""


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """The model that guesses; its cache has as many blocks of as many tokens as the large one's."""

    source: ModelSource
    model: AnyConfig
    backend: Backend


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything decided before a weight is read."""

    source: ModelSource
    model: AnyConfig
    backend: Backend
    memory: MemoryPlan
    draft: DraftLayout | None = None


def resolve_dtype(config: EngineConfig) -> torch.dtype:
    """The run dtype. `auto` is bfloat16 on a GPU and on CPUs with bf16 dot products, else float32."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    return torch.bfloat16 if resolve_device(config) == "cuda" or has_fast_bf16() else torch.float32


def resolve_device(config: EngineConfig) -> str:
    """`auto` is the GPU where torch has one. Raises `ConfigError` where one is asked for and there is none."""
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise ConfigError("device='cuda': this torch sees no GPU; use --device cpu or install a CUDA build of torch")
    return config.device if config.device != "auto" else "cuda" if found else "cpu"


def layout(config: EngineConfig) -> Layout:
    """Resolve model, kernels and memory without loading weights. Raises `ConfigError`."""
    device = resolve_device(config)
    source = resolve_model(config.model, config.model_impl, trust_remote_code=config.trust_remote_code)
    model = source.config()
    dtype = resolve_dtype(config)
    backend = _backend(config, device, dtype)
    weight_bytes, block_bytes = source.weight_bytes(dtype), _block_bytes(config, model, backend)
    draft = None
    if config.draft_model is not None:
        draft_source = resolve_model(config.draft_model)
        draft = DraftLayout(draft_source, draft_source.config(), _backend(config, device, dtype))
        weight_bytes += draft_source.weight_bytes(dtype)
        block_bytes += _block_bytes(config, draft.model, draft.backend)
    memory = plan(
        config,
        context_len=model.max_position_embeddings,
        weight_bytes=weight_bytes,
        block_bytes=block_bytes,
        free_bytes=free_gpu_bytes(backend.device, config.gpu_memory_utilization) if device == "cuda" else None,
    )
    return Layout(source, model, backend, memory, draft)


def _backend(config: EngineConfig, device: str, dtype: torch.dtype) -> Backend:
    try:
        return make_backend(
            device,
            dtype,
            config.attention_backend,
            block_size=config.block_size,
            threads=config.threads,
            cache_dir=cache_dir(),
            kv_dtype=_KV_DTYPES[config.kv_cache_dtype],
        )
    except (ValueError, KernelsUnavailable) as error:
        raise ConfigError(f"attention_backend={config.attention_backend!r}: {error}") from error


def _block_bytes(config: EngineConfig, model: AnyConfig, backend: Backend) -> int:
    return backend.kv_bytes_per_block(model.num_layers, config.block_size, model.num_kv_heads, model.head_dim)


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer:
    """The model's tokenizer, or the one that was asked for. Raises `ConfigError`."""
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template={config.chat_template!r} cannot be read: {error}") from None
    folder = source.tokenizer_folder() if config.tokenizer is None else config.tokenizer
    return Tokenizer.load(folder, chat_template=template)


def build_engine(config: EngineConfig) -> Engine:
    """Load the model and make an engine ready to run. Raises `ConfigError`."""
    plan = layout(config)
    model, backend, memory = plan.model, plan.backend, plan.memory
    tokenizer = load_tokenizer(config, plan.source)
    decoder = _decoder(plan, memory)
    drafting = None if plan.draft is None else _decoder(plan.draft, memory)
    on_gpu = backend.device.type == "cuda"
    if on_gpu:
        memory = measured_plan(config, decoder, backend, memory)
    generation_config = plan.source.generation_config()
    eos = model.eos_token_ids | eos_token_ids(generation_config) | tokenizer.eos_token_ids
    grammars = Grammars(tokenizer, model.vocab_size, eos)
    adapters = _adapters(config, model, backend)
    runner: Runner = _runner(config, memory, plan, decoder, grammars, tokenizer, adapters)
    if on_gpu and config.speculative == "off":  # a guess starts from tokens that must be known
        runner = PipelinedRunner(runner)
    scheduler = Scheduler(
        BlockManager(memory.num_blocks, config.block_size, config.prefix_caching, window=model.widest_window),
        WaitingQueue(config.order, ADMISSION_WINDOW, config.block_size if config.prefix_caching else None),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked_prefill=config.chunked_prefill,
        max_in_flight=runner.depth,
        speculator=_speculator(config, memory, plan.draft, drafting, tokenizer, eos),
    )
    return Engine(
        tokenizer=tokenizer,
        scheduler=scheduler,
        runner=runner,
        memory=memory,
        eos_token_ids=eos,
        grammars=grammars,
        vocab_size=model.vocab_size,
        adapters={adapter.name: adapter.digest for adapter in adapters},
        sampling_defaults=sampling_defaults(generation_config) if config.generation_config == "auto" else {},
        description={
            "model": {
                "name": config.model,
                "family": model.family,
                "revision": plan.source.revision(),
                "digest": sampled_digest(plan.source.files()),
                "adapters": {adapter.name: adapter.digest for adapter in adapters},
            },
            "engine": {
                "device": backend.device.type,
                "dtype": str(backend.dtype).removeprefix("torch."),
                "attention_backend": type(backend).__module__.split(".")[1],
                "max_model_len": memory.max_model_len,
                "num_kv_blocks": memory.num_blocks,
            },
        },
    )


def _adapters(config: EngineConfig, model: AnyConfig, backend: Backend) -> list[Adapter]:
    if config.lora and isinstance(model, TransformersConfig):
        raise ConfigError(f"lora={config.lora[0]!r}: adapters need a native model, this {model.family} is not one")
    return [
        load_adapter(name, folder, model, backend.activation_dtype, str(backend.device))
        for name, folder in config.adapter_folders.items()
        if isinstance(model, ModelConfig)
    ]


def _decoder(part: Layout | DraftLayout, memory: MemoryPlan) -> AnyModel:
    """Load one of the models."""
    max_position = min(memory.max_model_len, part.model.max_position_embeddings)
    if isinstance(part.model, TransformersConfig):
        return TransformersModel(part.model, part.backend, max_position=max_position)
    return Decoder(part.model, part.backend, part.source.weights(), max_position=max_position)


def _runner(
    config: EngineConfig,
    memory: MemoryPlan,
    part: Layout | DraftLayout,
    decoder: AnyModel,
    grammars: Grammars,
    tokenizer: Tokenizer,
    adapters: Sequence[Adapter] = (),
) -> ModelRunner:
    """A model with its cache and whatever its device needs."""
    model, backend = part.model, part.backend
    max_model_len = min(memory.max_model_len, model.max_position_embeddings)
    vocab_size = min(model.vocab_size, tokenizer.vocab_size)
    kv = backend.make_kv_cache(
        model.num_layers, memory.num_blocks, config.block_size, model.num_kv_heads, model.head_dim
    )
    execution = None
    if backend.device.type == "cuda":
        execution = gpu_execution(
            decoder,
            backend,
            kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            graphs=isinstance(decoder, Decoder),
        )
    return ModelRunner(
        decoder,
        backend,
        kv,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        grammars=grammars,
        vocab_size=vocab_size,
        undecodable_ids=[i for i in tokenizer.undecodable_ids if i < vocab_size],
        adapters=adapters,
        device=str(backend.device),
        execution=execution,
    )


def _speculator(
    config: EngineConfig,
    memory: MemoryPlan,
    draft: DraftLayout | None,
    decoder: AnyModel | None,
    tokenizer: Tokenizer,
    eos: frozenset[int],
) -> Speculator | None:
    if config.speculative == "off":
        return None
    proposer: Proposer = NGramProposer() if config.speculative == "ngram" else SuffixProposer()
    if draft is not None and decoder is not None:
        differing = tokenizer.first_difference(Tokenizer.load(draft.source.tokenizer_folder()))
        if differing is not None:
            raise ConfigError(
                f"speculative={config.speculative!r}: its tokenizer is another one, id {differing} is the first to "
                "differ"
            )
        grammars = Grammars(tokenizer, draft.model.vocab_size, eos)
        proposer = DraftModelProposer(
            _runner(config, memory, draft, decoder, grammars, tokenizer),
            BlockManager(memory.num_blocks, config.block_size, prefix_caching=False),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=min(memory.max_model_len, draft.model.max_position_embeddings),
            vocab_size=draft.model.vocab_size,
        )
    return Speculator(proposer, config.num_speculative_tokens)
