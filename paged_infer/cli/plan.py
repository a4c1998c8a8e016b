"""`paged-infer plan`: what a run would do, without loading a weight."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from paged_infer.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from paged_infer.engine.build import Layout
    from paged_infer.job.config import RunConfig

SAMPLE_ROWS = 200


def plan(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[INPUT]...", help="Inputs to take a sample of rows from.", show_default=False),
    ] = None,
    config: opt.ConfigFile = None,
    model: opt.Model = None,
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.", rich_help_panel=opt.ROWS)] = None,
    tokenizer: opt.Tokenizer = None,
    device: opt.Device = None,
    dtype: opt.DType = None,
    attention_backend: opt.AttentionBackend = None,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    block_size: opt.BlockSize = None,
    num_kv_blocks: opt.NumKVBlocks = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    prefix_caching: opt.PrefixCaching = None,
    chunked_prefill: opt.ChunkedPrefill = None,
    order: opt.Order = None,
    threads: opt.Threads = None,
) -> None:
    """Show resolved settings, where the memory goes and how many sequences fit at once."""
    settings = opt.settings_of(context)

    from rich.console import Console

    from paged_infer.job.config import RunConfig

    with_sample = bool(settings.get("inputs"))
    run_config = RunConfig.resolve({"inputs": ("-",), "output": "results.arrow"}, settings)

    from paged_infer.engine.build import layout

    resolved = layout(run_config.engine)
    lengths = _sample(run_config, resolved) if with_sample else []
    console = Console()
    console.print(_settings_table(run_config, resolved))
    console.print(_memory_table(resolved, lengths))


def _sample(config: RunConfig, resolved: Layout) -> list[tuple[int, int]]:
    """(prompt tokens, most output tokens) of the first rows that can be answered."""
    from paged_infer.io.prompts import Prompt
    from paged_infer.job.encode import PromptEncoder
    from paged_infer.job.run import open_inputs, prompt_reader
    from paged_infer.models.generation import sampling_defaults
    from paged_infer.text.tokenizer import Tokenizer
    from paged_infer.types import RowError, SamplingParams

    reader = prompt_reader(config)
    own = config.engine.generation_config == "auto"
    defaults = sampling_defaults(resolved.source.generation_config()) if own else {}
    prompts: list[Prompt] = []
    limits: list[int] = []
    for row in itertools.islice(open_inputs(config, reader).rows(), SAMPLE_ROWS):
        try:
            prompt = reader.read(row)
            limits.append(SamplingParams.resolve(defaults, config.sampling, prompt.options).max_tokens)
        except RowError:
            continue
        prompts.append(prompt)
    tokenizer = Tokenizer.load(config.engine.tokenizer or resolved.source.tokenizer_folder())
    context = resolved.memory.max_model_len
    encoded = PromptEncoder(tokenizer, context).encode(prompts)
    return [
        (len(ids), context - len(ids) if limit < 0 else min(limit, context - len(ids)))
        for ids, limit in zip(encoded, limits, strict=True)
        if not isinstance(ids, RowError) and len(ids) < context
    ]


def _settings_table(config: RunConfig, resolved: Layout) -> Table:
    model = resolved.model
    table = _two_columns("Settings")
    table.add_row("model", config.engine.model)
    table.add_row(
        "shape",
        f"{model.family}: {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, vocabulary {model.vocab_size:,}",
    )
    table.add_row(
        "kernels", f"{type(resolved.backend).__module__}, {str(resolved.backend.dtype).removeprefix('torch.')}"
    )
    for name in ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "chunked_prefill", "order"):
        table.add_row(name, str(getattr(config.engine, name)))
    for name, value in sorted(config.sampling.items()):
        table.add_row(name, str(value))
    return table


def _memory_table(resolved: Layout, lengths: list[tuple[int, int]]) -> Table:
    memory = resolved.memory
    table = _two_columns("Memory")
    table.add_row("free", _bytes(memory.available_bytes))
    table.add_row("weights", _bytes(memory.weight_bytes))
    per_token = memory.block_bytes / memory.block_size
    table.add_row(
        "KV cache",
        f"{_bytes(memory.kv_bytes)}: {memory.num_blocks:,} blocks of {memory.block_size} tokens, "
        f"{_bytes(memory.block_bytes)} a block, {_bytes(per_token)} a token",
    )
    table.add_row("max_model_len", f"{memory.max_model_len:,} tokens")
    table.add_row("fit at once", f"{memory.sequences(memory.max_model_len):,} sequences of max_model_len tokens")
    if lengths:
        prompt = sum(tokens for tokens, _ in lengths) / len(lengths)
        output = sum(tokens for _, tokens in lengths) / len(lengths)
        fit = memory.sequences(round(prompt + output))
        table.add_row(
            "", f"{fit:,} like the first {len(lengths)} rows: {prompt:,.0f} prompt tokens, up to {output:,.0f} output"
        )
    return table


def _two_columns(title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    return table


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
