"""Options that several commands share; each is named like the setting it sets."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paged_infer.config import DEMO_MODEL

ROWS = "Rows"
SAMPLING = "Sampling (for rows that set none of their own)"
ENGINE = "Engine"
JOB = "Job"

ConfigFile = Annotated[
    str | None, typer.Option("--config", "-c", metavar="FILE.yaml", help="Settings by name; options here win.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help=f"Hugging Face folder or id, .gguf file, or short name; default: {DEMO_MODEL}."),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder of a tokenizer to use instead of the model's.", rich_help_panel=ENGINE)
]
Device = Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Where to run.", rich_help_panel=ENGINE)]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="auto|bfloat16|float16|float32",
        help="auto: bfloat16 where the processor has it, else float32.",
        rich_help_panel=ENGINE,
    ),
]
AttentionBackend = Annotated[
    str | None, typer.Option(metavar="auto|triton|cpu|reference", help="Which kernels to use.", rich_help_panel=ENGINE)
]
ModelImpl = Annotated[
    str | None,
    typer.Option(
        metavar="auto|native|transformers",
        help="Whose code runs the model: ours, or transformers' with our attention.",
        rich_help_panel=ENGINE,
    ),
]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option(
        "--trust-remote-code", help="Let transformers run code out of the model's folder.", rich_help_panel=ENGINE
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Most tokens of a sequence; default: the model's context.", rich_help_panel=ENGINE)
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most sequences running at once.", rich_help_panel=ENGINE)]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Token budget: most tokens a step runs.", rich_help_panel=ENGINE)
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a KV block holds.", rich_help_panel=ENGINE)]
NumKVBlocks = Annotated[
    int | None,
    typer.Option(
        "--num-kv-blocks", help="Blocks in the KV cache; default: what memory allows.", rich_help_panel=ENGINE
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory", metavar="BYTES", help="Size of the KV cache, as 2GiB or 500MB.", rich_help_panel=ENGINE
    ),
]
KVCacheDType = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="auto|fp8|int8",
        help="8 bits hold more tokens, rounded; auto: as the model.",
        rich_help_panel=ENGINE,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="none|int8|int4|fp8", help="Round the weights to this as they are loaded.", rich_help_panel=ENGINE
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="job|@FILE|TEXT",
        help="What int8 is fitted to: the job's first rows, or a text; default: a built-in one.",
        rich_help_panel=ENGINE,
    ),
]
LoadFormat = Annotated[
    str | None,
    typer.Option(metavar="auto|dummy", help="dummy: random weights, to measure with.", rich_help_panel=ENGINE),
]
Offload = Annotated[
    str | None,
    typer.Option(
        metavar="none|disk",
        help="disk: read the layers' weights anew in each pass; for models larger than memory.",
        rich_help_panel=ENGINE,
    ),
]
GPUMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Share of the GPU's memory that may be in use; default: 0.9.",
        rich_help_panel=ENGINE,
    ),
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--prefix-caching/--no-prefix-caching", help="Reuse the KV blocks of shared prefixes.", rich_help_panel=ENGINE
    ),
]
ChunkedPrefill = Annotated[
    bool | None,
    typer.Option(
        "--chunked-prefill/--no-chunked-prefill",
        help="Split long prompts over steps, so that running rows go on.",
        rich_help_panel=ENGINE,
    ),
]
Speculative = Annotated[
    str | None,
    typer.Option(
        metavar="off|auto|ngram|suffix|draft:MODEL",
        help="Guess tokens from the row, finished rows or a smaller model, and check several at once; same results.",
        rich_help_panel=ENGINE,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None, typer.Option(help="Most guesses for a row in one step.", rich_help_panel=ENGINE)
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic", help="No bit of a row's result depends on the rows beside it.", rich_help_panel=ENGINE
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH", help="LoRA adapter (PEFT folder) that rows may name; repeat it.", rich_help_panel=ENGINE
    ),
]
Adapter = Annotated[str | None, typer.Option(help="LoRA adapter to answer with.", rich_help_panel=SAMPLING)]
Order = Annotated[
    str | None,
    typer.Option(
        metavar="auto|input",
        help="auto: rows with shared prefixes together, long outputs early. The output keeps the input's order.",
        rich_help_panel=ENGINE,
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: the physical cores.", rich_help_panel=ENGINE)]
TensorParallelSize = Annotated[
    int | None, typer.Option(help="GPUs (or processes on CPUs) that share each layer.", rich_help_panel=ENGINE)
]
PipelineParallelSize = Annotated[
    int | None, typer.Option(help="Stages that the layers are divided into.", rich_help_panel=ENGINE)
]
DataParallelSize = Annotated[
    int | None,
    typer.Option(
        help="Engines that share out the rows, each with a GPU or a group of cores to itself.", rich_help_panel=ENGINE
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Divide the logits of tokens seen in prompt or output by this; 1 = off.", rich_help_panel=SAMPLING
    ),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Take this off the logits of tokens in the output.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="The same, for each time they occur there.", rich_help_panel=SAMPLING)
]
NumSamples = Annotated[
    int | None, typer.Option("--n", help="Samples of each row; default: 1.", rich_help_panel=SAMPLING)
]
BeamWidth = Annotated[int | None, typer.Option(help="Beams of a beam search; 1 = none.", rich_help_panel=SAMPLING)]
LengthPenalty = Annotated[
    float | None,
    typer.Option(help="Beam scores are divided by the length to this power; default: 1.", rich_help_panel=SAMPLING),
]
EarlyStopping = Annotated[
    str | None,
    typer.Option(metavar="true|false|never", help="When a beam search ends; default: false.", rich_help_panel=SAMPLING),
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="FILE", help="The output is JSON of this schema.", rich_help_panel=SAMPLING),
]
Regex = Annotated[
    str | None, typer.Option("--regex", help="The output matches this as a whole.", rich_help_panel=SAMPLING)
]
Grammar = Annotated[
    str | None,
    typer.Option(
        "--grammar", metavar="FILE", help="The output is a text of this Lark grammar.", rich_help_panel=SAMPLING
    ),
]
NumLogprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="K",
        help="Report log-probabilities of output tokens, and the K likeliest at each position.",
        rich_help_panel=SAMPLING,
    ),
]
NumPromptLogprobs = Annotated[
    int | None,
    typer.Option("--prompt-logprobs", metavar="K", help="The same for the prompt's tokens.", rich_help_panel=SAMPLING),
]
PromptColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column with the prompt text; default: prompt.", rich_help_panel=ROWS)
]
MessagesColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column with chat messages; default: messages.", rich_help_panel=ROWS)
]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE",
        help="Jinja template that makes the prompt out of a row's columns, as '{{ title }}: {{ text }}'.",
        rich_help_panel=ROWS,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Send prompts as user messages through the chat template, or as they are; default: raw.",
        rich_help_panel=ROWS,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE",
        help="System message for rows that bring none, a template too; implies --chat.",
        rich_help_panel=ROWS,
    ),
]
FewShot = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Solved examples to put before every prompt: its columns and an answer, or messages.",
        rich_help_panel=ROWS,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Chat template to use instead of the model's.", rich_help_panel=ROWS),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="""Names for the chat template, as '{"enable_thinking": false}'.""", rich_help_panel=ROWS
    ),
]
SplitSpecialTokens = Annotated[
    bool | None,
    typer.Option(
        "--split-special-tokens",
        help="Control tokens that a message spells out, as <|im_end|>, are ordinary text.",
        rich_help_panel=ROWS,
    ),
]
RowOptions = Annotated[
    bool | None,
    typer.Option(
        "--row-options/--no-row-options",
        help="Let rows set sampling options by name; default: yes, except in tables.",
        rich_help_panel=ROWS,
    ),
]
Limit = Annotated[int | None, typer.Option(help="Only the first rows.", rich_help_panel=ROWS)]
TooLong = Annotated[
    str | None,
    typer.Option(
        metavar="error|truncate-left",
        help="An over-long prompt becomes an error row, or keeps its end; default: error.",
        rich_help_panel=ROWS,
    ),
]


def settings_of(context: typer.Context) -> dict[str, Any]:
    """The settings given on the command line over those of `--config`, by name; unset ones left out."""
    from paged_infer.job.config import load_settings

    given = {name: value for name, value in context.params.items() if value is not None and value != ()}
    config = given.pop("config", None)
    return {**(load_settings(config) if config else {}), **given}
