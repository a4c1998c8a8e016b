"""Recorded forward passes without a GPU: a recording here is the pass itself, run again on the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_kernels.interface import AttentionMeta, KVCache
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from paged_infer.engine.cuda_graph import GraphedForward, padded_sizes
from tests.models.stepper import Stepper
from tests.models.test_decoder import load, tokens


def record_by_repeating(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Like a graph: a replay reads and writes the memory that the recording did."""
    result = run()

    def replay() -> None:
        result.copy_(run())

    return replay, result


class Counting:
    """A forward pass that notes the batches it is given."""

    def __init__(self, forward: Callable[[Tensor, AttentionMeta, KVCache, Tensor], Tensor]) -> None:
        self.forward = forward
        self.sizes: list[int] = []

    def __call__(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        self.sizes.append(len(input_ids))
        return self.forward(input_ids, meta, kv, logits_indices)


STEPS = [
    [(0, 5), (1, 1), (2, 2)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 3)],
    [(2, 1), (0, 1)],
    [(0, 1), (1, 9)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1)],
]


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Path:
    return random_model("llama")


def test_padded_batches_give_what_plain_ones_give(model: Path) -> None:
    """Decodes and mixes of changing sizes; what an earlier batch left in the buffers must not show."""
    backend = ReferenceBackend()
    decoder = load(model, backend)
    sequences = [tokens(sum(count for work in STEPS for s, count in work if s == i), seed=i) for i in range(3)]
    plain, padded = Stepper(decoder, backend, sequences), Stepper(decoder, backend, sequences)
    forward = Counting(decoder.forward)
    graphed = GraphedForward(
        forward, sizes=[2, 4, 8], max_num_seqs=4, max_blocks=4, max_seq_len=40, record=record_by_repeating
    )
    for work in STEPS:
        expected = plain.step(work)
        input_ids, meta = padded.batch(work)
        ends = torch.tensor(meta.cu_seqlens_q[1:].tolist()) - 1
        with torch.inference_mode():
            found = graphed(input_ids, meta, padded.kv, ends).clone()
        for s, count in work:
            padded._done[s] += count
        torch.testing.assert_close(found, expected[ends], atol=1e-5, rtol=1e-5)
    for layer in range(decoder.config.num_layers):
        for ours, theirs in zip(padded.kv.export(layer), plain.kv.export(layer), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert set(forward.sizes) == {2, 4, 8, 10}  # ten tokens are too many, and run as they come


def test_sizes_rise_to_the_largest() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert padded_sizes(256)[-3:] == [224, 240, 256]
    for largest in (1, 7, 64, 65, 300, 512):
        sizes = padded_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
