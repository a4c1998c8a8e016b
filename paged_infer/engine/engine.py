"""The engine: requests in, completions out, one step at a time.

Owns the loop schedule → execute → update and the decision when a sequence ends. Knows neither files nor tensors: the
scheduler plans, the runner computes, `text` turns tokens into strings. A request that cannot be answered comes out as a
failed completion; nothing a single request asks can end the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paged_infer.engine.batch import LogprobColumns
from paged_infer.engine.beam import BeamSearch, Candidates, Hypothesis
from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.runner import Runner
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence, Status
from paged_infer.engine.speculative import SpeculationStats
from paged_infer.engine.stats import EngineLoad, EngineStats
from paged_infer.engine.structured import Grammars
from paged_infer.text.detokenizer import output_text
from paged_infer.text.stop import StopChecker
from paged_infer.text.tokenizer import Tokenizer
from paged_infer.types import (
    UNTIL_CONTEXT,
    Completion,
    FinishReason,
    Logprobs,
    Request,
    RowError,
    SamplingParams,
    token_ids,
)


@dataclass(slots=True)
class _Row:
    """A request on its way.

    Attributes:
        sequences: by sample; of a beam search, the running beams, the best first.
        done: completions of the samples that have ended.
        search: where there are beams; candidates: what they have brought since the last step of the search.
    """

    sequences: list[Sequence]
    done: dict[int, Completion] = field(default_factory=dict)
    search: BeamSearch | None = None
    candidates: dict[int, Candidates] = field(default_factory=dict)


class Engine:
    """Continuous batching over a runner.

    Args:
        tokenizer: turns ids into text and says which ids end a sequence.
        scheduler, runner: the planner and the executor; the scheduler keeps as many batches in flight as it may.
        memory: sizes; `memory.max_model_len` limits every sequence.
        eos_token_ids: ids that end a sequence, the union of what model, generation settings and tokenizer name.
        grammars: what the outputs of structured rows follow.
        adapters: name → digest of the LoRA adapters that rows may name.
        vocab_size: prompts may use ids below it.
        sampling_defaults: options the model's own generation settings ask for, where a row says nothing.
        description: what was loaded and how, as plain data for the record: `model` and `engine`, each a mapping.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        runner: Runner,
        memory: MemoryPlan,
        eos_token_ids: Iterable[int],
        grammars: Grammars,
        vocab_size: int,
        adapters: Mapping[str, str] | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        description: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.memory = memory
        self.sampling_defaults = dict(sampling_defaults or {})
        self.description = dict(description or {})
        self.stats = EngineStats()
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._adapters = dict(adapters or {})
        self.eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._stops: dict[int, StopChecker] = {}
        self._ready: list[Completion] = []
        self._rows: dict[int, _Row] = {}
        self._new_ids = itertools.count()
        self._checked: SamplingParams | None = None

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def scheduler(self) -> Scheduler:
        """For reading its counters."""
        return self._scheduler

    @property
    def load(self) -> EngineLoad:
        """How busy it is."""
        stats, blocks = self._scheduler.stats, self._scheduler.block_manager
        return EngineLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            used_blocks=blocks.num_blocks - blocks.num_free_blocks,
            num_blocks=blocks.num_blocks,
            num_preemptions=stats.num_preemptions,
            stored_tokens=stats.stored_tokens,
            used_slots=stats.used_slots,
        )

    @property
    def speculation(self) -> SpeculationStats | None:
        """What guessing at tokens has brought; None where it is off."""
        speculator = self._scheduler.speculator
        return None if speculator is None else speculator.stats

    def has_unfinished(self) -> bool:
        """Whether `step` still has something to return."""
        return bool(self._ready) or self._scheduler.num_in_flight > 0 or self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. A request that cannot be run comes out of the next `step` as a failed completion."""
        try:
            self._add(request)
        except RowError as error:
            self._ready.append(Completion.failed(request.request_id, error, len(request.prompt_token_ids)))

    def _add(self, request: Request) -> None:
        params = request.params
        prompt = list(token_ids(request.prompt_token_ids, "prompt_token_ids", self._vocab_size))
        if params is not self._checked:
            token_ids(params.stop_token_ids, "stop_token_ids", self._vocab_size)
            token_ids(params.allowed_token_ids or (), "allowed_token_ids", self._vocab_size)
            token_ids([token for token, _ in params.logit_bias], "logit_bias", self._vocab_size)
            self._checked = params
        self._grammars.matcher(params)
        if params.adapter is not None and params.adapter not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise RowError(
                "unknown_adapter", f"adapter={params.adapter!r}: not loaded (with --lora NAME=PATH: {known})", "adapter"
            )
        only_scored = params.max_tokens == 0
        limit = self.memory.max_model_len + (only_scored and request.score_from > 0)  # see Request.score_from
        if not prompt:
            raise RowError(
                "empty_prompt", "the prompt has no tokens; this model's tokenizer adds none by itself", "prompt"
            )
        if len(prompt) + (params.max_tokens != 0) > limit:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens and at least one must be generated; max_model_len is {limit}"
                if len(prompt) == limit
                else f"the prompt has {len(prompt)} tokens, more than max_model_len {self.memory.max_model_len}",
                "prompt",
            )
        if only_scored and (params.prompt_logprobs is None or len(prompt) == 1):
            completion = Completion(request.request_id, [], "length", prompt_tokens=len(prompt))
            if params.prompt_logprobs is not None:
                completion.prompt_logprobs = _prompt_logprobs(prompt, 0, LogprobColumns())
            self._ready += _copies(completion, params.n)
            return
        room = limit - len(prompt)
        # Where only the prompt is scored, its last token is not run. The logits before it yield one token, which is
        # dropped.
        max_tokens = 1 if only_scored else room if params.max_tokens == UNTIL_CONTEXT else min(params.max_tokens, room)
        search = None
        if params.beam_width > 1 and not only_scored:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
            search = BeamSearch(params.beam_width, ends, max_tokens, params.length_penalty, params.early_stopping)
        bad_words = [ids for word in params.bad_words for ids in self._spellings(word)]
        sequences = [
            Sequence(
                seq_id=next(self._new_ids),
                request=request,
                max_output_tokens=max_tokens,
                sample=sample,
                banned_until_min_tokens=self._ending_ids(params) if params.min_tokens else (),
                bad_words=bad_words,
                adapter_digest=self._adapters[params.adapter] if params.adapter is not None else "",
                num_candidates=search.num_candidates if search is not None else 0,
                scored_next=prompt[-1] if only_scored else None,
            )
            for sample in range(1 if only_scored or search is not None else params.n)
        ]
        sequences[0].followers = sequences[1:]
        self._scheduler.add(sequences[0])
        self._rows[request.request_id] = _Row(sequences, search=search)
        if params.stop and params.max_tokens:
            for sequence in sequences:
                self._stops[sequence.seq_id] = StopChecker(
                    self.tokenizer,
                    prompt,
                    params.stop,
                    include_stop_str=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )

    def _spellings(self, word: str) -> list[list[int]]:
        """The token sequences that spell a bad word: as it stands, and as it follows a space."""
        alone, within = self.tokenizer.encode_plain(word), self.tokenizer.encode_plain(" " + word.lstrip())
        return [ids for ids in ([alone] if alone == within else [alone, within]) if ids]

    def _ending_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The ids that end a sequence; while `min_tokens` holds they are masked, so `_check` never meets them early."""
        ids = set(params.stop_token_ids)
        return tuple(sorted(ids if params.ignore_eos else ids | self.eos_token_ids))

    def abort(self, request_id: int) -> None:
        """Forget a request wherever it is; nothing of it comes out any more. Unknown and finished ones are ignored."""
        self._ready = [completion for completion in self._ready if completion.request_id != request_id]
        row = self._rows.pop(request_id, None)
        for seq in [] if row is None else row.sequences:
            followers, seq.followers = seq.followers, []
            for follower in followers:  # not with the scheduler yet
                follower.status = Status.FINISHED
            if seq.status is not Status.FINISHED:
                self._scheduler.finish(seq)
            self._stops.pop(seq.seq_id, None)

    def step(self) -> list[Completion]:
        """Run one step and return what finished in it, in no particular order but that of a request's samples."""
        finished, self._ready = self._ready, []
        while (batch := self._scheduler.schedule()) is not None:
            self._runner.submit(batch)
        if not self._scheduler.num_in_flight:
            return finished
        output = self._runner.collect()
        for sequence, tokens in self._scheduler.update(output):
            if sequence.status is Status.FINISHED:  # a sample of its request failed just now
                continue
            error = output.errors.get(sequence.seq_id)
            if error is None and sequence.num_candidates:
                finished += self._search(sequence, output.candidates[sequence.seq_id])
                continue
            completion = self._check(sequence, tokens, error)
            if completion is not None:
                finished += self._end(sequence, completion)
        return finished

    def _search(self, beam: Sequence, candidates: Candidates) -> list[Completion]:
        """Take what a beam brings; once all beams of its request have, let them go on. The results, if it is over."""
        row = self._rows[beam.request.request_id]
        assert row.search is not None
        row.candidates[beam.seq_id] = candidates
        if len(row.candidates) < len(row.sequences):
            return []
        beams = row.sequences
        chosen = row.search.advance(
            [seq.output_token_ids for seq in beams], [row.candidates[seq.seq_id] for seq in beams]
        )
        row.candidates.clear()
        if chosen:
            row.sequences = self._scheduler.branch(beams, chosen, self._new_ids)
            return []
        for seq in beams:
            self._scheduler.finish(seq)
        del self._rows[beam.request.request_id]
        return [self._found(beam, i, found) for i, found in enumerate(row.search.finished[: beam.request.params.n])]

    def _found(self, beam: Sequence, sample: int, found: Hypothesis) -> Completion:
        """The completion of a hypothesis, of which `beam` has the prompt."""
        beam.sample = sample
        beam.drop_output(0)
        beam.token_ids += found.token_ids
        self.stats.output_tokens += len(found.token_ids)
        token, params = found.token_ids[-1], beam.request.params
        if token in params.stop_token_ids:
            shown = None if params.include_stop_str_in_output else -1
            completion = self._finish(beam, "stop", str(token), shown=shown)
        elif token in self.eos_token_ids and not params.ignore_eos:
            completion = self._finish(beam, "stop", None, shown=-1)
        else:
            completion = self._finish(beam, "length", None)
        completion.score = found.score
        if sample > 0:
            completion.prompt_logprobs = None
        return completion

    def _end(self, sequence: Sequence, completion: Completion) -> list[Completion]:
        """Take a sequence out; the completions of its request where it was the last. One that failed ends them all."""
        row = self._rows[completion.request_id]
        row.done[sequence.sample] = completion
        failed = completion.finish_reason == "error"
        for one in row.sequences if failed else [sequence]:
            if one.status is not Status.FINISHED:
                self._scheduler.finish(one)
                self._stops.pop(one.seq_id, None)
        if len(row.done) < len(row.sequences) and not failed:
            return []
        del self._rows[completion.request_id]
        if failed:
            return [completion]
        completions = [row.done[sample] for sample in range(len(row.sequences))]
        if sequence.request.params.max_tokens == 0:
            return _copies(completions[0], sequence.request.params.n)
        return completions

    def _check(self, sequence: Sequence, tokens: list[int], error: RowError | None) -> Completion | None:
        """The completion of a sequence that ends with one of its new tokens, else None."""
        request = sequence.request
        params = request.params
        if error is not None:
            return Completion.failed(request.request_id, error, len(request.prompt_token_ids))
        if params.max_tokens == 0:
            sequence.drop_output(0)
            return self._finish(sequence, "length", None)
        stops = self._stops.get(sequence.seq_id)
        count = sequence.num_output_tokens - len(tokens)
        for token in tokens:
            count += 1
            self.stats.output_tokens += 1
            match = stops.add(token) if stops is not None else None
            reason: FinishReason = "stop"
            stop, text, shown = None, None, None
            if match is not None:
                stop, text = match.stop, match.text
            elif token in params.stop_token_ids:
                stop, shown = str(token), None if params.include_stop_str_in_output else -1
            elif token in self.eos_token_ids and not params.ignore_eos:
                shown = -1
            elif count >= sequence.max_output_tokens:
                reason = "length"
            else:
                continue
            sequence.drop_output(count)
            return self._finish(sequence, reason, stop, text, shown)
        return None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop: str | None,
        text: str | None = None,
        shown: int | None = None,
    ) -> Completion:
        """The completion; without a `text`, that of output tokens [0, shown)."""
        request = sequence.request
        prompt = list(request.prompt_token_ids)
        output = sequence.output_token_ids
        if sequence.sample == 0:
            self.stats.prompt_tokens += len(prompt)
            self.stats.cached_tokens += sequence.num_cached_tokens
        completion = Completion(
            request_id=request.request_id,
            sample=sequence.sample,
            token_ids=output,
            text=output_text(self.tokenizer, prompt, output[:shown]) if text is None else text,
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=len(prompt),
            cached_tokens=sequence.num_cached_tokens,
            adapter=request.params.adapter,
        )
        if request.params.is_structured and request.params.max_tokens:
            complete = self._grammars.is_complete(request.params, output[:shown])
            completion.valid = complete and (text is None or request.params.include_stop_str_in_output)
        if sequence.logprobs is not None:
            completion.logprobs = sequence.logprobs.frozen()
            completion.cumulative_logprob = math.fsum(completion.logprobs.logprobs)
        if sequence.prompt_logprobs is not None:
            completion.prompt_logprobs = _prompt_logprobs(prompt, request.score_from, sequence.prompt_logprobs)
        return completion

    def close(self) -> None:
        """Free the model and the cache; the engine cannot be used afterwards."""
        self._runner.close()


def _prompt_logprobs(prompt: list[int], score_from: int, scored: LogprobColumns) -> Logprobs:
    """Those of the prompt tokens from `score_from` on; the very first token has none."""
    columns = LogprobColumns()
    if score_from == 0:
        columns.extend(LogprobColumns(prompt[:1], [math.nan], [0], [[]], [[]]))
    columns.extend(scored)
    return columns.frozen()


def _copies(completion: Completion, n: int) -> list[Completion]:
    """The completion of a prompt that nothing is generated for, once for each sample."""
    return [replace(completion, sample=sample) for sample in range(n)]
