"""What the GPU path does on the GPU of this machine: right, how near to the machine's limits, and how fast as a whole.

    PYTHONPATH=.:kernels python benchmarks/gpu.py [--out FOLDER] [--seconds 300] [--only SECTION ...]

One file that needs torch with CUDA, triton, transformers and this repository, no network and no model files: weights
are random. Sections run in order of worth, each is written to FOLDER/gpu.json as soon as it is done, and none is
started after `--seconds`. FOLDER/gpu.md is the same as tables.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from paged_kernels import reference_quant
from paged_kernels.interface import AttentionMeta, SamplingRows, SharedPrefixes
from paged_kernels.quantized import GroupWeight
from paged_kernels.reference import ReferenceBackend
from paged_kernels.triton.backend import TritonBackend
from paged_kernels.triton.kv_cache import TritonKVCache
from paged_kernels.triton.quant import GroupLinear, ScaledLinear, grouped_linear
from torch import Tensor
from triton.testing import do_bench

from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.gpu import gpu_execution
from paged_infer.engine.pipelined_runner import PipelinedRunner
from paged_infer.engine.runner import ModelRunner
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence
from paged_infer.engine.structured import Grammars
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.models.config import ModelConfig, config_from_hf
from paged_infer.models.decoder import Decoder
from paged_infer.models.weights import parameters
from paged_infer.types import Request, SamplingParams

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
DEVICE = "cuda"
BLOCK_SIZE = 16

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of one call."""
    return float(do_bench(run, warmup=10, rep=60, return_mode="median"))


# Batches


def packed(lengths: list[tuple[int, int]]) -> tuple[AttentionMeta, int]:
    """Sequences of (cached, new) tokens in shuffled blocks, and how many blocks that takes."""
    totals = [cached + new for cached, new in lengths]
    counts = [-(-total // BLOCK_SIZE) for total in totals]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, (table, count) in enumerate(zip(tables, counts, strict=True)):
        table[:count] = order[sum(counts[:row]) : sum(counts[: row + 1])]
    positions = [torch.arange(cached, cached + new) for cached, new in lengths]
    slots = [t[p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, positions, strict=True)]
    meta = AttentionMeta(
        torch.cat(positions).int().to(DEVICE),
        torch.cat(slots).to(DEVICE),
        torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).int().to(DEVICE),
        torch.tensor(totals).int().to(DEVICE),
        tables.to(DEVICE),
        max(new for _, new in lengths),
        max(totals),
    )
    return meta, sum(counts)


def filled_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> TritonKVCache:
    """A cache of random keys and values."""
    kv = TritonKVCache(1, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, dtype, torch.device(DEVICE))
    for seed, (tensor, scale) in enumerate(((kv.k, kv.k_scale), (kv.v, kv.v_scale))):
        values = randn(*tensor.shape, seed=seed)
        if kv.quantized:
            numbers, scales = reference_quant.quantize_rows(values.flatten(0, -2), dtype)
            tensor.copy_(numbers.view(tensor.shape))
            scale.copy_(scales.view(scale.shape))
        else:
            tensor.copy_(values)
    return kv


def exact_attention(
    q: Tensor, kv: TritonKVCache, meta: AttentionMeta, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """float64, a sequence at a time."""
    k, v = (x.double() for x in kv.export(0))
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = meta.cu_seqlens_q.tolist()
    group = q.shape[1] // kv.num_kv_heads
    for s, length in enumerate(meta.seq_lens.tolist()):
        table = meta.block_tables[s, : -(-length // BLOCK_SIZE)].long()
        keys, values = (x[table].flatten(0, 1)[:length].repeat_interleave(group, dim=1) for x in (k, v))
        rows = slice(bounds[s], bounds[s + 1])
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (bounds[s + 1] - bounds[s]), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        hidden = (key > at) | ((key <= at - window) if window else False)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(at), 1)], dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :length], values)
    return out.flatten(1)


# Sections


def machine(_: Result) -> dict[str, Any]:
    """The limits everything else is a fraction of: a large copy, a large product."""
    properties = torch.cuda.get_device_properties(0)
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3
    a, b = randn(8192, 8192, dtype=BF16), randn(8192, 8192, dtype=BF16)
    peak = 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e3
    return {
        "gpu": properties.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "copy_bandwidth": bandwidth,
        "bf16_matmul": peak,
    }


def correctness(_: Result) -> list[dict[str, Any]]:
    """Every kernel in every dtype against float64."""
    rows: list[dict[str, Any]] = []

    def check(name: str, found: Tensor, exact: Tensor, tolerance: float) -> None:
        scale = max(float(exact.abs().max()), 1e-9)
        error = float((found.double() - exact.double()).abs().max()) / scale
        rows.append({"check": name, "error": error, "tolerance": tolerance, "ok": error <= tolerance})

    lengths = [(0, 300), (700, 1), (130, 20), (0, 1), (2047, 1), (250, 53), (4000, 1)]
    for dtype, tolerance in ((BF16, 1e-2), (F16, 2e-3), (F32, 1e-5)):
        for head_dim in (64, 80, 96, 128, 256):
            for num_heads, num_kv_heads in ((32, 8), (9, 3), (16, 1)):
                for kv_dtype in (dtype, INT8, FP8):
                    meta, blocks = packed(lengths)
                    kv = filled_cache(blocks, num_kv_heads, head_dim, kv_dtype)
                    backend = TritonBackend(dtype, DEVICE, kv_dtype)
                    q = randn(len(meta.positions), num_heads, head_dim, dtype=dtype, seed=3)
                    sinks = torch.linspace(-2, 4, num_heads, device=DEVICE)
                    for mask in ({}, {"window": 100}, {"softcap": 20.0}, {"sinks": sinks}):
                        if mask and (head_dim != 128 or num_heads != 32):
                            continue
                        options: dict[str, Any] = {"window": 0, "softcap": 0.0, "sinks": None} | mask
                        found = backend.attention(q, kv, 0, meta, head_dim**-0.5, **options)
                        exact = exact_attention(q, kv, meta, head_dim**-0.5, **options)
                        name = f"attention {dtype} kv {kv_dtype} d{head_dim} {num_heads}/{num_kv_heads} {list(mask)}"
                        check(name, found, exact, tolerance)
    for dtype, tolerance in ((BF16, 1e-2), (F16, 2e-3), (F32, 1e-5)):
        ours, twin = TritonBackend(dtype, DEVICE), ReferenceBackend(F32, DEVICE)
        x, residual, weight = randn(65, 4096, dtype=dtype), randn(65, 4096, seed=1), randn(4096, seed=2)
        expected = twin.add_rms_norm(x.float(), residual.clone(), weight, 1e-6)
        check(f"add_rms_norm {dtype}", ours.add_rms_norm(x, residual, weight, 1e-6), expected, tolerance)
        check(f"silu_mul {dtype}", ours.silu_mul(x), twin.silu_mul(x.float()), tolerance)
        check(f"gelu_mul {dtype}", ours.gelu_mul(x, True), twin.gelu_mul(x.float(), True), tolerance)
        meta, blocks = packed([(10, 1), (0, 40)])
        rope = torch.cat([torch.linspace(-1, 1, 64)[None].expand(64, -1).cos(), torch.ones(64, 64) * 0.3], 1).to(DEVICE)
        norm, qkv = randn(128, seed=5), randn(41, 48 * 128, dtype=dtype, seed=4)
        stores = []
        for backend, values in ((ours, qkv), (twin, qkv.float())):
            kv = backend.make_kv_cache(1, blocks, BLOCK_SIZE, 8, 128)
            stores.append((backend.rope_and_store(values, meta, rope, kv, 0, 32, norm, norm), *kv.export(0)))
        for name, found, exact in zip(("q", "k", "v"), *stores, strict=True):
            check(f"rope_and_store {name} {dtype}", found, exact, tolerance)
        w4 = group_weight(4096, 2048, 4)
        x = randn(33, 2048, dtype=dtype, seed=6)
        check(
            f"w4a16 {dtype}", GroupLinear(w4, None, ours.chip)(x), x.double() @ w4.dequantize().double().t(), tolerance
        )
        experts, offsets = randn(8, 512, 256, dtype=dtype), torch.tensor([0, 3, 3, 50, 51, 60, 90, 128, 130]).int()
        x = randn(130, 256, dtype=dtype, seed=7)
        expected = reference_quant.grouped_linear(x.double().float(), offsets, experts.float())
        check(f"grouped_linear {dtype}", grouped_linear(x, offsets.to(DEVICE), experts, ours.chip), expected, tolerance)
    for numbers in (INT8, FP8):
        for blocks in (False, True):
            weight, scales = (
                (randn(1024, 2048) * 20).to(numbers),
                torch.rand(8 if blocks else 1024, 16 if blocks else 1),
            )
            x = randn(40, 2048, seed=8)
            x8, x_scales = reference_quant.quantize_rows(x, numbers, 128 if blocks else None)
            expected = reference_quant.scaled_linear(x8, x_scales, weight, scales.to(DEVICE), F32)
            found = ScaledLinear(weight, scales.to(DEVICE), None, TritonBackend(F32, DEVICE).chip)(x)
            check(f"scaled_linear {numbers} {'blocks' if blocks else 'rows'}", found, expected, 2e-3)
    logits, rows_ = sampling_batch(64, 151936)
    agreed = (TritonBackend(F32, DEVICE).sample(logits, rows_, 151936) == ReferenceBackend(F32, DEVICE).sample(
        logits, rows_, 151936)).float().mean()  # fmt: skip
    rows.append({"check": "sample", "error": 1 - float(agreed), "tolerance": 0.02, "ok": bool(agreed >= 0.98)})
    return rows


def group_weight(outputs: int, inputs: int, bits: int, group_size: int = 128) -> GroupWeight:
    words = torch.randint(-(2**31), 2**31 - 1, (inputs * bits // 32, outputs), dtype=torch.int32, device=DEVICE)
    groups = inputs // group_size
    return GroupWeight(
        words,
        torch.rand(groups, outputs, device=DEVICE).half() * 0.02 + 0.01,
        torch.randint(0, 1 << bits, (groups, outputs), device=DEVICE).to(torch.uint8),
        bits,
        group_size,
    )


def sampling_batch(num_rows: int, vocab: int) -> tuple[Tensor, SamplingRows]:
    kinds = torch.arange(num_rows, device=DEVICE) % 4
    rows = SamplingRows(
        temperature=torch.where(kinds == 0, 0.0, 0.8).float(),
        top_k=torch.where(kinds == 1, 50, 0).int(),
        top_p=torch.where(kinds >= 2, 0.9, 1.0).float(),
        min_p=torch.where(kinds == 3, 0.02, 0.0).float(),
        noise_key=torch.arange(num_rows, device=DEVICE) * 7919,
        sample=torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
        position=torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
    )
    return randn(num_rows, vocab) * 3, rows


def kernels(result: Result) -> list[dict[str, Any]]:
    """Medians with the fraction of the measured bandwidth or matmul peak."""
    bandwidth, peak = result["machine"]["copy_bandwidth"], result["machine"]["bf16_matmul"]
    rows: list[dict[str, Any]] = []

    def add(name: str, run: Callable[[], Any], num_bytes: float = 0.0, flops: float = 0.0) -> None:
        spent = milliseconds(run)
        rows.append(
            {
                "kernel": name,
                "ms": spent,
                "of_bandwidth": num_bytes / spent * 1e3 / bandwidth if num_bytes else None,
                "of_matmul": flops / spent * 1e3 / peak if flops else None,
            }
        )

    backend = TritonBackend(BF16, DEVICE)
    for kv_dtype in (BF16, FP8, INT8):
        for batch, context in ((64, 2048), (256, 1024), (1, 32768), (8, 8192)):
            meta, blocks = packed([(context - 1, 1)] * batch)
            kv = filled_cache(blocks, 8, 128, kv_dtype)
            q = randn(batch, 32, 128, dtype=BF16)
            quantised = TritonBackend(BF16, DEVICE, kv_dtype)
            add(
                f"decode attention {batch} x {context} 32/8 d128 kv {kv_dtype}",
                lambda q=q, kv=kv, meta=meta, b=quantised: b.attention(q, kv, 0, meta, 0.088),
                num_bytes=kv.nbytes,
            )
    for tokens in (2048, 8192):
        meta, blocks = packed([(0, tokens)])
        kv, q = filled_cache(blocks, 8, 128, BF16), randn(tokens, 32, 128, dtype=BF16)
        add(
            f"prefill attention {tokens} 32/8 d128",
            lambda q=q, kv=kv, meta=meta: backend.attention(q, kv, 0, meta, 0.088),
            flops=4 * 32 * 128 * tokens * (tokens + 1) / 2,
        )
    meta, blocks = packed([(4095 + i % 7, 1) for i in range(64)])
    kv, q = filled_cache(blocks, 8, 128, BF16), randn(64, 32, 128, dtype=BF16)
    meta.block_tables[:, :192] = meta.block_tables[0, :192]
    add("decode attention 64 x 4096, 3072 shared, read by each", lambda: backend.attention(q, kv, 0, meta, 0.088))
    shared = SharedPrefixes(
        torch.tensor([0, 64]).int().to(DEVICE),
        torch.tensor([3072]).int().to(DEVICE),
        meta.block_tables[:1].contiguous(),
        torch.full((64,), 3072).int().to(DEVICE),
        64,
        3072,
    )
    cascade = replace(meta, shared_prefixes=shared)
    add("decode attention 64 x 4096, 3072 shared, read once", lambda: backend.attention(q, kv, 0, cascade, 0.088))

    x, residual, weight = randn(512, 4096, dtype=BF16), randn(512, 4096), randn(4096)
    add("add_rms_norm 512 x 4096", lambda: backend.add_rms_norm(x, residual, weight, 1e-6), 512 * 4096 * 12)
    gate_up = randn(512, 28672, dtype=BF16)
    add("silu_mul 512 x 14336", lambda: backend.silu_mul(gate_up), 512 * 28672 * 3)
    logits, sampling = sampling_batch(256, 151936)
    add("sample 256 x 151936, a quarter greedy", lambda: backend.sample(logits, sampling, 151936))
    for rows_ in (1, 16, 64, 256, 2048):
        x = randn(rows_, 4096, dtype=BF16)
        flops = 2.0 * rows_ * 4096 * 14336
        dense = randn(14336, 4096, dtype=BF16)
        add(f"bf16 cuBLAS {rows_} x 4096 x 14336", lambda x=x, w=dense: x @ w.t(), dense.nbytes, flops)
        w4 = group_weight(14336, 4096, 4)
        linear = GroupLinear(w4, None, backend.chip)
        add(f"w4a16 {rows_} x 4096 x 14336", lambda x=x, f=linear: f(x), w4.qweight.nbytes, flops)
        for numbers in (INT8, FP8):
            w8 = (randn(14336, 4096) * 20).to(numbers)
            scaled = ScaledLinear(w8, torch.ones(14336, 1, device=DEVICE), None, backend.chip)
            add(f"w8a8 {numbers} {rows_} x 4096 x 14336", lambda x=x, f=scaled: f(x), w8.nbytes, flops)
    experts = randn(64, 1536, 2048, dtype=BF16)
    for tokens in (256, 8192):
        offsets = torch.arange(65, device=DEVICE, dtype=torch.int32) * (tokens // 64)
        x = randn(tokens, 2048, dtype=BF16)
        add(
            f"grouped {tokens} tokens, 64 experts 1536 x 2048",
            lambda x=x, o=offsets: grouped_linear(x, o, experts, backend.chip),
            experts.nbytes,
            2.0 * tokens * 1536 * 2048,
        )
    return rows


def dummy_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Random weights under the names a checkpoint would have; norms are ones."""
    for parameter in parameters(config):
        if parameter.key == "lm_head" and config.tie_word_embeddings:
            continue
        for name, shape in parameter.shapes().items():
            yield name, torch.ones(shape, device=DEVICE) if len(shape) == 1 else randn(*shape, dtype=BF16) * 0.02


def serve(config: ModelConfig, jobs: list[tuple[list[int], int]], *, graphs: bool) -> dict[str, Any]:
    """All jobs (prompt ids, tokens to generate) through scheduler and runner, sampled greedily."""
    backend = TritonBackend(BF16, DEVICE)
    longest = max(len(prompt) + count for prompt, count in jobs)
    decoder = Decoder(config, backend, dummy_weights(config), max_position=longest)
    per_block = backend.kv_bytes_per_block(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    free, total = torch.cuda.mem_get_info()
    num_blocks = int(free - 0.1 * total) // per_block
    max_num_seqs = min(1024, len(jobs))
    kv = backend.make_kv_cache(config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": longest}
    execution = gpu_execution(decoder, backend, kv, max_num_batched_tokens=8192, graphs=graphs, **limits)
    runner = PipelinedRunner(
        ModelRunner(
            decoder,
            backend,
            kv,
            grammars=Grammars(None, config.vocab_size, ()),
            vocab_size=config.vocab_size,
            device=DEVICE,
            execution=execution,
            **limits,
        )
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE, False),
        WaitingQueue("input", 4096, None),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_in_flight=runner.depth,
    )

    def run(todo: list[tuple[list[int], int]], first_id: int) -> tuple[int, float]:
        for i, (prompt, count) in enumerate(todo):
            request = Request(str(i), prompt, SamplingParams(max_tokens=count, ignore_eos=True), noise_key=i)
            scheduler.add(Sequence(seq_id=first_id + i, request=request, max_output_tokens=count))
        torch.cuda.synchronize()
        began, tokens = time.monotonic(), 0
        while scheduler.has_work or scheduler.num_in_flight:
            while (batch := scheduler.schedule()) is not None:
                runner.submit(batch)
            for sequence, new in scheduler.update(runner.collect()):
                tokens += len(new)
                if sequence.num_output_tokens >= sequence.max_output_tokens:
                    scheduler.finish(sequence)
        torch.cuda.synchronize()
        return tokens, time.monotonic() - began

    run([(prompt, min(8, count)) for prompt, count in jobs[: max_num_seqs // 2]], 10**6)  # compiles
    tokens, seconds = run(jobs, 0)
    runner.close()
    return {"output_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "kv_blocks": num_blocks}


def peer(shape: dict[str, Any], jobs: list[tuple[list[int], int]]) -> dict[str, Any]:
    """transformers' continuous batching on a model of the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    config = AutoConfig.for_model(**shape)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="sdpa").eval()
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(count for _, count in jobs))
    tokens, done, began = 0, 0, time.monotonic()
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=8192)
        ) as manager,
    ):
        for prompt, count in jobs:
            manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
        while done < len(jobs):
            answer = manager.get_result(timeout=1)
            if answer is None:
                if not manager.is_running():
                    raise RuntimeError(f"the generation thread ended after {done} of {len(jobs)} rows")
            elif answer.is_finished():
                done, tokens = done + 1, tokens + len(answer.generated_tokens)
    seconds = time.monotonic() - began
    return {"output_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def workload(rows: int, prompt: tuple[int, int], output: tuple[int, int], vocab: int) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    return [
        ([rng.randrange(10, vocab - 1) for _ in range(rng.randint(*prompt))], rng.randint(*output)) for _ in range(rows)
    ]


def end_to_end(model: str, rows: int, prompt: tuple[int, int], output: tuple[int, int], peer_rows: int) -> Section:
    """Ours with graphs and without, and transformers on the first rows of the same work."""

    def section(_: Result) -> dict[str, Any]:
        shape = SHAPES[model]
        config = config_from_hf(shape)
        jobs = workload(rows, prompt, output, config.vocab_size)
        found: dict[str, Any] = {"rows": rows, "prompt": prompt, "output": output}
        for name, run in (
            ("graphs", lambda: serve(config, jobs, graphs=True)),
            ("no graphs", lambda: serve(config, jobs, graphs=False)),
            (f"transformers, {peer_rows} rows", lambda: peer(shape, jobs[:peer_rows])),
        ):
            if name == "no graphs" and rows > 256:
                continue
            try:
                found[name] = run()
            except Exception as error:  # one subject's failure is its result
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
            torch.cuda.empty_cache()
        return found

    return section


Result = dict[str, Any]
Section = Callable[[Result], Any]

SECTIONS: dict[str, Section] = {
    "machine": machine,
    "correctness": correctness,
    "kernels": kernels,
    "Qwen3-0.6B 100-1024": end_to_end("Qwen3-0.6B", 256, (100, 1024), (100, 1024), 64),
    "Llama-3.1-8B 128/128": end_to_end("Llama-3.1-8B", 2048, (128, 128), (128, 128), 128),
    "Llama-3.1-8B 1000/1000": end_to_end("Llama-3.1-8B", 512, (1000, 1000), (1000, 1000), 0),
}


def write(folder: Path, result: Result) -> None:
    """gpu.json, and gpu.md with a table for each section."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    lines: list[str] = []
    for name, found in result.items():
        lines += [f"## {name}", ""]
        rows = found if isinstance(found, list) else [found] if isinstance(found, dict) else []
        if rows:
            columns = list(rows[0])
            lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(_shown(row.get(column)) for column in columns)} |" for row in rows]
        lines.append("")
    (folder / "gpu.md").write_text("\n".join(lines))


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", action="append", choices=SECTIONS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this torch sees no GPU")
    result: Result = {}
    began = time.monotonic()
    for name, section in SECTIONS.items():
        if arguments.only and name not in arguments.only and name != "machine":
            continue
        if time.monotonic() - began > arguments.seconds:
            result[name] = {"skipped": f"not started within {arguments.seconds:g} s"}
        else:
            started = time.monotonic()
            try:
                result[name] = section(result)
            except Exception as error:  # the other sections are still worth having
                result[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
            torch.cuda.empty_cache()
        write(arguments.out, result)
    wrong = [row for row in result.get("correctness", []) if isinstance(row, dict) and not row["ok"]]
    for row in wrong:
        print("WRONG", row)
    return 1 if wrong or any(isinstance(found, dict) and "failed" in found for found in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
