"""What a GPU run measures, as far as there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from paged_kernels.interface import AttentionMeta, KVCache
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from paged_infer.config import ConfigError, EngineConfig
from paged_infer.engine import gpu
from paged_infer.engine.gpu_memory import kv_cache_bytes
from paged_infer.engine.memory import plan
from paged_infer.models.decoder import Decoder
from tests.models.test_decoder import load

GIB = 1 << 30


def test_memory_left_for_the_cache() -> None:
    assert kv_cache_bytes(80 * GIB, 0.9, 2 * GIB, 20 * GIB) == 50 * GIB
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.2"):
        kv_cache_bytes(80 * GIB, 0.2, 2 * GIB, 20 * GIB)


def test_utilization_is_a_share() -> None:
    for wrong in (0, -1, 1.01, 90):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            EngineConfig(gpu_memory_utilization=wrong)


@pytest.mark.parametrize(("max_num_seqs", "rows"), [(7, 7), (1000, 300)])
def test_the_largest_step_is_as_large_as_steps_get(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, rows: int
) -> None:
    """All of the token budget, in sequences no longer than the context, and a logit row for each sequence."""
    backend = ReferenceBackend()
    decoder = load(random_model("llama"), backend)
    forward = Decoder.forward
    seen: list[tuple[int, int]] = []

    def noting(self: Decoder, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, rows: Tensor) -> Tensor:
        seen.append((len(input_ids), len(rows)))
        return forward(self, input_ids, meta, kv, rows)

    monkeypatch.setattr(Decoder, "forward", noting)
    config = EngineConfig(max_num_batched_tokens=300, max_num_seqs=max_num_seqs)
    gpu.largest_step(config, decoder, backend)
    assert seen == [(300, rows)]


def test_the_cache_gets_what_was_measured_unless_its_size_was_named(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ReferenceBackend()
    decoder = load(random_model("llama"), backend)
    monkeypatch.setattr(gpu, "measured_kv_cache_bytes", lambda *_: 50_000_000)
    sizes = {"context_len": 400, "weight_bytes": 10, "block_bytes": 1000, "free_bytes": 4 * GIB}
    for config, blocks in ((EngineConfig(), 50_000), (EngineConfig(num_kv_blocks=77), 77)):
        before = plan(config, **sizes)
        assert gpu.measured_plan(config, decoder, backend, before).num_blocks == blocks
