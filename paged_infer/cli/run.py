"""`paged-infer run`: answer every row of the inputs."""

from __future__ import annotations

import contextlib
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from paged_infer.cli import options as opt

if TYPE_CHECKING:
    from paged_infer.engine.interface import AnyEngine


def run(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help=".jsonl, .parquet, .arrow, .csv or .txt files (text also .gz, .zst, .bz2), folders, patterns, URLs as "
            "s3://… and hf://datasets/ORG/NAME:SPLIT; - reads JSONL from stdin.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="Results: .arrow, .feather, .parquet or .jsonl, or a folder of parts; default: INPUT.out.arrow.",
        ),
    ] = None,
    config: opt.ConfigFile = None,
    model: opt.Model = None,
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    id_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column echoed as id; default: id.", rich_help_panel=opt.ROWS)
    ] = None,
    template: opt.Template = None,
    chat: opt.Chat = None,
    system: opt.System = None,
    few_shot: opt.FewShot = None,
    chat_template: opt.ChatTemplate = None,
    chat_template_kwargs: opt.ChatTemplateKwargs = None,
    split_special_tokens: opt.SplitSpecialTokens = None,
    too_long: opt.TooLong = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Input column to carry into the results; repeat it.", rich_help_panel=opt.ROWS
        ),
    ] = None,
    row_options: opt.RowOptions = None,
    limit: opt.Limit = None,
    on_error: Annotated[
        str | None,
        typer.Option(
            metavar="row|fail",
            help="A bad row becomes an error row, or ends the job; default: row.",
            rich_help_panel=opt.ROWS,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens to generate; -1 = up to the context; default: 256.", rich_help_panel=opt.SAMPLING
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 = greedy; default: 0.", rich_help_panel=opt.SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest tokens up to this probability.", rich_help_panel=opt.SAMPLING),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep that many likeliest tokens; 0 = all.", rich_help_panel=opt.SAMPLING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens at least this likely, relative to the likeliest.", rich_help_panel=opt.SAMPLING),
    ] = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    n: opt.NumSamples = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the run; default: drawn and recorded.", rich_help_panel=opt.SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; repeat it.", rich_help_panel=opt.SAMPLING)
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="Token id that ends the output; repeat it.", rich_help_panel=opt.SAMPLING),
    ] = None,
    include_stop_str_in_output: Annotated[
        bool | None,
        typer.Option("--include-stop-str-in-output", help="Keep the stop text.", rich_help_panel=opt.SAMPLING),
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Do not end before that many tokens.", rich_help_panel=opt.SAMPLING)
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos", help="Do not end at the model's end tokens.", rich_help_panel=opt.SAMPLING),
    ] = None,
    beam_width: opt.BeamWidth = None,
    length_penalty: opt.LengthPenalty = None,
    early_stopping: opt.EarlyStopping = None,
    adapter: opt.Adapter = None,
    json_schema: opt.JsonSchema = None,
    regex: opt.Regex = None,
    grammar: opt.Grammar = None,
    logprobs: opt.NumLogprobs = None,
    prompt_logprobs: opt.NumPromptLogprobs = None,
    generation_config: Annotated[
        str | None,
        typer.Option(
            metavar="auto|none",
            help="Use the model's own sampling defaults, or not; default: auto.",
            rich_help_panel=opt.SAMPLING,
        ),
    ] = None,
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
    lora: opt.Lora = None,
    speculative: opt.Speculative = None,
    num_speculative_tokens: opt.NumSpeculativeTokens = None,
    deterministic: opt.Deterministic = None,
    order: opt.Order = None,
    threads: opt.Threads = None,
    tensor_parallel_size: opt.TensorParallelSize = None,
    pipeline_parallel_size: opt.PipelineParallelSize = None,
    data_parallel_size: opt.DataParallelSize = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Only the I-th of N shares of the rows, I from 1; see merge.", rich_help_panel=opt.ROWS
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|auto|local",
            help="Run on a Ray cluster: an engine on each node or GPU, all on the same files.",
            rich_help_panel=opt.JOB,
        ),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Go on with what an interrupted run left, or drop it; default: go on.",
            rich_help_panel=opt.JOB,
        ),
    ] = None,
    retry_errors: Annotated[
        bool | None,
        typer.Option("--retry-errors", help="Answer the error rows of earlier runs again.", rich_help_panel=opt.JOB),
    ] = None,
    overwrite: Annotated[
        bool | None,
        typer.Option("--overwrite", help="Start again and replace results that exist.", rich_help_panel=opt.JOB),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Stop after that long, as on SIGTERM: 90, 45m, 1h30m.", rich_help_panel=opt.JOB
        ),
    ] = None,
    max_error_rate: Annotated[
        float | None,
        typer.Option(help="Fail when a larger share of the rows (at least 1,000) are errors.", rich_help_panel=opt.JOB),
    ] = None,
    dedupe: Annotated[
        bool | None,
        typer.Option(
            "--dedupe/--no-dedupe",
            help="Compute identical rows once where the same answer is certain; default: yes.",
            rich_help_panel=opt.JOB,
        ),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            metavar="rows|openai",
            help="openai: answers of OpenAI's batch interface, in a .jsonl; default: rows.",
            rich_help_panel=opt.JOB,
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE.json", help="Write the figures of the run there.", rich_help_panel=opt.JOB),
    ] = None,
    cost_per_hour: Annotated[
        float | None,
        typer.Option(help="What an hour of this machine costs, for the report.", rich_help_panel=opt.JOB),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(metavar="debug|info|warning|error", help="Default: warning.", rich_help_panel=opt.JOB),
    ] = None,
    progress: Annotated[
        str | None,
        typer.Option(
            metavar="auto|bar|plain|none", help="How to show progress on standard error.", rich_help_panel=opt.JOB
        ),
    ] = None,
) -> None:
    """Answer every row of the inputs and write the results in the same order.

    A row has a prompt, messages or prompt_token_ids, perhaps an id, and may set sampling options of its own. A row that
    cannot be answered becomes an error row; the exit code is then 3. The same command goes on with a run that was
    stopped or killed.
    """
    started = perf_counter()
    from paged_infer.job.config import RunConfig

    run_config = RunConfig.resolve(opt.settings_of(context))

    from paged_infer.cli.logs import log_to_stderr
    from paged_infer.job.calibration import calibrated
    from paged_infer.job.run import JobError, partial_file, preflight, run_job
    from paged_infer.job.signals import Stopped, StopSignals

    log_to_stderr(run_config.log_level)
    run_config = calibrated(run_config)

    def engine() -> AnyEngine:
        from paged_infer.engine.build import build_engine

        return build_engine(run_config.engine)

    try:
        with StopSignals() as signals:
            preflight(run_config)
            if run_config.ray is None:
                summary = run_job(run_config, engine, started=started, signals=signals)
            else:
                from paged_infer.job.ray_job import run_on_ray

                summary = run_on_ray(run_config, started=started, signals=signals)
    except JobError as error:
        rows = f"; finished rows are in {partial}" if (partial := partial_file(run_config)).exists() else ""
        print(f"paged-infer: {error}{rows}", file=sys.stderr)
        raise typer.Exit(1) from None
    except Stopped as stop:
        print(f"paged-infer: stopped by {stop.number.name} before the first row", file=sys.stderr)
        raise typer.Exit(128 + stop.number) from None

    from rich.console import Console

    from paged_infer.job.report import results_table, summary_table

    if run_config.progress != "none":
        console = Console(stderr=True)
        with contextlib.suppress(BrokenPipeError, SystemExit):  # rich ends the process when nobody listens
            if summary.previews:
                console.print(results_table(summary.previews, "First rows"))
            console.print(summary_table(summary))
    if summary.stopped_by is not None:
        reason = "the time limit" if signals.received is None else summary.stopped_by.name
        print(
            f"paged-infer: stopped by {reason}; {summary.rows:,} finished rows are in {partial_file(run_config)}, and "
            "the same command goes on from there",
            file=sys.stderr,
        )
    raise typer.Exit(summary.exit_code)
