"""What a job will take, before it runs: tokens from a sample of its rows, seconds from two measured rates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paged_infer.io.prompts import Prompt, PromptReader
from paged_infer.io.readers import Inputs
from paged_infer.job.config import RunConfig
from paged_infer.job.encode import PromptEncoder
from paged_infer.types import Request, RowError, SamplingParams

if TYPE_CHECKING:
    from paged_infer.engine.interface import AnyEngine

PREFILL_SECONDS = 5.0
"""How long prompts are computed to measure their rate."""

DECODE_STEPS = 12
"""Steps in which all sequences run, over which their rate is measured."""

_STEADY = 0.9
"""Share of the most tokens a step gave from which a step counts as one in which all sequences ran."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of a job.

    Attributes:
        rows: rows looked at, those that cannot be answered included.
        prompts: token ids of each row that can be answered.
        output_limits: most tokens that each of these may generate, over all its samples or beams.
        shared_tokens: prompt tokens in whole blocks that an earlier prompt of the sample begins with too.
    """

    rows: int
    prompts: Sequence[Sequence[int]]
    output_limits: Sequence[int]
    shared_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_limits)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second.

    Attributes:
        prefill: prompt tokens, while nothing else is computed.
        decode: generated tokens, while `num_seqs` sequences run.
        num_seqs: None when the rates were given and not measured.
    """

    prefill: float
    decode: float
    num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A whole job, extrapolated from its sample.

    Attributes:
        rows: of the job, those that cannot be answered included.
        prompt_tokens: of all prompts.
        shared_tokens: of these, what the prefix cache saves.
        output_tokens: at most.
        seconds: at most, model loading not included.
    """

    rows: int
    prompt_tokens: float
    shared_tokens: float
    output_tokens: float
    seconds: float

    def cost(self, per_hour: float) -> float:
        return self.seconds / 3600 * per_hour


def take_sample(
    config: RunConfig,
    reader: PromptReader,
    inputs: Inputs,
    encoder: PromptEncoder,
    defaults: Mapping[str, Any],
    *,
    rows: int,
    max_model_len: int,
) -> Sample:
    """Read and tokenise the first rows.

    Args:
        defaults: the model's own sampling options.
        rows: how many to look at.
    """
    prompts: list[Prompt] = []
    params: list[SamplingParams] = []
    looked_at = 0
    for row in itertools.islice(inputs.rows(), rows if config.limit is None else min(rows, config.limit)):
        looked_at += 1
        try:
            prompt = reader.read(row)
            params.append(SamplingParams.resolve(defaults, config.sampling, prompt.options))
        except RowError:
            continue
        prompts.append(prompt)
    good: list[Sequence[int]] = []
    limits: list[int] = []
    for ids, wanted in zip(encoder.encode(prompts), params, strict=True):
        if isinstance(ids, RowError):
            continue
        ids = encoder.fit(ids, wanted)
        room = max_model_len - len(ids)
        if ids and room >= (wanted.max_tokens != 0):
            good.append(ids)
            most = room if wanted.max_tokens < 0 else min(wanted.max_tokens, room)
            limits.append(most * max(wanted.n, wanted.beam_width))
    shared = _shared_tokens(good, config.engine.block_size) if config.engine.prefix_caching else 0
    return Sample(looked_at, good, limits, shared)


def _shared_tokens(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    """Tokens of whole blocks that an earlier prompt began with; the last token of a prompt is never among them."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    shared = 0
    for ids in prompts:
        parent = -1
        for start in range(0, (len(ids) - 1) // block_size * block_size, block_size):
            key = (parent, tuple(ids[start : start + block_size]))
            if key in known:
                shared += block_size
            parent = known.setdefault(key, len(known))
    return shared


def measure(
    engine: AnyEngine,
    prompts: Sequence[Sequence[int]],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    clock: Callable[[], float] = perf_counter,
) -> Rates:
    """Compute prompts of the sample for some seconds, then let as many sequences as fit generate a few tokens each.

    Args:
        prompts: token ids, at least one prompt.
        max_num_seqs, max_num_batched_tokens: the engine's limits.
    """
    numbers = itertools.count()

    def add(ids: Sequence[int], params: SamplingParams) -> None:
        engine.add(Request(next(numbers), ids, params))

    computed, seconds, taken = 0, 0.0, 0
    while taken < len(prompts) and seconds < PREFILL_SECONDS:
        tokens = 0
        while taken < len(prompts) and tokens < 4 * max_num_batched_tokens:
            add(prompts[taken], SamplingParams(max_tokens=1))
            tokens += len(prompts[taken])
            taken += 1
        began = clock()
        while engine.has_unfinished():
            computed += sum(done.prompt_tokens - done.cached_tokens for done in engine.step())
        seconds += clock() - began
    prefill = computed / max(seconds, 1e-9)

    begun = prompts[:taken]
    length = sum(map(len, begun)) // len(begun)
    steps = DECODE_STEPS + -(-max_num_seqs * engine.memory.block_size // max_num_batched_tokens)
    room = min(steps, engine.memory.max_model_len - max(map(len, begun)))
    num_seqs = max(1, min(max_num_seqs, engine.memory.sequences(length + steps)))
    for ids in itertools.islice(itertools.cycle(begun), num_seqs):
        add(ids, SamplingParams(max_tokens=max(1, room), ignore_eos=True))
    given: list[tuple[int, float]] = []
    while engine.has_unfinished():
        before, began = engine.stats.output_tokens, clock()
        engine.step()
        given.append((engine.stats.output_tokens - before, clock() - began))
    most = max(tokens for tokens, _ in given)
    steady = [step for step in given if step[0] >= _STEADY * most]
    decode = sum(tokens for tokens, _ in steady) / max(sum(spent for _, spent in steady), 1e-9)
    return Rates(prefill, decode, most)


def estimate(sample: Sample, rows: int, rates: Rates) -> Estimate:
    """The job of so many rows, all like those of the sample (which has at least one)."""
    scale = rows / sample.rows
    prompt, shared, output = (
        scale * tokens for tokens in (sample.prompt_tokens, sample.shared_tokens, sample.output_tokens)
    )
    return Estimate(rows, prompt, shared, output, (prompt - shared) / rates.prefill + output / rates.decode)
