"""`paged-infer quantize`: write a model with weights of 4 or 8 bits."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from paged_infer.cli import options as opt

METHODS = ("awq", "gptq", "int4", "int8", "fp8")


def quantize(
    model: Annotated[str, typer.Argument(help="Hugging Face folder or id, .gguf file, or short name.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.")],
    method: Annotated[
        str,
        typer.Option(
            metavar="|".join(METHODS),
            help="awq, gptq: 4 bits, calibrated (gptq is better and slower); int4: 4 bits, nearest; int8: smoothed, 8 "
            "bits on both sides; fp8: float8 on both sides.",
        ),
    ],
    calibration: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text like what the model is for; default: Python's manual.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=16, help="Tokens of it to use.")] = 8192,
    group_size: Annotated[int, typer.Option(min=16, help="Inputs that share a scale, of the 4-bit methods.")] = 64,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Round a model's weights and write it in compressed-tensors' format.

    The result runs here and in whatever reads that format. Embedding and LM head stay as they are. Memory is that of
    one layer and of the calibration tokens' activations.
    """
    from paged_infer.config import ConfigError

    if method not in METHODS:
        raise ConfigError(f"method={method!r}: expected one of {', '.join(METHODS)}")

    import torch
    from paged_kernels.dispatch import make_backend

    from paged_infer.config import EngineConfig, cache_dir
    from paged_infer.engine.build import resolve_device
    from paged_infer.models.quantize import make_method, quantized_weights
    from paged_infer.models.quantize.calibration import read_text, token_rows
    from paged_infer.models.quantize.write import CheckpointWriter
    from paged_infer.models.source import resolve_model
    from paged_infer.text.tokenizer import Tokenizer

    started = perf_counter()
    text = read_text(calibration)
    source = resolve_model(model)
    source.config()
    if source.quantized:
        raise ConfigError(f"{model} is quantised already; give the unquantised model")
    chosen = make_method(method, group_size)
    rows = torch.zeros(1, 1, dtype=torch.int64)
    if chosen.calibrated:
        rows = token_rows(Tokenizer.load(source.tokenizer_folder()), text, calibration_tokens)
    writer = CheckpointWriter(out, source, torch.bfloat16)
    where = resolve_device(EngineConfig.from_mapping({"device": device}))
    backend = make_backend(where, torch.float32, threads=threads, cache_dir=cache_dir())
    quantized_weights(source, backend, chosen, rows, writer.add)
    writer.finish()
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{out}: {method}, {size / 1e6:,.0f} MB of weights, {perf_counter() - started:.0f} s", file=sys.stderr)
