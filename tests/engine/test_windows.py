"""Blocks that a window has passed are given back, and nothing that a query sees is lost with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_infer.engine.block_manager import BlockManager
from paged_infer.llm import LLM
from tests.engine.test_block_manager import compute, sequence
from tests.engine.test_engine import assert_greedy_equal, greedy, prompts_of


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
def test_what_a_sequence_holds(window: int, caching: bool) -> None:
    """The query at position t looks at [t - window + 1, t]: the blocks of these, and no others, are in use."""
    blocks = BlockManager(40, 4, prefix_caching=caching, window=window)
    seq = sequence([5] * 3)
    for step in range(60):
        position = seq.num_computed_tokens
        blocks.release_passed(seq)
        assert compute(blocks, seq) is not None
        blocks.check_invariants([seq])
        first = max(0, position - window + 1) // 4
        assert 40 - blocks.num_free_blocks == (seq.num_computed_tokens + 3) // 4 - first
        seq.token_ids.append(step)
    blocks.free(seq)
    blocks.check_invariants([])
    assert blocks.num_free_blocks == 40


def test_forks_hold_only_what_their_parent_holds() -> None:
    blocks = BlockManager(40, 4, window=5)
    seq = sequence(list(range(30)))
    compute(blocks, seq)
    blocks.release_passed(seq)
    child = sequence(list(range(30)))
    blocks.fork(seq, child)
    blocks.check_invariants([seq, child])
    assert blocks.num_shared_tokens(child) == 0  # its beginning would have to be computed again
    blocks.free(seq)
    blocks.check_invariants([child])
    child.token_ids.append(1)
    blocks.release_passed(child)
    compute(blocks, child)
    blocks.free(child)
    blocks.check_invariants([])


def test_passed_blocks_are_still_found() -> None:
    blocks = BlockManager(40, 4, window=5)
    seq = sequence(list(range(30)))
    compute(blocks, seq)
    blocks.release_passed(seq)
    again = sequence(list(range(30)))
    assert blocks.match_prefix(again) == 28
    blocks.check_invariants([seq, again])


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 64},
        {"num_kv_blocks": 26, "max_num_batched_tokens": 24},
        {"num_kv_blocks": 26, "prefix_caching": False},
        {"num_kv_blocks": 40, "speculative": "ngram"},
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_equals_hugging_face(random_model: Callable[..., Path], backend: str, options: dict[str, Any]) -> None:
    """Prompts that begin alike, in pools in which they take each other's blocks."""
    folder = random_model("mistral", sliding_window=20)
    common = prompts_of([40])[0]
    prompts = [common + rest for rest in prompts_of([1, 20, 33, 60, 7, 90], seed=1)] + prompts_of([3, 50], seed=2)
    block_size = 16 if backend == "cpu" else 4
    pool = {"num_kv_blocks": options["num_kv_blocks"] * (16 // block_size)}
    with LLM(str(folder), attention_backend=backend, dtype="float32", block_size=block_size, **(options | pool)) as llm:
        outputs = [c.token_ids for c in llm.generate(prompts, greedy(40))]
    assert_greedy_equal(folder, prompts, outputs, 40)
