"""The GPU benchmark's own parts, on CPU tensors under the interpreter: it may have a GPU for minutes only."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paged_kernels.triton.backend import TritonBackend

from paged_infer.models.config import config_from_hf

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    specification = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_benchmark", module)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1_000_000, 2_000_000))
    return module


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 3, 4)}])
def test_exact_attention_is_what_the_kernel_computes(gpu: ModuleType, options: dict[str, object]) -> None:
    meta, blocks = gpu.packed([(0, 9), (70, 1), (20, 5)])
    kv = gpu.filled_cache(blocks, 2, 64, torch.int8)
    q = gpu.randn(len(meta.positions), 4, 64)
    filled: dict[str, object] = {"window": 0, "softcap": 0.0, "sinks": None} | options
    exact = gpu.exact_attention(q, kv, meta, 0.125, **filled)
    found = TritonBackend(torch.float32, "cpu", torch.int8).attention(q, kv, 0, meta, 0.125, **filled)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


def test_every_job_is_served_whole(gpu: ModuleType) -> None:
    tiny = gpu.SHAPES["Qwen3-0.6B"] | {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    jobs = gpu.workload(3, (2, 5), (2, 3), 320)
    found = gpu.serve(config_from_hf(tiny), jobs, graphs=False)
    assert found["output_tokens"] == sum(count for _, count in jobs)


def test_results_are_written_as_json_and_as_tables(gpu: ModuleType, tmp_path: Path) -> None:
    result = {
        "machine": {"gpu": "none", "bf16_matmul": 1.5e15},
        "kernels": [{"kernel": "a", "ms": 0.25, "of_matmul": None}],
    }
    gpu.write(tmp_path, result)
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
    text = (tmp_path / "gpu.md").read_text()
    assert "| none | 1.5e+15 |" in text
    assert "| a | 0.25 |  |" in text
