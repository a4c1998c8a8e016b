"""Turns scheduled batches into sampled tokens. Owns per-sequence state and the KV cache; decides nothing.

The scheduler speaks in differences (`engine.batch`), so the runner keeps for every sequence its tokens, its block table
and its sampling options in arrays indexed by a state row. One step is a handful of vectorised gathers over them, one
forward pass and one sampling call; no Python runs per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from paged_kernels.interface import AttentionMeta, Backend, KVCache, SamplingRows
from torch import Tensor

from paged_infer.engine.batch import NewSequence, ScheduledBatch, StepOutput


class Model(Protocol):
    """What the runner asks of a decoder."""

    def forward(self, input_ids: Tensor, meta: AttentionMeta, kv: KVCache, logits_indices: Tensor) -> Tensor:
        """input_ids [T] int64, logits_indices [R] int64 into T -> logits [R, vocab rows] float32."""
        ...


class Runner(Protocol):
    """Executes batches strictly in order, at most `depth` submitted and not yet collected."""

    depth: int

    def submit(self, batch: ScheduledBatch) -> None: ...

    def collect(self) -> StepOutput:
        """The output of the oldest submitted batch."""
        ...

    def close(self) -> None: ...


class _State:
    """Per-sequence arrays; a sequence lives in one row from `NewSequence` until it is named finished."""

    def __init__(self, rows: int, max_model_len: int, max_blocks: int) -> None:
        self.row_of: dict[int, int] = {}
        self.free = list(range(rows - 1, -1, -1))
        self.tokens = np.zeros((rows, max_model_len + 1), np.int32)
        self.block_tables = np.zeros((rows, max_blocks), np.int32)
        self.num_tokens = np.zeros(rows, np.int32)
        self.num_prompt_tokens = np.zeros(rows, np.int32)
        self.num_blocks = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.noise_key = np.zeros(rows, np.int64)
        self.sample = np.zeros(rows, np.int32)
        self.min_tokens = np.zeros(rows, np.int32)
        self.banned: dict[int, Tensor] = {}

    def add(self, new: NewSequence) -> None:
        row = self.free.pop()
        self.row_of[new.seq_id] = row
        count = len(new.token_ids)
        self.tokens[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_blocks[row] = 0
        params = new.params
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k, 2**31 - 1)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.noise_key[row] = np.uint64(new.noise_key).astype(np.int64)
        self.sample[row] = new.sample
        self.min_tokens[row] = params.min_tokens
        if new.banned_until_min_tokens and params.min_tokens:
            self.banned[row] = torch.tensor(new.banned_until_min_tokens, dtype=torch.int64)

    def forget(self, seq_id: int) -> None:
        row = self.row_of.pop(seq_id)
        self.banned.pop(row, None)
        self.free.append(row)

    def append_blocks(self, row: int, block_ids: list[int], replaces_last: bool) -> None:
        start = self.num_blocks[row] - replaces_last
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)


class ModelRunner:
    """Runs a decoder in this process, one batch at a time.

    Args:
        model: the decoder.
        backend: its kernels; samples from the logits.
        kv: the paged cache the block ids refer to.
        max_num_seqs: most sequences the scheduler runs at once.
        max_model_len: most tokens of a sequence.
        sampled_ids: ids that may be sampled, as a count (ids below it) and the undecodable holes among them.
        device: where the input tensors go.
    """

    depth = 1

    def __init__(
        self,
        model: Model,
        backend: Backend,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        undecodable_ids: Sequence[int] = (),
        device: str = "cpu",
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv = kv
        self._vocab_size = vocab_size
        self._holes = torch.tensor(list(undecodable_ids), dtype=torch.int64, device=device)
        self._device = device
        self._state = _State(max_num_seqs, max_model_len, -(-max_model_len // kv.block_size) + 1)
        self._outputs: deque[StepOutput] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        self._outputs.append(self._execute(batch))

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def close(self) -> None:
        self._outputs.clear()
        del self._model, self._kv

    @torch.inference_mode()
    def _execute(self, batch: ScheduledBatch) -> StepOutput:
        state = self._state
        for seq_id in batch.finished_ids:
            state.forget(seq_id)
        for new in batch.new:
            state.add(new)
        if batch.block_copies:
            self._kv.copy_blocks(batch.block_copies)
        scheduled = batch.scheduled
        if not scheduled:
            return StepOutput(batch.step, [], [])
        copies = {destination for _, destination in batch.block_copies}
        for item in scheduled:
            if item.new_block_ids:
                row = state.row_of[item.seq_id]
                replaces_last = bool(state.num_blocks[row]) and item.new_block_ids[0] in copies
                state.append_blocks(row, item.new_block_ids, replaces_last)

        rows = np.array([state.row_of[item.seq_id] for item in scheduled], np.int64)
        computed = np.array([item.num_computed_tokens for item in scheduled], np.int32)
        counts = np.array([item.num_scheduled_tokens for item in scheduled], np.int32)
        samples = np.array([item.samples for item in scheduled], bool)
        meta, input_ids, ends = self._pack(rows, computed, counts)
        sampled_rows = rows[samples]
        logits_indices = self._tensor(ends[samples].astype(np.int64))
        logits = self._model.forward(input_ids, meta, self._kv, logits_indices)
        if not len(sampled_rows):
            return StepOutput(batch.step, [], [])
        return self._sample(batch, logits, sampled_rows, samples)

    def _pack(
        self, rows: np.ndarray, computed: np.ndarray, counts: np.ndarray
    ) -> tuple[AttentionMeta, Tensor, np.ndarray]:
        """The packed batch of `counts[i]` tokens from position `computed[i]` of each state row; last-token indices."""
        state = self._state
        block_size = self._kv.block_size
        cu_seqlens = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        sequence = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) - cu_seqlens[sequence] + computed[sequence]
        token_rows = rows[sequence]
        blocks = state.block_tables[token_rows, positions // block_size]
        slots = blocks.astype(np.int64) * block_size + positions % block_size
        seq_lens = computed + counts
        max_seq_len = int(seq_lens.max())
        tables = state.block_tables[rows, : -(-max_seq_len // block_size)]
        meta = AttentionMeta(
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            cu_seqlens_q=self._tensor(cu_seqlens),
            seq_lens=self._tensor(seq_lens),
            block_tables=self._tensor(tables),
            max_seqlen_q=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        input_ids = self._tensor(state.tokens[token_rows, positions].astype(np.int64))
        return meta, input_ids, cu_seqlens[1:] - 1

    def _sample(self, batch: ScheduledBatch, logits: Tensor, rows: np.ndarray, samples: np.ndarray) -> StepOutput:
        state = self._state
        position = state.num_tokens[rows] - state.num_prompt_tokens[rows]
        if self._holes.numel():
            logits[:, self._holes] = -torch.inf
        if state.banned:
            for i in np.flatnonzero(position < state.min_tokens[rows]):
                banned = state.banned.get(int(rows[i]))
                if banned is not None:
                    logits[int(i), banned.to(logits.device)] = -torch.inf
        chosen = self._backend.sample(
            logits,
            SamplingRows(
                temperature=self._tensor(state.temperature[rows]),
                top_k=self._tensor(state.top_k[rows]),
                top_p=self._tensor(state.top_p[rows]),
                min_p=self._tensor(state.min_p[rows]),
                noise_key=self._tensor(state.noise_key[rows]),
                sample=self._tensor(state.sample[rows]),
                position=self._tensor(position),
            ),
            self._vocab_size,
        )
        token_ids = chosen.to("cpu").numpy()
        state.tokens[rows, state.num_tokens[rows]] = token_ids
        state.num_tokens[rows] += 1
        seq_ids = [item.seq_id for item in batch.scheduled if item.samples]
        errors = {
            seq_ids[i]: f"non-finite logits at output position {int(position[i])}"
            for i in np.flatnonzero(token_ids < 0)
        }
        return StepOutput(batch.step, seq_ids, token_ids.tolist(), errors)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device == "cpu" else tensor.to(self._device, non_blocking=True)
