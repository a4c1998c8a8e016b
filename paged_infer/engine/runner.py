"""Turns scheduled batches into sampled tokens. Owns per-sequence state and the KV cache; decides nothing.

The scheduler speaks in differences (`engine.batch`), so the runner keeps for every sequence its tokens and its
block table in arrays indexed by a state row; the `Sampler` keeps there what it asked for. One step is a handful of
vectorised gathers over them, one forward pass and one sampling call; no Python runs per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from paged_kernels.interface import AttentionMeta, Backend, KVCache, SamplingRows, SharedPrefixes
from torch import Tensor

from paged_infer.engine.batch import LogprobColumns, NewSequence, ScheduledBatch, ScheduledSequence, StepOutput
from paged_infer.engine.sampler import Sampled, Sampler
from paged_infer.engine.shared_prefix import PrefixRuns, shared_prefixes
from paged_infer.engine.structured import Grammars
from paged_infer.engine.upload import Upload, host_upload
from paged_infer.models.lora import AdapterRows, Adapters


class Model(Protocol):
    """What the runner asks of a decoder."""

    def hidden(
        self,
        input_ids: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        logits_indices: Tensor,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """input_ids [T] int64, logits_indices [R] int64 into T -> hidden rows [R, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [R, H] -> logits [R, vocab rows] float32."""
        ...


Forward = Callable[[Tensor, AttentionMeta, KVCache, Tensor], Tensor]
"""`Model.hidden`, or something in its place."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a step reaches the device; by default it is there already.

    Attributes:
        upload: brings the arrays of a step there.
        forward: what runs in place of the model's own `hidden`.
        share_prefixes: tell attention which neighbours in a batch begin with the same blocks.
    """

    upload: Upload = host_upload
    forward: Forward | None = None
    share_prefixes: bool = False


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
        self.score_from = np.zeros(rows, np.int32)  # 0 = nothing to score
        self.scored_next = np.full(rows, -1, np.int32)  # -1 = nothing beyond the prompt
        self.adapter = np.full(rows, -1, np.int64)
        self.carried: dict[int, bytes] = {}
        self.num_prompt_logprobs = np.zeros(rows, np.int32)

    def add(self, new: NewSequence) -> int:
        row = self.free.pop()
        self.row_of[new.seq_id] = row
        count = len(new.token_ids)
        self.tokens[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_blocks[row] = 0
        self.score_from[row] = new.score_from or 0
        self.scored_next[row] = -1 if new.scored_next is None else new.scored_next
        self.carried.pop(row, None)
        if new.carried is not None:
            self.carried[row] = new.carried
        self.num_prompt_logprobs[row] = min(new.params.prompt_logprobs or 0, 2**31 - 1)
        return row

    def forget(self, seq_id: int) -> int:
        row = self.row_of.pop(seq_id)
        self.free.append(row)
        return row

    def set_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
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
        grammars: what the outputs of structured rows follow.
        vocab_size, undecodable_ids: ids below `vocab_size` may be sampled, but for the undecodable ones among them.
        adapters: those that rows may name.
        device: where the input tensors go.
        execution: how they get there, and how the model is run.
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
        grammars: Grammars,
        undecodable_ids: Sequence[int] = (),
        adapters: Adapters | None = None,
        device: str = "cpu",
        execution: Execution | None = None,
    ) -> None:
        self._model = model
        self._execution = execution or Execution()
        self._forward = self._execution.forward or model.hidden
        self._kv = kv
        self._adapters = adapters
        self._sampler = Sampler(
            backend, grammars, rows=max_num_seqs, vocab_size=vocab_size, undecodable_ids=undecodable_ids, device=device
        )
        self._state = _State(max_num_seqs, max_model_len, -(-max_model_len // kv.block_size) + 1)
        self._outputs: deque[StepOutput] = deque()

    def submit(self, batch: ScheduledBatch) -> None:
        self._outputs.append(self._execute(batch))

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def close(self) -> None:
        self._outputs.clear()
        del self._model, self._execution, self._forward, self._kv

    @torch.inference_mode()
    def _execute(self, batch: ScheduledBatch) -> StepOutput:
        state = self._state
        for seq_id in batch.finished_ids:
            self._sampler.forget(state.forget(seq_id))
        for new in batch.new:
            row = state.add(new)
            state.adapter[row] = self._adapters.index.get(new.params.adapter, -1) if self._adapters else -1
            self._sampler.add(row, new)
        if batch.block_copies:
            self._kv.copy_blocks(batch.block_copies)
        scheduled = batch.scheduled
        if not scheduled:
            return StepOutput(batch.step, [], [])
        copies = {destination for _, destination in batch.block_copies}
        for item in scheduled:
            if item.new_block_ids:
                row = state.row_of[item.seq_id]
                kept = min(int(state.num_blocks[row]), -(-item.num_computed_tokens // self._kv.block_size))
                state.set_blocks(row, kept - (kept > 0 and item.new_block_ids[0] in copies), item.new_block_ids)

        rows = np.array([state.row_of[item.seq_id] for item in scheduled], np.int64)
        computed = np.array([item.num_computed_tokens for item in scheduled], np.int32)
        counts = np.array([item.num_scheduled_tokens for item in scheduled], np.int32)
        samples = np.array([item.samples for item in scheduled], bool)
        for row, item in zip(rows, scheduled, strict=True):
            if item.new_token_ids:
                start = state.num_tokens[row]
                state.tokens[row, start : start + len(item.new_token_ids)] = item.new_token_ids
                state.num_tokens[row] += len(item.new_token_ids)
        drafting = [(row, item) for row, item in zip(rows, scheduled, strict=True) if item.draft_token_ids]
        for row, item in drafting:
            start = state.num_tokens[row]
            state.tokens[row, start : start + len(item.draft_token_ids)] = item.draft_token_ids
        ends = np.cumsum(counts) - 1
        scored = self._scored(rows, computed, counts)
        sampled = ends[samples]
        ahead = np.zeros(len(sampled), np.int32)  # drafts before the token to draw
        sampled_rows = rows[samples]
        if drafting:
            num_rows = np.array([1 + len(item.draft_token_ids) for item in scheduled if item.samples])
            sampled_rows = np.repeat(sampled_rows, num_rows)
            ahead = np.concatenate([np.arange(count, dtype=np.int32) for count in num_rows])
            sampled = np.repeat(sampled - num_rows + 1, num_rows) + ahead
        num_sampled = len(sampled)
        before = [positions - 1 - computed[i] + ends[i] + 1 - counts[i] for i, positions in scored]
        num_tokens = state.num_tokens[sampled_rows] + ahead
        meta, input_ids, (indices, which, *options) = self._upload(
            rows,
            computed,
            counts,
            np.concatenate([sampled, *before]).astype(np.int64),
            np.repeat(state.adapter[rows], counts),
            *self._sampler.options(sampled_rows, num_tokens),
        )
        if self._adapters is not None and (state.adapter[rows] >= 0).any():
            hidden = self._model.hidden(input_ids, meta, self._kv, indices, self._adapters.rows(which))
        else:
            hidden = self._forward(input_ids, meta, self._kv, indices)
        output = StepOutput(batch.step, [], [])
        if num_sampled:
            logits = self._model.logits(hidden[:num_sampled])
            drawn = self._sampler.sample(logits, SamplingRows(*options), sampled_rows, state.tokens, num_tokens)
            self._accept(output, [item for item in scheduled if item.samples], drawn, bool(drafting))
        start = num_sampled
        parts: list[tuple[np.integer, int, np.ndarray, Tensor]] = []
        for i, positions in scored:
            states = hidden[start : start + len(positions)]
            start += len(positions)
            carried = state.carried.pop(int(rows[i]), None)
            if carried is not None:  # what the last cached token says of the first computed one
                states = torch.cat([_hidden_row(carried, hidden), states])
                positions = np.concatenate([computed[i : i + 1], positions])
            parts.append((rows[i], scheduled[i].seq_id, positions, states))
        if parts:
            self._score(output, parts)
        return output

    def _scored(self, rows: np.ndarray, computed: np.ndarray, counts: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Which of the sequences have prompt tokens to score after this step, and the positions of these."""
        state = self._state
        scored = []
        for i in np.flatnonzero(state.score_from[rows]).tolist():
            row = rows[i]
            first = max(computed[i] + 1, state.score_from[row])
            end = state.num_prompt_tokens[row] + (state.scored_next[row] >= 0)
            last = min(computed[i] + counts[i], end - 1)
            if first <= last or int(row) in state.carried:
                scored.append((i, np.arange(first, last + 1)))
        return scored

    def _score(self, output: StepOutput, parts: list[tuple[np.integer, int, np.ndarray, Tensor]]) -> None:
        """Enter the log-probabilities of prompt tokens into the output, those of all sequences computed together.

        Args:
            parts: of each sequence its state row, its id, the positions of the tokens, and the hidden rows before them.
        """
        state = self._state
        wanted = [
            np.where(positions < state.num_prompt_tokens[row], state.tokens[row, positions], state.scored_next[row])
            for row, _, positions, _ in parts
        ]
        most = max(int(state.num_prompt_logprobs[row]) for row, _, _, _ in parts)
        hidden = torch.cat([part[-1] for part in parts]) if len(parts) > 1 else parts[0][-1]
        scored = self._sampler.logprobs.read_hidden(hidden, self._model.logits, np.concatenate(wanted), most)
        start = 0
        for row, seq_id, positions, states in parts:
            columns = scored.take(slice(start, start + len(positions)), int(state.num_prompt_logprobs[row]))
            start += len(positions)
            output.prompt_logprobs[seq_id] = int(positions[0]), columns
            output.prompt_hidden[seq_id] = {
                int(position) - 1: states[j].float().cpu().numpy().tobytes()
                for j, position in enumerate(positions)
                if position % self._kv.block_size == 0
            }

    def _upload(
        self, rows: np.ndarray, computed: np.ndarray, counts: np.ndarray, *others: np.ndarray
    ) -> tuple[AttentionMeta, Tensor, list[Tensor]]:
        """The packed batch of `counts[i]` tokens from position `computed[i]` of each state row, its token ids, and
        whatever else the step needs, all in one copy to the device.
        """
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
        arrays = [positions, slots, cu_seqlens, seq_lens, tables, state.tokens[token_rows, positions].astype(np.int64)]
        num_fixed = len(arrays) + len(others)
        arrays += others
        runs = shared_prefixes(tables, computed, block_size) if self._execution.share_prefixes else None
        if runs is not None:
            arrays += [cu_seqlens[runs.starts], runs.lengths, np.repeat(runs.lengths, np.diff(runs.starts))]
            arrays += [tables[runs.starts[:-1]]]
        tensors = self._execution.upload(arrays)
        where, slot_mapping, cu_seqlens_q, lengths, block_tables, input_ids, *given = tensors[:num_fixed]
        meta = AttentionMeta(
            where,
            slot_mapping,
            cu_seqlens_q,
            lengths,
            block_tables,
            max_seqlen_q=int(counts.max()),
            max_seq_len=max_seq_len,
            shared_prefixes=None if runs is None else _shared(runs, cu_seqlens, *tensors[num_fixed:]),
        )
        return meta, input_ids, given

    def _accept(self, output: StepOutput, scheduled: list[ScheduledSequence], drawn: Sampled, drafting: bool) -> None:
        """Enter what was drawn into the states and the output; of drafts, what they have in common with the draws."""
        state = self._state
        output.seq_ids = [item.seq_id for item in scheduled]
        rows = np.array([state.row_of[seq_id] for seq_id in output.seq_ids], np.int64)
        if not drafting and not drawn.candidates:
            state.tokens[rows, state.num_tokens[rows]] = np.maximum(drawn.token_ids, 0)
            state.num_tokens[rows] += 1
            output.token_ids = [[token] if token >= 0 else [] for token in drawn.token_ids.tolist()]
            if self._sampler.is_structured:
                for row, taken in zip(rows.tolist(), output.token_ids, strict=True):
                    self._sampler.advance(row, taken)
            output.errors = {output.seq_ids[i]: error for i, error in drawn.errors.items()}
            output.logprobs = {output.seq_ids[i]: columns for i, columns in drawn.logprobs.items()}
            return
        start = 0
        tokens = drawn.token_ids.tolist()
        for item, row in zip(scheduled, rows, strict=True):
            count = 1 + len(item.draft_token_ids)
            draws = tokens[start : start + count]
            right = 0
            while right < count - 1 and draws[right] == item.draft_token_ids[right]:
                right += 1
            if start in drawn.candidates:
                output.candidates[item.seq_id] = drawn.candidates[start]
                draws = []
            taken = [token for token in draws[: right + 1] if token >= 0]  # what failed after a draft fails again alone
            if start in drawn.errors:
                output.errors[item.seq_id] = drawn.errors[start]
            if start in drawn.logprobs:
                columns = output.logprobs[item.seq_id] = LogprobColumns()
                for i in range(start, start + len(taken)):
                    columns.extend(drawn.logprobs[i])
            state.tokens[row, state.num_tokens[row] : state.num_tokens[row] + len(taken)] = taken
            state.num_tokens[row] += len(taken)
            output.token_ids.append(taken)
            self._sampler.advance(int(row), taken)
            start += count


def _shared(
    runs: PrefixRuns, cu_seqlens: np.ndarray, cu_tokens: Tensor, lengths: Tensor, seq_starts: Tensor, tables: Tensor
) -> SharedPrefixes:
    return SharedPrefixes(
        cu_tokens,
        lengths,
        tables,
        seq_starts,
        max_tokens=int(np.diff(cu_seqlens[runs.starts]).max()),
        max_prefix_len=int(runs.lengths.max()),
    )


def _hidden_row(carried: bytes, like: Tensor) -> Tensor:
    """[1, H] in the dtype and on the device of hidden rows."""
    return torch.frombuffer(bytearray(carried), dtype=torch.float32).to(like.device, like.dtype)[None]
