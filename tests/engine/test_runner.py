"""What the runner hands to the model, and what it keeps between batches."""

from __future__ import annotations

from typing import cast

import torch
from paged_kernels.interface import AttentionMeta, KVCache
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

from paged_infer.engine.batch import NewSequence, ScheduledBatch, ScheduledSequence
from paged_infer.engine.runner import ModelRunner
from paged_infer.engine.structured import Grammars
from paged_infer.types import SamplingParams


class _NoGrammars:
    num_words = 1


NO_GRAMMARS = cast(Grammars, _NoGrammars())


class RecordingModel:
    """Answers every row with the token that follows its last input token."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, AttentionMeta]] = []

    def hidden(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        self.calls.append((input_ids, meta))
        return input_ids[logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((hidden + 1) % 32, 32).float()


def make_runner() -> tuple[ModelRunner, RecordingModel]:
    model, backend = RecordingModel(), ReferenceBackend(torch.float32)
    kv = backend.make_kv_cache(1, 16, 4, 1, 4)
    return ModelRunner(model, backend, kv, grammars=NO_GRAMMARS, max_num_seqs=4, max_model_len=40, vocab_size=32), model


def new(seq_id: int, token_ids: list[int]) -> NewSequence:
    return NewSequence(seq_id, token_ids, len(token_ids), SamplingParams(), noise_key=0)


def test_packing_of_a_decode_beside_a_chunk() -> None:
    runner, model = make_runner()
    runner.submit(ScheduledBatch(0, new=[new(7, [1, 2, 3])], scheduled=[ScheduledSequence(7, 0, 3, [5], True)]))
    assert runner.collect().token_ids == [[4]]
    prompt = list(range(10, 20))
    runner.submit(
        ScheduledBatch(
            1,
            new=[new(8, prompt)],
            scheduled=[ScheduledSequence(7, 3, 1, [], True), ScheduledSequence(8, 0, 6, [2, 9], False)],
        )
    )
    output = runner.collect()
    assert (output.seq_ids, output.token_ids) == ([7], [[5]])
    ids, meta = model.calls[-1]
    assert ids.tolist() == [4, 10, 11, 12, 13, 14, 15]
    assert meta.positions.tolist() == [3, 0, 1, 2, 3, 4, 5]
    assert meta.slot_mapping.tolist() == [5 * 4 + 3, 8, 9, 10, 11, 36, 37]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 7]
    assert meta.seq_lens.tolist() == [4, 6]
    assert meta.block_tables[0, 0] == 5
    assert meta.block_tables[1].tolist() == [2, 9]


def test_a_copied_block_takes_the_place_of_the_shared_one() -> None:
    runner, model = make_runner()
    runner.submit(
        ScheduledBatch(0, new=[new(0, [1, 2, 3, 4, 5])], scheduled=[ScheduledSequence(0, 0, 5, [3, 4], True)])
    )
    runner.collect()
    runner.submit(ScheduledBatch(1, scheduled=[ScheduledSequence(0, 5, 1, [8], True)], block_copies=[(4, 8)]))
    runner.collect()
    _, meta = model.calls[-1]
    assert meta.block_tables[0].tolist() == [3, 8]
    assert meta.slot_mapping.tolist() == [8 * 4 + 1]


def test_a_forgotten_sequence_comes_back_whole() -> None:
    runner, model = make_runner()
    runner.submit(ScheduledBatch(0, new=[new(0, [1, 2])], scheduled=[ScheduledSequence(0, 0, 2, [3], True)]))
    runner.collect()
    back = NewSequence(0, [1, 2, 3], 2, SamplingParams(), noise_key=0)
    runner.submit(ScheduledBatch(1, new=[back], scheduled=[ScheduledSequence(0, 0, 3, [6], True)], finished_ids=[0]))
    assert runner.collect().token_ids == [[4]]
    ids, meta = model.calls[-1]
    assert ids.tolist() == [1, 2, 3]
    assert meta.block_tables[0, 0] == 6
