"""Compile every Triton kernel variant that the launchers pick, for chips that need not be here, and list what it takes.

    python benchmarks/triton_resources.py [--sample] [--target sm_90 ...] [--out DIR]

The launchers are called with tensors that have shapes and no data, so what is compiled is what would run. Exit code 1
when a variant spills registers or wants more shared memory than the chip has. Needs Triton, no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from paged_kernels.interface import AttentionMeta, PenaltyRows, SamplingRows, SharedPrefixes
from paged_kernels.quantized import GroupWeight
from paged_kernels.triton import activation, attention, gemm, kv_cache, norm, rope, sampling
from paged_kernels.triton import logits as logits_edits
from paged_kernels.triton.kv_cache import TritonKVCache
from paged_kernels.triton.launch import Launch
from paged_kernels.triton.settings import Chip
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

META = torch.device("meta")
BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
INT8, FP8, UINT8 = torch.int8, torch.float8_e4m3fn, torch.uint8
POINTERS = {
    BF16: "*bf16",
    F16: "*fp16",
    F32: "*fp32",
    I32: "*i32",
    I64: "*i64",
    INT8: "*i8",
    UINT8: "*u8",
    FP8: "*fp8e4nv",
}


@dataclass(frozen=True)
class Target:
    """A chip to compile for: Triton's name of it, and what launch settings depend on."""

    gpu: GPUTarget
    chip: Chip
    float8: bool = False  # e4m3fn in hardware


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Chip(108, 166912, register_operands=True)),
    "sm_90": Target(GPUTarget("cuda", 90, 32), Chip(132, 232448), float8=True),
    "sm_100": Target(GPUTarget("cuda", 100, 32), Chip(148, 232448, tensor_memory=True), float8=True),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Chip(304, 65536, hip=True)),
}


@dataclass(frozen=True)
class Variant:
    """A named launch; `sampled` ones are compiled by `--sample` too."""

    name: str
    launch: Launch
    sampled: bool = False


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def meta_of(num_seqs: int, max_seqlen_q: int, max_seq_len: int, shared: bool = False) -> AttentionMeta:
    tokens, blocks = num_seqs * max_seqlen_q, max_seq_len // 16
    prefixes = SharedPrefixes(
        empty(3, dtype=I32),
        empty(2, dtype=I32),
        empty(2, blocks, dtype=I32),
        empty(num_seqs, dtype=I32),
        tokens // 2,
        max_seq_len // 2,
    )
    return AttentionMeta(
        empty(tokens, dtype=I32),
        empty(tokens, dtype=I64),
        empty(num_seqs + 1, dtype=I32),
        empty(num_seqs, dtype=I32),
        empty(num_seqs, blocks, dtype=I32),
        max_seqlen_q,
        max_seq_len,
        prefixes if shared else None,
    )


def attention_variants(target: Target) -> Iterator[Variant]:
    """Head sizes and shapes of groups, decode to prefill, cache dtypes and masks."""
    chip = target.chip
    batches = {
        "decode": meta_of(64, 1, 2048),
        "split": meta_of(1, 1, 8192),
        "chunk": meta_of(8, 64, 2048),
        "prompt": meta_of(2, 4096, 4096),
        "shared": meta_of(64, 1, 2048, shared=True),
    }
    for head_dim in (64, 80, 96, 128, 256):
        for num_heads, num_kv_heads in ((32, 32), (32, 8), (24, 8), (16, 1)):
            for kind, meta in batches.items():
                for kv_dtype in (BF16, INT8, FP8):
                    if kv_dtype == FP8 and not target.float8:
                        continue
                    for mask in ("causal", "window", "softcap", "sinks"):
                        common = (head_dim, num_heads, num_kv_heads) == (128, 32, 8)
                        plain = mask == "causal" and kv_dtype == BF16
                        if not common and not (plain and (head_dim == 128 or (num_heads, num_kv_heads) == (32, 8))):
                            continue
                        if kind == "shared" and mask == "window":
                            continue
                        kv = TritonKVCache(1, 4096, 16, num_kv_heads, head_dim, kv_dtype, META)
                        q = empty(len(meta.positions), num_heads, head_dim)
                        launches = attention.attention(
                            chip,
                            q,
                            kv,
                            0,
                            meta,
                            0.1,
                            window=1024 if mask == "window" else 0,
                            softcap=50.0 if mask == "softcap" else 0.0,
                            sinks=empty(num_heads, dtype=F32) if mask == "sinks" else None,
                            out=empty(*q.shape),
                        )
                        hot = common and mask == "causal" and kind in ("decode", "prompt") and kv_dtype != FP8
                        for part, launch in zip(("own", "rest", "join"), launches, strict=False):
                            yield Variant(
                                f"attention {kind} {part} d{head_dim} {num_heads}/{num_kv_heads} {mask} {kv_dtype}",
                                launch,
                                hot,
                            )


def other_variants(target: Target) -> Iterator[Variant]:
    """Norms, rotary embedding with the store, activations, copies, sampling."""
    meta = meta_of(64, 1, 2048)
    for hidden in (576, 1024, 4096, 8192):
        weight, out = empty(hidden, dtype=F32), empty(64, hidden)
        yield Variant(f"rms_norm h{hidden}", norm.rms_norm(empty(64, hidden, dtype=F32), None, weight, 1e-6, out))
        added = norm.rms_norm(empty(64, hidden), empty(64, hidden, dtype=F32), weight, 1e-6, out)
        yield Variant(f"add_rms_norm h{hidden}", added, hidden == 4096)
    for head_dim in (64, 80, 96, 128, 256):
        for kv_dtype in (BF16, INT8, FP8) if target.float8 else (BF16, INT8):
            for normed in (False, True):
                kv = TritonKVCache(1, 4096, 16, 8, head_dim, kv_dtype, META)
                weight = empty(head_dim, dtype=F32) if normed else None
                launch = rope.rope_and_store(
                    empty(64, 48 * head_dim),
                    meta,
                    empty(4096, head_dim, dtype=F32),
                    kv,
                    0,
                    32,
                    weight,
                    weight,
                    1e-6,
                    empty(64, 32, head_dim),
                )
                name = f"rope_and_store d{head_dim} {kv_dtype}{' qk-norm' if normed else ''}"
                yield Variant(name, launch, head_dim == 128 and normed and kv_dtype == BF16)
    kinds: tuple[activation.Activation, ...] = ("silu", "gelu", "gelu_tanh")
    for kind in kinds:
        for size in (1536, 14336):
            yield Variant(f"{kind}_mul i{size}", activation.gated(empty(64, 2 * size), empty(64, size), kind))
    yield Variant("copy_blocks", kv_cache.copy_blocks(empty(32, 4096, 16, 8, 128), empty(4, 2, dtype=I64)))
    for vocab in (49152, 151936):
        rows = SamplingRows(
            temperature=empty(64, dtype=F32),
            top_k=empty(64, dtype=I32),
            top_p=empty(64, dtype=F32),
            min_p=empty(64, dtype=F32),
            noise_key=empty(64, dtype=I64),
            sample=empty(64, dtype=I32),
            position=empty(64, dtype=I32),
        )
        logits = empty(64, vocab, dtype=F32)
        launches = sampling.sample(logits, rows, vocab, empty(64, dtype=I64))
        for part, launch in zip(("cut", "draw", "choose"), launches, strict=True):
            yield Variant(f"sample {part} v{vocab}", launch, vocab == 49152)
        ids, sums, ranks = empty(64, dtype=I64), empty(64, dtype=F32), empty(64, dtype=I32)
        yield Variant(f"summarize v{vocab}", logits_edits.summarize(logits, ids, vocab, sums, ranks))
        yield Variant(f"mask v{vocab}", logits_edits.mask(logits, ids, empty(64, vocab // 32, dtype=I32)))
        history = PenaltyRows(ids, empty(64, 1000, dtype=I32), ranks, ranks, sums, sums, sums)
        for part, launch in zip(("count", "apply"), logits_edits.penalize(logits, history), strict=True):
            yield Variant(f"penalize {part} v{vocab}", launch)


def gemm_variants(target: Target) -> Iterator[Variant]:
    """Low-bit and expert products from one row to many, on the shapes of an 8B model."""
    chip = target.chip
    for rows in (1, 16, 64, 512):
        for outputs, inputs in ((6144, 4096), (4096, 14336)):
            x, out, bias = empty(rows, inputs), empty(rows, outputs), empty(outputs)
            shape = f"m{rows} n{outputs} k{inputs}"
            for bits in (4, 8):
                for group_size in (32, 128):
                    weight = GroupWeight(
                        empty(inputs * bits // 32, outputs, dtype=I32),
                        empty(inputs // group_size, outputs, dtype=F16),
                        empty(inputs // group_size, outputs, dtype=UINT8),
                        bits,
                        group_size,
                    )
                    launches = gemm.group_gemm(chip, x, weight, bias, out)
                    sampled = (bits, group_size, outputs) == (4, 128, 4096) and rows in (16, 512)
                    for part, launch in zip(("", " add"), launches, strict=False):
                        yield Variant(f"w{bits}a16 group {group_size} {shape}{part}", launch, sampled)
            for dtype in (INT8, FP8) if target.float8 else (INT8,):
                for blocks in (False, True):
                    scales = empty(outputs // 128, inputs // 128, dtype=F32) if blocks else empty(outputs, 1, dtype=F32)
                    x_scales = empty(rows, inputs // 128 if blocks else 1, dtype=F32)
                    numbers = empty(rows, inputs, dtype=dtype)
                    weight8 = empty(outputs, inputs, dtype=dtype)
                    launch = gemm.scaled_gemm(chip, numbers, x_scales, weight8, scales, None, out)[0]
                    sampled = outputs == 4096 and not blocks and rows in (16, 512)
                    yield Variant(f"w8a8 {dtype}{' blocks' if blocks else ''} {shape}", launch, sampled)
                    yield Variant(
                        f"quantize_rows {dtype}{' blocks' if blocks else ''} k{inputs}",
                        gemm.quantize_rows(x, numbers, x_scales, 127.0),
                    )
    for rows in (64, 4096):
        launch = gemm.grouped_gemm(
            chip, empty(rows, 2048), empty(129, dtype=I32), empty(128, 1536, 2048), empty(rows, 1536)
        )
        yield Variant(f"grouped m{rows} e128 n1536 k2048", launch, rows == 4096)
    for outputs, inputs in ((16, 4096), (6144, 16)):
        launch = gemm.grouped_gemm(
            chip, empty(64, inputs), empty(9, dtype=I32), empty(8, outputs, inputs), empty(64, outputs)
        )
        yield Variant(f"adapters m64 g8 n{outputs} k{inputs}", launch)


def deterministic_variants(target: Target) -> Iterator[Variant]:
    """What other tiles and products `deterministic` takes."""
    same = replace(target, chip=replace(target.chip, same_tiles=True))
    for variant in attention_variants(same):
        yield replace(variant, name=f"{variant.name} same tiles", sampled=False)
    for outputs, inputs in ((6144, 4096), (4096, 14336)):
        for dtype in (BF16, F32):
            launch = gemm.grouped_gemm(
                same.chip,
                empty(64, inputs),
                empty(2, dtype=I32),
                empty(1, outputs, inputs),
                empty(64, outputs, dtype=dtype),
            )
            yield Variant(f"dense {dtype} n{outputs} k{inputs} same tiles", launch)


def compiled(launch: Launch, gpu: GPUTarget) -> Any:
    """The kernel as the launch would compile it: pointers and strides that 16 divides are known to be so."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            if value == 1 and not parameter.do_not_specialize:
                signature[name], constants[name] = "constexpr", 1
                continue
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            raise TypeError(f"{launch.kernel.__name__}: argument {name} is {value!r}")
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=gpu, options=options)


def resources(kernel: Any, gpu: GPUTarget) -> dict[str, int]:
    """Registers a thread, spilled bytes a thread (AMD: vector registers), bytes of shared memory a program."""
    shared = int(kernel.metadata.shared)
    if gpu.backend == "hip":
        text = kernel.asm["amdgcn"]
        found = {key: int(value) for key, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
        return {"registers": found["vgpr_count"], "spills": found["vgpr_spill_count"], "shared": shared}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": used["REG"], "spills": used["STACK"] + used["LOCAL"], "shared": shared}


def identity(launch: Launch) -> str:
    """Launches with equal identities compile to the same code."""
    types = {
        name: str(value.dtype) if isinstance(value, Tensor) else (type(value).__name__, value == 1, value % 16 == 0)
        for name, value in launch.arguments.items()
    }
    return repr((launch.kernel.__name__, types, sorted(launch.constants.items()), launch.num_warps, launch.num_stages))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="a few variants of the hot kernels")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--out", type=Path, help="folder for triton_resources.json and .md")
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for target_name in arguments.target or TARGETS:
        target = TARGETS[target_name]
        seen: set[str] = set()
        kinds = attention_variants, other_variants, gemm_variants, deterministic_variants
        for variant in itertools.chain.from_iterable(kind(target) for kind in kinds):
            key = identity(variant.launch)
            if key in seen or (arguments.sample and not variant.sampled):
                continue
            seen.add(key)
            began = time.monotonic()
            wrong: list[str] = []
            used = {"registers": 0, "spills": 0, "shared": 0}
            try:
                used = resources(compiled(variant.launch, target.gpu), target.gpu)
            except Exception as error:  # whatever the compiler raises is this variant's result
                wrong.append(f"does not compile: {str(error).strip().splitlines()[-1]}")
            if used["spills"]:
                wrong.append("spills")
            if used["shared"] > target.chip.shared_bytes:
                wrong.append("shared memory")
            rows.append(
                {
                    "target": target_name,
                    "variant": variant.name.replace("torch.", ""),
                    "warps": variant.launch.num_warps,
                    "stages": variant.launch.num_stages,
                    **used,
                    "wrong": ", ".join(wrong),
                }
            )
            print(*rows[-1].values(), f"{time.monotonic() - began:.1f}s", flush=True)
    wrong_rows = [row for row in rows if row["wrong"]]
    print(f"triton {triton.__version__}: {len(rows)} variants compiled, {len(wrong_rows)} do not fit")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        document = {"triton": triton.__version__, "sample": arguments.sample, "variants": rows}
        (arguments.out / "triton_resources.json").write_text(json.dumps(document, indent=1) + "\n")
        header = list(rows[0])
        which = "A few variants of the hot kernels" if arguments.sample else "Every variant"
        lines = [f"{which}, Triton {triton.__version__}. Spills and shared memory in bytes, registers a thread.", ""]
        lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in rows]
        (arguments.out / "triton_resources.md").write_text("\n".join(lines) + "\n")
    return 1 if wrong_rows else 0


if __name__ == "__main__":
    sys.exit(main())
