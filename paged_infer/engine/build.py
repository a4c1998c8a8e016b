"""Puts an engine together from settings: model files → weights → decoder, cache, runner, scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from paged_kernels.cpu.build import KernelsUnavailable
from paged_kernels.cpu.threads import available_cores
from paged_kernels.dispatch import has_fast_bf16, make_backend
from paged_kernels.interface import Backend

from paged_infer.config import ConfigError, EngineConfig, cache_dir, visible_gpus
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.draft_model import DraftModelProposer
from paged_infer.engine.engine import Engine
from paged_infer.engine.executor import RankGroup, Stage, serve_runner
from paged_infer.engine.gpu import gpu_execution, measured_plan
from paged_infer.engine.gpu_memory import free_gpu_bytes
from paged_infer.engine.interface import AnyEngine
from paged_infer.engine.loading import load_decoder, model_source, return_freed_memory, weight_bytes
from paged_infer.engine.memory import MemoryPlan, available_memory, plan
from paged_infer.engine.pipelined_runner import PipelinedRunner
from paged_infer.engine.replicas import Replicas, serve_engine
from paged_infer.engine.runner import ModelRunner, Runner
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.speculative import NGramProposer, Proposer, Speculator, SuffixProposer
from paged_infer.engine.structured import Grammars
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.models.config import ModelConfig
from paged_infer.models.decoder import Decoder, Share
from paged_infer.models.digest import sampled_digest
from paged_infer.models.generation import eos_token_ids, sampling_defaults
from paged_infer.models.lora import Adapter, Adapters, load_adapter
from paged_infer.models.sharding import check_divisible, local_config, shard
from paged_infer.models.source import AnyConfig, ModelSource, native, resolve_model
from paged_infer.models.transformers_model import AnyModel, TransformersConfig, TransformersModel
from paged_infer.parallel.cores import core_groups
from paged_infer.parallel.groups import StageLink, join
from paged_infer.parallel.place import Place, places
from paged_infer.parallel.process import Worker
from paged_infer.parallel.worker import Channel
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
    source = model_source(config)
    model = source.config()
    if config.deterministic:
        native(model, "deterministic")
    dtype = resolve_dtype(config)
    backend = _backend(config, device, dtype)
    total_bytes, block_bytes = weight_bytes(config, source, backend), _block_bytes(config, model, backend)
    if config.num_devices > 1:
        whole = native(model, "tensor or pipeline parallelism")
        check_divisible(whole, config.tensor_parallel_size, config.pipeline_parallel_size)
        total_bytes, block_bytes = _sharded_bytes(config, total_bytes, whole, backend)
    draft = None
    if config.draft_model is not None:
        draft_source = resolve_model(config.draft_model)
        draft = DraftLayout(draft_source, draft_source.config(), _backend(config, device, dtype))
        total_bytes += draft_source.weight_bytes(dtype, draft.backend.keeps)
        block_bytes += _block_bytes(config, draft.model, draft.backend)
    memory = plan(
        config,
        context_len=model.max_position_embeddings,
        weight_bytes=total_bytes,
        block_bytes=block_bytes,
        free_bytes=free_gpu_bytes(backend.device, config.gpu_memory_utilization)
        if device == "cuda"
        else available_memory() // config.data_parallel_size,
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
            deterministic=config.deterministic,
        )
    except (ValueError, KernelsUnavailable) as error:
        raise ConfigError(f"attention_backend={config.attention_backend!r}: {error}") from error


def _block_bytes(config: EngineConfig, model: AnyConfig, backend: Backend) -> int:
    return backend.kv_bytes_per_block(model.num_layers, config.block_size, model.num_kv_heads, model.head_dim)


def _sharded_bytes(config: EngineConfig, weights: int, model: ModelConfig, backend: Backend) -> tuple[int, int]:
    """Bytes of weights and of a KV block in the memory they lie in: of all ranks on a CPU, of the fullest GPU."""
    shares = [
        local_config(model, place) for place in places(config.tensor_parallel_size, config.pipeline_parallel_size)
    ]
    blocks = [_block_bytes(config, share, backend) for share in shares]
    if backend.device.type == "cpu":
        return weights, sum(blocks)
    return -(-weights // len(shares)), max(blocks)


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


def build_engine(config: EngineConfig) -> AnyEngine:
    """Load the model and make an engine, or several behind one face, ready to run.

    Raises `ConfigError`, and `WorkerFailed` where an engine of several processes dies while it is loaded.
    """
    return _replicas(config) if config.data_parallel_size > 1 else build_single(config)


def _replicas(config: EngineConfig) -> Replicas:
    """An engine for each device, or for each group of cores."""
    count = config.data_parallel_size
    source = model_source(config)  # what is wrong with its name is said once
    own = [config] * count
    cpus: list[frozenset[int] | None] = [None] * count
    devices: list[dict[str, str]] = [{}] * count
    if resolve_device(config) == "cuda":
        gpus = visible_gpus(torch.cuda.device_count())
        each = config.num_devices
        if len(gpus) < count * each:
            raise ConfigError(f"data_parallel_size={count}: there are {len(gpus)} GPUs, and each engine needs {each}")
        devices = [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])} for i in range(count)]
    else:
        cpus = core_groups(count)
        threads = config.threads or max(1, available_cores() // count)
        own = [replace(config, threads=threads)] * count

    def start(number: int) -> Worker:
        return Worker(
            f"engine {number + 1} of {count}",
            serve_engine,
            partial(build_single, own[number]),
            config.max_num_seqs,
            cpus=cpus[number],
            environment=devices[number],
        )

    return Replicas(
        start, count, lambda: load_tokenizer(config, source), config.block_size if config.prefix_caching else None
    )


def build_single(config: EngineConfig) -> Engine:
    """Load the model and make one engine in this process, one of `data_parallel_size`. Raises `ConfigError`."""
    plan = layout(config)
    model, backend, memory = plan.model, plan.backend, plan.memory
    tokenizer = load_tokenizer(config, plan.source)
    on_gpu = backend.device.type == "cuda"
    generation_config = plan.source.generation_config()
    eos = model.eos_token_ids | eos_token_ids(generation_config) | tokenizer.eos_token_ids
    grammars = Grammars(tokenizer, model.vocab_size, eos)
    adapters: list[Adapter] = []
    drafting: AnyModel | None = None
    runner: Runner
    if config.num_devices > 1:
        runner = ranks = _ranks(config, plan)
        memory = ranks.agreed
    else:
        max_position = min(memory.max_model_len, model.max_position_embeddings)
        decoder = load_decoder(config, plan.source, backend, tokenizer, max_position)
        drafting = None if plan.draft is None else _draft_decoder(plan.draft, memory)
        if on_gpu:
            memory = measured_plan(config, decoder, backend, memory)
        adapters = _adapters(config, model)
        packed = Adapters(adapters, backend) if adapters else None
        runner = _runner(config, memory, plan, decoder, grammars, tokenizer, packed)
        if on_gpu and config.speculative == "off":  # a guess starts from tokens that must be known
            runner = PipelinedRunner(runner)
    scheduler = Scheduler(
        BlockManager(memory.num_blocks, config.block_size, config.prefix_caching, window=model.widest_window),
        WaitingQueue(config.order, ADMISSION_WINDOW, config.block_size if config.prefix_caching else None),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget(backend.device.type),
        chunked_prefill=config.chunked_prefill,
        max_in_flight=runner.depth,
        num_micro_batches=runner.depth if config.pipeline_parallel_size > 1 else 1,
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
                "quantization": config.quantization,
                "attention_backend": backend.name,
                "max_model_len": memory.max_model_len,
                "num_kv_blocks": memory.num_blocks,
            },
        },
    )


def _adapters(config: EngineConfig, model: AnyConfig) -> list[Adapter]:
    if config.lora and isinstance(model, TransformersConfig):
        raise ConfigError(f"lora={config.lora[0]!r}: adapters need a native model, this {model.family} is not one")
    return [
        load_adapter(name, folder, model)
        for name, folder in config.adapter_folders.items()
        if isinstance(model, ModelConfig)
    ]


def _ranks(config: EngineConfig, plan: Layout) -> RankGroup:
    """The ranks that run the model together, each loaded with its share."""
    ranks = places(config.tensor_parallel_size, config.pipeline_parallel_size)
    on_gpu = plan.backend.device.type == "cuda"
    environments: list[dict[str, str]] = [{"GLOO_SOCKET_IFNAME": "lo"}] * len(ranks)
    cpus: list[frozenset[int] | None] = [None] * len(ranks)
    own = config
    if on_gpu:
        gpus = visible_gpus(torch.cuda.device_count())
        if len(gpus) < len(ranks):
            raise ConfigError(
                f"{len(ranks)} GPUs are needed for tensor and pipeline parallelism, there are {len(gpus)}"
            )
        environments = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[: len(ranks)]]
    else:
        cpus = core_groups(len(ranks))
        own = replace(config, threads=config.threads or max(1, available_cores() // len(ranks)))

    def start(place: Place, rendezvous: str) -> Worker:
        return Worker(
            str(place),
            serve_rank,
            own,
            plan.memory,
            place,
            rendezvous,
            cpus=cpus[place.rank],
            environment=environments[place.rank],
        )

    def agree(plans: list[MemoryPlan]) -> MemoryPlan:
        return min(plans, key=lambda memory: memory.num_blocks)

    stages = config.pipeline_parallel_size
    depth = stages + 1 if stages > 1 else 2 if config.speculative == "off" else 1
    return RankGroup(start, ranks, depth, agree)


def serve_rank(channel: Channel, config: EngineConfig, memory: MemoryPlan, place: Place, rendezvous: str) -> None:
    """What the process of a rank does: load its share, agree on the cache's size, run batches.

    Args:
        memory: the plan so far; its number of blocks is what the smallest rank turns out to have room for.
        rendezvous: see `parallel.groups.join`.
    """
    try:
        device = resolve_device(config)
        source = model_source(config)
        model = native(source.config(), "tensor or pipeline parallelism")
        backend = _backend(config, device, resolve_dtype(config))
        group = join(rendezvous, place.rank, place.tp_size * place.pp_size, place.tp_size, device)
        local = local_config(model, place)
        part = Layout(source, local, backend, memory)
        decoder = Decoder(
            local,
            backend,
            shard(model, source.weights(), place),
            max_position=min(memory.max_model_len, model.max_position_embeddings),
            share=Share(place, group, model.vocab_size),
        )
        if device == "cuda" and place.pp_size == 1:
            memory = measured_plan(config, decoder, backend, memory)
        channel.send(memory)
        memory = channel.receive()
        tokenizer = load_tokenizer(config, source)
        eos = model.eos_token_ids | eos_token_ids(source.generation_config()) | tokenizer.eos_token_ids
        stage = None
        if place.pp_size > 1:
            before = None if place.is_first else place.rank - place.tp_size
            after = None if place.is_last else place.rank + place.tp_size
            stage = Stage(decoder, place, StageLink(before, after, place.pp_size))
        grammars = Grammars(tokenizer, model.vocab_size, eos)
        runner = _runner(config, memory, part, decoder, grammars, tokenizer, vocab_size=model.vocab_size, stage=stage)
    except ConfigError as error:
        channel.send(error)
        raise
    channel.send(None)
    serve_runner(channel, runner, place.is_last and place.tp_rank == 0)


def _draft_decoder(part: DraftLayout, memory: MemoryPlan) -> AnyModel:
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
    adapters: Adapters | None = None,
    *,
    vocab_size: int | None = None,
    stage: Stage | None = None,
) -> ModelRunner:
    """A model with its cache and whatever its device needs.

    Args:
        vocab_size: of the whole model, where this is a share of it.
        stage: what runs in place of the decoder, in a pipeline.
    """
    model, backend = part.model, part.backend
    max_model_len = min(memory.max_model_len, model.max_position_embeddings)
    vocab_size = min(vocab_size or model.vocab_size, tokenizer.vocab_size)
    return_freed_memory()
    try:
        kv = backend.make_kv_cache(
            model.num_layers, memory.num_blocks, config.block_size, model.num_kv_heads, model.head_dim
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    execution = None
    if backend.device.type == "cuda":
        execution = gpu_execution(
            decoder,
            backend,
            kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget(backend.device.type),
            max_model_len=max_model_len,
            graphs=config.num_devices == 1 and isinstance(decoder, Decoder),
        )
    return ModelRunner(
        decoder if stage is None else stage,
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
            max_num_batched_tokens=config.token_budget(draft.backend.device.type),
            max_model_len=min(memory.max_model_len, draft.model.max_position_embeddings),
            vocab_size=draft.model.vocab_size,
        )
    return Speculator(proposer, config.num_speculative_tokens)
