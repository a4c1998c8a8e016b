"""A Hugging Face folder of the model, for the engines that read nothing else.

    python benchmarks/model_folder.py smollm2-135m bfloat16      # prints the folder

A `.gguf` file is dequantised once by transformers and kept beside the engine's other converted files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from paged_infer.config import cache_dir
from paged_infer.models.source import GGUFSource, resolve_model


def hf_folder(model: str, dtype: str = "bfloat16") -> Path:
    """The folder itself, or the exported copy of a GGUF. Made by rename, so it is whole or absent."""
    source = resolve_model(model)
    if not isinstance(source, GGUFSource):
        return source.tokenizer_folder()
    gguf = source.path
    key = hashlib.sha256(f"{gguf}:{gguf.stat().st_size}:{dtype}".encode()).hexdigest()[:16]
    folder = cache_dir() / "benchmarks" / f"{gguf.stem}-{key}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            _export(gguf, partial, dtype)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _export(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    print(hf_folder(*sys.argv[1:]))
