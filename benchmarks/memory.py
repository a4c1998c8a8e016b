"""Memory of a model's weights: the peak while they load, and how little of them `--offload disk` keeps.

    python benchmarks/memory.py                       # a made-up 1.5B in bfloat16, written under the cache folder once
    python benchmarks/memory.py --layers 4            # smaller, to try it

Each figure is of a process of its own, less what an interpreter with the libraries loaded takes. The disk's own rate is
that of reading the same files with the page cache emptied of them first, as every pass of the offloaded model does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from paged_infer.config import cache_dir

RESULTS = Path(__file__).parent / "results"
TOKENS = 16


def made_up(layers: int) -> Path:
    """A Qwen2-1.5B in shape, with so many layers, in shards of a layer."""
    from paged_infer.models.dummy import DummySource
    from paged_infer.models.source import resolve_model

    folder = cache_dir() / "benchmarks" / f"qwen2-1.5b-{layers}"
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    where: dict[str, str] = {}
    for number, (name, read) in enumerate(DummySource(resolve_model(str(folder))).entries()):
        file = f"model-{number:05d}.safetensors"
        save_file({name: read().contiguous()}, folder / file, metadata={"format": "pt"})
        where[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def forget(folder: Path) -> None:
    """Have the kernel drop its copies of the folder's files."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def disk_seconds(folder: Path) -> float:
    """A read of all files, none of it from memory."""
    forget(folder)
    started = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 22):
                pass
    return time.perf_counter() - started


def child(kind: str, folder: Path) -> None:
    """Load, and with `offload` run two passes; prints the figures as JSON."""
    from paged_kernels.dispatch import make_backend

    from paged_infer.models.decoder import Decoder
    from paged_infer.models.packing import OffloadingPacker
    from paged_infer.models.quantize.calibration import BLOCK_SIZE, whole_batch
    from paged_infer.models.source import resolve_model
    from paged_infer.models.weights import deferred

    source = resolve_model(str(folder))
    model = source.config()
    backend = make_backend("cpu", torch.bfloat16, "auto", cache_dir=cache_dir())
    backend.make_linear(torch.zeros(32, 32))  # libraries are loaded now
    figures = {"before_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if kind == "load":
        Decoder(model, backend, source.weights(), max_position=TOKENS)
    else:
        packer = OffloadingPacker(backend)
        decoder = Decoder(model, backend, deferred(model, source.entries()), max_position=TOKENS, packer=packer)
        ids, meta, blocks = whole_batch(torch.randint(model.vocab_size, (1, TOKENS)), backend.device)
        kv = backend.make_kv_cache(model.num_layers, blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        for _ in range(2):  # what the first pass reads ahead of its end is the second's
            forget(folder)
            started = time.perf_counter()
            with torch.inference_mode():
                decoder.forward(ids, meta, kv, torch.tensor([TOKENS - 1]))
            figures["pass_seconds"] = time.perf_counter() - started
        figures["kv_bytes"] = kv.nbytes
    figures["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(figures))


def run(kind: str, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, "--folder", str(folder)], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--child", choices=["load", "offload"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder)
        return
    folder = made_up(args.layers)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    embedding = 2 * 151936 * 1536
    seconds = disk_seconds(folder) * (stored - embedding) / stored  # a pass doesn't read the embedding
    loaded, offloaded = run("load", folder), run("offload", folder)
    report = {
        "model": f"made-up Qwen2-1.5B, {args.layers} layers, bfloat16",
        "weight_bytes": stored,
        "load_peak": (loaded["peak_bytes"] - loaded["before_bytes"]) / stored,
        "offload_peak_bytes": offloaded["peak_bytes"],
        "offload_layer_bytes": (stored - embedding) / args.layers,
        "offload_kv_bytes": offloaded["kv_bytes"],
        "offload_pass_seconds": offloaded["pass_seconds"],
        "disk_seconds": seconds,
        "offload_tokens": TOKENS,
        "of_disk_rate": seconds / offloaded["pass_seconds"],
    }
    print(json.dumps(report, indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
