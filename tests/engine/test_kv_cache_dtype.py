"""Runs whose keys and values are kept in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paged_infer.config import ConfigError
from paged_infer.llm import LLM
from tests.engine.test_engine import greedy, prompts_of
from tests.fixtures.checkpoints import hf_greedy


@pytest.mark.parametrize(("kv_cache_dtype", "margin", "count"), [("int8", 0.05, 12), ("fp8", 0.1, 6)])
def test_eight_bits_choose_as_full_precision_does_where_it_is_sure(
    random_model: Callable[..., Path], kv_cache_dtype: str, margin: float, count: int
) -> None:
    folder = random_model("llama")
    prompts = prompts_of([1, 17, 40, 100])
    expected, margins = hf_greedy(folder, prompts, 12)
    with LLM(
        str(folder), kv_cache_dtype=kv_cache_dtype, attention_backend="reference", dtype="float32", num_kv_blocks=64
    ) as llm:
        outputs = [answer.token_ids for answer in llm.generate(prompts, greedy(12))]
        bytes_per_block = llm.engine.memory.block_bytes
    with LLM(str(folder), attention_backend="reference", dtype="float32", num_kv_blocks=64) as llm:
        assert bytes_per_block < 0.4 * llm.engine.memory.block_bytes
    compared = 0
    for ours, theirs, gaps in zip(outputs, expected, margins, strict=True):
        sure = next((i for i, gap in enumerate(gaps) if gap < margin), len(gaps))
        assert ours[:sure] == theirs[:sure]
        compared += sure
    assert compared >= count


def test_cpu_kernels_do_not_take_it(random_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='cpu': no CPU kernels for a cache in torch.int8"):
        LLM(str(random_model("llama")), kv_cache_dtype="int8", attention_backend="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM(str(random_model("llama")), kv_cache_dtype="int4")
