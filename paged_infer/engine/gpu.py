"""What a run on a GPU has in place of the plain one: measured memory, staged uploads, recorded passes."""

from __future__ import annotations

from dataclasses import replace

import torch
from paged_kernels.interface import AttentionMeta, Backend, KVCache

from paged_infer.config import EngineConfig
from paged_infer.engine.cuda_graph import GraphedForward, padded_sizes
from paged_infer.engine.gpu_memory import measured_kv_cache_bytes
from paged_infer.engine.memory import MemoryPlan, plan
from paged_infer.engine.runner import Execution
from paged_infer.engine.upload import StagedUpload
from paged_infer.models.transformers_model import AnyModel

LARGEST_GRAPH = 512
"""Most tokens of a recorded pass: beyond, the kernels take longer than Python does."""


def measured_plan(config: EngineConfig, decoder: AnyModel, backend: Backend, before: MemoryPlan) -> MemoryPlan:
    """The memory plan once the weights are there: the cache gets what the largest step leaves.

    `before` stands where the user named the size of the cache. Raises `ConfigError` where nothing is left.
    """
    if config.num_kv_blocks is not None or config.kv_cache_memory is not None:
        return before
    free = measured_kv_cache_bytes(
        backend.device, config.gpu_memory_utilization, lambda: largest_step(config, decoder, backend)
    )
    return plan(
        replace(config, kv_cache_memory=free),
        context_len=before.max_model_len,
        weight_bytes=before.weight_bytes,
        block_bytes=before.block_bytes,
        free_bytes=free + before.weight_bytes,
    )


@torch.inference_mode()
def largest_step(config: EngineConfig, decoder: AnyModel, backend: Backend) -> None:
    """A step with the most tokens and the most logit rows there can be; it stores nothing, its values mean nothing."""
    model, device = decoder.config, backend.device
    tokens = config.token_budget(device.type)
    length = min(tokens, model.max_position_embeddings)
    num_seqs = -(-tokens // length)
    kv = backend.make_kv_cache(model.num_layers, 1, config.block_size, model.num_kv_heads, model.head_dim)
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length
    meta = AttentionMeta(
        positions=torch.zeros(num_seqs * length, dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_seqs * length,), -1, dtype=torch.int64, device=device),
        cu_seqlens_q=bounds,
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
        block_tables=torch.zeros(num_seqs, -(-length // config.block_size), dtype=torch.int32, device=device),
        max_seqlen_q=length,
        max_seq_len=length,
    )
    rows = torch.zeros(min(config.max_num_seqs, tokens), dtype=torch.int64, device=device)
    logits = decoder.forward(torch.zeros(num_seqs * length, dtype=torch.int64, device=device), meta, kv, rows)
    logits.log_softmax(dim=-1)


def gpu_execution(
    decoder: AnyModel,
    backend: Backend,
    kv: KVCache,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    graphs: bool = True,
) -> Execution:
    """How a `ModelRunner` reaches a GPU; without `graphs` every pass is launched kernel by kernel."""
    forward = GraphedForward(
        decoder.hidden,
        sizes=padded_sizes(min(LARGEST_GRAPH, max_num_batched_tokens)),
        max_num_seqs=max_num_seqs,
        max_blocks=-(-max_model_len // kv.block_size) + 1,
        max_seq_len=max_model_len,
    )
    return Execution(StagedUpload(backend.device), forward if graphs else None, backend.name == "triton")
