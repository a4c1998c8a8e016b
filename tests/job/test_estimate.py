"""Estimates: arithmetic on a sample, and rates of an engine whose every step takes a known time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paged_infer.job.estimate import DECODE_STEPS, Estimate, Rates, Sample, _shared_tokens, estimate, measure
from paged_infer.types import Completion


def test_a_job_is_its_sample_many_times():
    sample = Sample(rows=4, prompts=[[1] * 100, [1] * 50, [2] * 50], output_limits=[10, 10, 20], shared_tokens=80)
    found = estimate(sample, 400, Rates(prefill=1000, decode=50))
    assert found == Estimate(400, 20_000, 8_000, 4_000, 12_000 / 1000 + 4_000 / 50)
    assert found.cost(per_hour=36) == pytest.approx(0.92)


def test_shared_tokens_are_whole_blocks_behind_the_same_beginning():
    first = list(range(10))
    assert _shared_tokens([first, first], 4) == 8
    assert _shared_tokens([first[:8], first[:8]], 4) == 4, "the last token is always computed"
    assert _shared_tokens([first, [9, *first[1:]]], 4) == 0
    assert _shared_tokens([first, [*first[:4], 0, 0, 0, 0, 0]], 4) == 4
    assert _shared_tokens([first, [*first[4:8], *first[4:8], 1]], 4) == 0
    assert _shared_tokens([first] * 5, 4) == 32
    assert _shared_tokens([], 4) == 0


class TimedEngine:
    """Computes one prompt a step at 1,000 tokens a second; a step in which n sequences decode takes 0.1 s + n ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.memory = SimpleNamespace(max_model_len=1000, block_size=16, sequences=lambda tokens: 2000 // tokens)
        self.stats = SimpleNamespace(output_tokens=0)
        self.most = 0
        self._waiting, self._running = [], []

    def clock(self):
        return self.now

    def has_unfinished(self):
        return bool(self._waiting or self._running)

    def add(self, request):
        self._waiting.append(request)

    def step(self):
        if self._waiting:
            request = self._waiting.pop(0)
            self.now += 0.0 if request.params.ignore_eos else len(request.prompt_token_ids) / 1000
            self._running.append([request, request.params.max_tokens])
        if not self._running[0][0].params.ignore_eos:
            request, _ = self._running.pop()
            return [Completion(request.request_id, [0], "length", prompt_tokens=len(request.prompt_token_ids))]
        self.most = max(self.most, len(self._running))
        self.now += 0.1 + len(self._running) / 1000
        self.stats.output_tokens += len(self._running)
        for state in self._running:
            state[1] -= 1
        self._running = [state for state in self._running if state[1]]
        return []


def test_rates_are_those_of_the_engine():
    engine = TimedEngine()
    prompts = [[1] * (50 + i % 7) for i in range(500)]
    rates = measure(engine, prompts, max_num_seqs=8, max_num_batched_tokens=64, clock=engine.clock)
    assert rates.prefill == pytest.approx(1000)
    assert rates.num_seqs == engine.most == 8
    assert rates.decode == pytest.approx(8 / 0.108)
    assert 5 < engine.now < 5.5 + 0.108 * (DECODE_STEPS + 20)


def test_rates_of_few_or_long_prompts():
    engine = TimedEngine()
    rates = measure(engine, [[1] * 998], max_num_seqs=8, max_num_batched_tokens=64, clock=engine.clock)
    assert rates.prefill == pytest.approx(1000)
    assert (rates.num_seqs, engine.most) == (1, 1)
