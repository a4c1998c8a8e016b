"""`paged-infer plan`: what a run would do, without loading a weight."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paged_infer.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from paged_infer.engine.build import Layout
    from paged_infer.io.readers import Inputs
    from paged_infer.job.config import RunConfig
    from paged_infer.job.estimate import Rates, Sample
    from paged_infer.models.config import ModelConfig
    from paged_infer.models.source import ModelSource

SAMPLE_ROWS = 200


def plan(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[INPUT]...", help="Inputs to take a sample of rows from.", show_default=False),
    ] = None,
    config: opt.ConfigFile = None,
    model: opt.Model = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, help="Estimate tokens, time and cost from that many rows; loads the model to measure."),
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Prompt tokens a second, instead of measuring.")
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Generated tokens a second, instead of measuring.")
    ] = None,
    cost_per_hour: Annotated[
        float | None, typer.Option(help="What an hour of this machine costs; with --gpus, of one GPU.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="8xH100", help="Estimate the job on these GPUs instead, for every way to divide it."),
    ] = None,
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    template: opt.Template = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    few_shot: opt.FewShot = None,
    chat_template: opt.ChatTemplate = None,
    chat_template_kwargs: opt.ChatTemplateKwargs = None,
    split_special_tokens: opt.SplitSpecialTokens = None,
    too_long: opt.TooLong = None,
    row_options: opt.RowOptions = None,
    limit: opt.Limit = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.", rich_help_panel=opt.ROWS)] = None,
    tokenizer: opt.Tokenizer = None,
    device: opt.Device = None,
    dtype: opt.DType = None,
    attention_backend: opt.AttentionBackend = None,
    model_impl: opt.ModelImpl = None,
    trust_remote_code: opt.TrustRemoteCode = None,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    block_size: opt.BlockSize = None,
    num_kv_blocks: opt.NumKVBlocks = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    kv_cache_dtype: opt.KVCacheDType = None,
    quantization: opt.Quantization = None,
    calibration: opt.Calibration = None,
    load_format: opt.LoadFormat = None,
    offload: opt.Offload = None,
    gpu_memory_utilization: opt.GPUMemoryUtilization = None,
    prefix_caching: opt.PrefixCaching = None,
    chunked_prefill: opt.ChunkedPrefill = None,
    order: opt.Order = None,
    threads: opt.Threads = None,
    tensor_parallel_size: opt.TensorParallelSize = None,
    pipeline_parallel_size: opt.PipelineParallelSize = None,
    data_parallel_size: opt.DataParallelSize = None,
) -> None:
    """Show resolved settings, where the memory goes and how many sequences fit at once.

    With INPUT and --sample also what the job will take, from two rates: prompt tokens and generated tokens a second, as
    given, or as measured in some seconds on this machine with this model. With --gpus, from the data sheet of GPUs that
    need not be here; of the model only its config and tokenizer are read.
    """
    settings = opt.settings_of(context)
    for name in ("sample", "prefill_rate", "decode_rate", "gpus"):
        settings.pop(name, None)

    from rich.console import Console

    from paged_infer.config import ConfigError
    from paged_infer.job.config import RunConfig

    with_input = bool(settings.get("inputs"))
    if sample is not None and not with_input:
        raise ConfigError("sample: name the inputs to take it from")
    if (prefill_rate is None) != (decode_rate is None):
        raise ConfigError("prefill_rate and decode_rate: give both, or none to have them measured")
    run_config = RunConfig.resolve({"inputs": ("-",), "output": "results.arrow"}, settings)

    if gpus is not None:
        Console().print(_forecast_table(run_config, gpus, sample or SAMPLE_ROWS))
        return

    from paged_infer.engine.build import layout
    from paged_infer.engine.loading import model_source
    from paged_infer.job.estimate import Rates
    from paged_infer.job.run import open_inputs, prompt_reader
    from paged_infer.models.config import ModelConfig

    opened = open_inputs(run_config, prompt_reader(run_config)) if with_input else None
    total = opened.count() if opened is not None and sample is not None else 0
    console = Console()
    model_config = model_source(run_config.engine).config()
    if isinstance(model_config, ModelConfig):
        console.print(_formats_table(model_config, run_config.engine.gpu_memory_utilization))
    resolved = layout(run_config.engine)
    limit = resolved.memory.max_model_len
    taken = None if opened is None else _take(run_config, resolved.source, limit, opened, sample or SAMPLE_ROWS)
    console.print(_settings_table(run_config, resolved))
    console.print(_memory_table(resolved, taken))
    if taken is None or sample is None:
        return
    if not taken.prompts:
        raise ConfigError(f"none of the first {taken.rows} rows can be answered: nothing to estimate from")
    rows = total if run_config.limit is None else min(total, run_config.limit)
    if prefill_rate is not None and decode_rate is not None:
        rates = Rates(prefill_rate, decode_rate)
    else:
        print("loading the model to measure its speed ...", file=sys.stderr)
        rates = _measure(run_config, taken, rows)
    console.print(_estimate_table(taken, rows, rates, run_config.cost_per_hour))


def _take(config: RunConfig, source: ModelSource, context: int, inputs: Inputs, rows: int) -> Sample:
    from paged_infer.engine.build import load_tokenizer
    from paged_infer.job.encode import PromptEncoder
    from paged_infer.job.estimate import take_sample
    from paged_infer.job.run import prompt_reader
    from paged_infer.models.generation import sampling_defaults

    own = config.engine.generation_config == "auto"
    tokenizer = load_tokenizer(config.engine, source)
    return take_sample(
        config,
        prompt_reader(config),
        inputs,
        PromptEncoder.of_job(config, tokenizer, context),
        sampling_defaults(source.generation_config()) if own else {},
        rows=rows,
        max_model_len=context,
    )


def _forecast_table(config: RunConfig, gpus: str, rows: int) -> Table:
    """What the job would take on GPUs that are not here."""
    from dataclasses import replace

    from rich.table import Table

    from paged_infer.config import ConfigError
    from paged_infer.engine.fit import LAYER_SHARE
    from paged_infer.job.progress import duration, rate
    from paged_infer.job.roofline import GIB, Workload, forecasts, parse_gpus
    from paged_infer.job.run import open_inputs, prompt_reader
    from paged_infer.models.config import ModelConfig
    from paged_infer.models.source import resolve_model

    count, machine = parse_gpus(gpus)
    machine = replace(machine, layer_share=LAYER_SHARE[config.engine.quantization])
    if config.inputs == ("-",):
        raise ConfigError("gpus: name the inputs whose rows are to be answered")
    source = resolve_model(config.engine.model)
    model = source.config()
    if not isinstance(model, ModelConfig):
        raise ConfigError(f"gpus: estimates are made for native models, this {model.family} is not one")
    context = min(config.engine.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    inputs = open_inputs(config, prompt_reader(config))
    total = inputs.count() if config.limit is None else min(config.limit, inputs.count())
    taken = _take(config, source, context, inputs, rows)
    if not taken.prompts:
        raise ConfigError(f"none of the first {taken.rows} rows can be answered: nothing to estimate from")
    good = len(taken.prompts)
    load = Workload(
        rows=max(1, total * good // taken.rows),
        prompt_tokens=taken.prompt_tokens / good,
        shared_tokens=taken.shared_tokens / good,
        output_tokens=taken.output_tokens / good,
        max_output_tokens=max(taken.output_limits),
    )
    table = Table(
        title=f"{load.rows:,} rows of {load.prompt_tokens:,.0f} + at most {load.output_tokens:,.0f} tokens on "
        f"{count} x {machine.name}, data sheets, {16 * machine.layer_share:g} bits a weight of the layers",
        title_justify="left",
    )
    for heading in ("layout", "weights", "KV cache", "at once", "output tok/s", "time, at most", "cost"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for found in forecasts(model, count, machine, load, config.engine):
        if found.why_not is not None:
            table.add_row(found.name, found.why_not)
            continue
        cost = None if config.cost_per_hour is None else count * config.cost_per_hour * found.seconds / 3600
        table.add_row(
            found.name,
            f"{found.weight_bytes / GIB:,.1f} GiB",
            f"{found.kv_bytes / GIB:,.1f} GiB",
            f"{found.num_seqs * found.dp:,}",
            rate(load.output_tokens * load.rows / found.seconds),
            duration(found.seconds),
            "" if cost is None else rate(cost),
        )
    return table


def _measure(config: RunConfig, sample: Sample, rows: int) -> Rates:
    from paged_infer.engine.build import build_engine, resolve_device
    from paged_infer.job.calibration import calibrated
    from paged_infer.job.estimate import measure

    engine = build_engine(calibrated(config).engine)
    try:
        return measure(
            engine,
            sample.prompts,
            max_num_seqs=min(config.engine.max_num_seqs, rows),
            max_num_batched_tokens=config.engine.token_budget(resolve_device(config.engine)),
        )
    finally:
        engine.close()


def _estimate_table(sample: Sample, rows: int, rates: Rates, cost_per_hour: float | None) -> Table:
    from paged_infer.job.estimate import estimate
    from paged_infer.job.progress import duration, rate

    found = estimate(sample, rows, rates)
    table = _two_columns("Estimate")
    bad = sample.rows - len(sample.prompts)
    table.add_row("rows", f"{rows:,}, taken to be like the first {sample.rows:,}" + (f" ({bad:,} bad)" if bad else ""))
    shared = found.shared_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
    table.add_row("prompt tokens", f"{found.prompt_tokens:,.0f}, {shared:.0%} of them in shared beginnings")
    table.add_row("output tokens", f"at most {found.output_tokens:,.0f}")
    how = "as given" if rates.num_seqs is None else f"measured here, {rates.num_seqs:,} sequences at once"
    table.add_row("speed", f"{rate(rates.prefill)} prompt tok/s, {rate(rates.decode)} output tok/s ({how})")
    table.add_row("time", f"at most {duration(found.seconds)}, beside loading the model")
    if cost_per_hour is not None:
        table.add_row("cost", f"at most {rate(found.cost(cost_per_hour))}")
    return table


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
    table.add_row("max_num_batched_tokens", str(config.engine.token_budget(resolved.backend.device.type)))
    for name in ("max_num_seqs", "prefix_caching", "chunked_prefill", "order"):
        table.add_row(name, str(getattr(config.engine, name)))
    for name, value in sorted(config.sampling.items()):
        table.add_row(name, str(value))
    return table


def _formats_table(model: ModelConfig, memory_utilization: float) -> Table:
    """What the weights take in each format, and how many GPUs of which size that is."""
    from rich.table import Table

    from paged_infer.engine.fit import GPUS, gpus_for, weight_sizes

    table = Table(title="Weights by format, and the GPUs they need", title_justify="left")
    table.add_column("format", style="bold")
    table.add_column("layers", justify="right")
    table.add_column("in all", justify="right")
    for gpu in GPUS:
        table.add_column(gpu, justify="right")
    for size in weight_sizes(model):
        needed = (str(gpus_for(size.total_bytes, gpu, memory_utilization)) for gpu in GPUS)
        table.add_row(size.name, f"{size.layer_bytes / 1e9:,.2f} GB", f"{size.total_bytes / 1e9:,.2f} GB", *needed)
    return table


def _memory_table(resolved: Layout, sample: Sample | None) -> Table:
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
    if sample is not None and sample.prompts:
        count = len(sample.prompts)
        prompt, output = sample.prompt_tokens / count, sample.output_tokens / count
        fit = memory.sequences(round(prompt + output))
        table.add_row(
            "", f"{fit:,} like the first {count} rows: {prompt:,.0f} prompt tokens, up to {output:,.0f} output"
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
