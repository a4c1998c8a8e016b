"""The engine: requests in, completions out, one step at a time.

Owns the loop schedule → execute → update and the decision when a sequence ends. Knows neither files nor tensors: the
scheduler plans, the runner computes, `text` turns tokens into strings. A request that cannot be answered comes out as a
failed completion; nothing a single request asks can end the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.runner import Runner
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence
from paged_infer.text.detokenizer import output_text
from paged_infer.text.stop import StopChecker
from paged_infer.text.tokenizer import Tokenizer
from paged_infer.types import UNTIL_CONTEXT, Completion, FinishReason, Request, RowError, SamplingParams, token_ids


@dataclass(slots=True)
class EngineStats:
    """Tokens since the engine was made; prompts count when their sequence is finished, outputs as they come."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Engine:
    """Continuous batching over a runner.

    Args:
        tokenizer: turns ids into text and says which ids end a sequence.
        scheduler, runner: the planner and the executor; the scheduler keeps as many batches in flight as it may.
        memory: sizes; `memory.max_model_len` limits every sequence.
        eos_token_ids: ids that end a sequence, the union of what model, generation settings and tokenizer name.
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
        vocab_size: int,
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
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._stops: dict[int, StopChecker] = {}
        self._ready: list[Completion] = []
        self._next_seq_id = 0

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
        token_ids(params.stop_token_ids, "stop_token_ids", self._vocab_size)
        limit = self.memory.max_model_len
        if not prompt:
            raise RowError(
                "empty_prompt", "the prompt has no tokens; this model's tokenizer adds none by itself", "prompt"
            )
        if len(prompt) + (params.max_tokens != 0) > limit:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens and at least one must be generated; max_model_len is {limit}"
                if len(prompt) == limit
                else f"the prompt has {len(prompt)} tokens, more than max_model_len {limit}",
                "prompt",
            )
        if params.max_tokens == 0:
            self._ready.append(Completion(request.request_id, [], "length", prompt_tokens=len(prompt)))
            return
        room = limit - len(prompt)
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            max_output_tokens=room if params.max_tokens == UNTIL_CONTEXT else min(params.max_tokens, room),
            banned_until_min_tokens=self._ending_ids(params) if params.min_tokens else (),
        )
        self._next_seq_id += 1
        self._scheduler.add(sequence)
        if params.stop:
            self._stops[sequence.seq_id] = StopChecker(
                self.tokenizer,
                prompt,
                params.stop,
                include_stop_str=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def _ending_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The ids that end a sequence; while `min_tokens` holds they are masked, so `_check` never meets them early."""
        ids = set(params.stop_token_ids)
        return tuple(sorted(ids if params.ignore_eos else ids | self._eos))

    def step(self) -> list[Completion]:
        """Run one step and return what finished in it, in no particular order."""
        finished, self._ready = self._ready, []
        while (batch := self._scheduler.schedule()) is not None:
            self._runner.submit(batch)
        if not self._scheduler.num_in_flight:
            return finished
        output = self._runner.collect()
        for sequence, token in self._scheduler.update(output):
            completion = self._check(sequence, token, output.errors.get(sequence.seq_id))
            if completion is not None:
                self._scheduler.finish(sequence)
                self._stops.pop(sequence.seq_id, None)
                finished.append(completion)
        return finished

    def _check(self, sequence: Sequence, token: int, error: str | None) -> Completion | None:
        """The completion of a sequence that ends with this token, else None."""
        request = sequence.request
        params = request.params
        if error is not None:
            reason = RowError("non_finite_logits", error)
            return Completion.failed(request.request_id, reason, sequence.num_prompt_tokens)
        self.stats.output_tokens += 1
        stops = self._stops.get(sequence.seq_id)
        match = stops.add(token) if stops is not None else None
        if match is not None:
            return self._finish(sequence, "stop", match.stop, match.text)
        if token in params.stop_token_ids:
            return self._finish(
                sequence, "stop", str(token), shown=-1 if not params.include_stop_str_in_output else None
            )
        if token in self._eos and not params.ignore_eos:
            return self._finish(sequence, "stop", None, shown=-1)
        if sequence.num_output_tokens >= sequence.max_output_tokens:
            return self._finish(sequence, "length", None)
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
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        output = sequence.output_token_ids
        self.stats.prompt_tokens += len(prompt)
        self.stats.cached_tokens += sequence.num_cached_tokens
        return Completion(
            request_id=sequence.request.request_id,
            sample=sequence.sample,
            token_ids=output,
            text=output_text(self.tokenizer, prompt, output[:shown]) if text is None else text,
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=len(prompt),
            cached_tokens=sequence.num_cached_tokens,
        )

    def close(self) -> None:
        """Free the model and the cache; the engine cannot be used afterwards."""
        self._runner.close()
