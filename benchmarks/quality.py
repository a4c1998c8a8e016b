"""What rounding costs in quality: perplexity of the same text under each format, beside transformers in float32.

    python benchmarks/quality.py                               # all, into results/quality.{json,md}
    python benchmarks/quality.py --only float32,int8           # these again; the others stay, if of the same settings

The text is Python's built-in help (`pydoc_data.topics`), which comes with every Python: three of every four topics. The
fourth is what the formats that need text are calibrated on. Rows of 512 tokens are scored each on its own.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import pydoc_data.topics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from paged_kernels.dispatch import make_backend
from paged_kernels.interface import Backend
from torch import Tensor

from paged_infer.config import DEMO_MODEL, cache_dir
from paged_infer.models.decoder import Decoder
from paged_infer.models.quantize import make_method, quantized_weights
from paged_infer.models.quantize.calibration import BLOCK_SIZE, builtin_text, token_rows, whole_batch
from paged_infer.models.source import ModelSource, native, resolve_model
from paged_infer.models.weights import StoredWeight
from paged_infer.text.tokenizer import Tokenizer

LENGTH = 512
RESULTS = Path(__file__).parent / "results"


def scored_text() -> str:
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for i, name in enumerate(sorted(topics)) if i % 4)


def loss_of(logits: Tensor, ids: Tensor) -> float:
    """Summed negative log-likelihood of ids[1:] under logits [L, V]."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum").item()


def our_perplexity(
    source: ModelSource, backend: Backend, weights: Iterable[tuple[str, StoredWeight]], rows: Tensor
) -> float:
    config = native(source.config(), "perplexities")
    decoder = Decoder(config, backend, weights, max_position=LENGTH)
    kv = backend.make_kv_cache(
        config.num_layers, LENGTH // BLOCK_SIZE, BLOCK_SIZE, config.num_kv_heads, config.head_dim
    )
    total = 0.0
    with torch.inference_mode():
        for row in rows:
            ids, meta, _ = whole_batch(row[None], backend.device)
            total += loss_of(decoder.forward(ids, meta, kv, torch.arange(len(ids))), row)
    return math.exp(total / (rows.numel() - len(rows)))


def hf_perplexity(model: str, rows: Tensor) -> float:
    from model_folder import hf_folder
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(hf_folder(model, "float32"), dtype=torch.float32).eval()
    with torch.inference_mode():
        total = sum(loss_of(hf(row[None], use_cache=False).logits[0], row) for row in rows)
    return math.exp(total / (rows.numel() - len(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--tokens", type=int, default=12288, help="of the text that is scored")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--only", help="names of rows, comma-separated")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()

    source = resolve_model(args.model)
    tokenizer = Tokenizer.load(source.tokenizer_folder())
    rows = token_rows(tokenizer, scored_text(), args.tokens, LENGTH)
    calibration = token_rows(tokenizer, builtin_text(), args.calibration_tokens, LENGTH)
    backend = make_backend("cpu", torch.float32, "auto", threads=args.threads, cache_dir=cache_dir())

    def plain(dtype: torch.dtype) -> float:
        made = make_backend("cpu", dtype, "auto", threads=args.threads, cache_dir=cache_dir())
        return our_perplexity(source, made, source.weights(), rows)

    def rounded(name: str) -> float:
        method = make_method(name)
        weights: list[tuple[str, StoredWeight]] = []
        quantized_weights(
            source,
            backend,
            method,
            calibration if method.calibrated else calibration[:1, :16],
            lambda name, weight: weights.append((name, weight)),
        )
        return our_perplexity(source, backend, weights, rows)

    measures: dict[str, Callable[[], float]] = {
        "transformers float32": lambda: hf_perplexity(args.model, rows),
        "float32": lambda: plain(torch.float32),
        "bfloat16": lambda: plain(torch.bfloat16),
        "int8": lambda: rounded("int8"),
        "fp8": lambda: rounded("fp8"),
        "int4": lambda: rounded("int4"),
        "awq": lambda: rounded("awq"),
        "gptq": lambda: rounded("gptq"),
    }
    report: dict[str, Any] = {
        "model": args.model,
        "text": f"pydoc_data.topics of Python {platform.python_version()}",
        "tokens": rows.numel(),
        "calibration_tokens": calibration.numel(),
    }
    path = RESULTS / "quality.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    found = earlier.pop("rows", {}) if args.only else {}
    if earlier != report:
        found = {}
    for name in args.only.split(",") if args.only else measures:
        started = time.perf_counter()
        found[name] = {"perplexity": measures[name](), "seconds": time.perf_counter() - started}
        print(f"{name:22} {found[name]['perplexity']:8.3f}   {found[name]['seconds']:6.1f} s", flush=True)
        ordered = {name: found[name] for name in measures if name in found}
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(report | {"rows": ordered}, indent=2) + "\n")
        (RESULTS / "quality.md").write_text(table(ordered))


def table(found: dict[str, dict[str, float]]) -> str:
    """Perplexities in markdown, beside that of float32."""
    exact = found["float32"]["perplexity"] if "float32" in found else math.nan
    lines = ["| format | perplexity | beside float32 |", "|---|---|---|"]
    for name, row in found.items():
        lines.append(f"| {name} | {row['perplexity']:.3f} | {row['perplexity'] / exact - 1:+.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
