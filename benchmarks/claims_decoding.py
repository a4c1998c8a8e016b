"""What decoding features cost and bring: speculation, beams, log-probabilities. Rows of `claims.py`."""

from __future__ import annotations

import contextlib
import pydoc_data.topics
import random
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from claim import Finding, Settings, greedy, succeeded
from model_folder import hf_folder

from paged_infer.engine.scheduler import Scheduler
from paged_infer.llm import LLM
from paged_infer.types import SamplingParams

COPYING = ((1, 160, 96, 3, 2.0), (4, 120, 64, 3, 2.0), (8, 100, 48, 3, 1.3), (64, 40, 12, 7, 0.97))
"""Rows, tokens of the text to copy, output tokens, pairs of runs, and the ratio to reach."""

BEAMS, BEAM_ROWS, BEAM_PROMPT, BEAM_NEW = 4, 32, 256, 64


@contextlib.contextmanager
def loaded(settings: Settings, **options: object) -> Iterator[LLM]:
    with LLM(settings.model, dtype=settings.dtype, threads=settings.threads, prefix_caching=False, **options) as llm:
        yield llm


def excerpts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Pieces of Python's own documentation (`pydoc_data.topics`), as token ids."""
    topics = pydoc_data.topics.topics
    ids = llm.engine.tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    starts = random.Random(0)
    return [ids[start : start + length] for start in (starts.randrange(len(ids) - length) for _ in range(count))]


def copies(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Prompts after which the model goes on copying: an excerpt, and its beginning once more."""
    newlines = llm.engine.tokenizer.encode("\n\n")
    return [[*text, *newlines, *text[:24]] for text in excerpts(llm, count, length)]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def speculation(settings: Settings) -> list[Finding]:
    """The same prompts with and without guesses, in turns."""
    findings = []
    with loaded(settings, num_kv_blocks=1200) as off, loaded(settings, num_kv_blocks=1200, speculative="suffix") as on:
        for batch, length, new, pairs, least in COPYING:
            prompts = copies(off, batch, length)
            ratios = []
            for _ in range(pairs):
                plain = seconds(lambda: succeeded(off.generate(prompts, greedy(new))))  # noqa: B023
                ratios.append(plain / seconds(lambda: succeeded(on.generate(prompts, greedy(new)))))  # noqa: B023
            ratio = median(ratios)
            findings.append(
                Finding(
                    f"speculation from suffixes, outputs that copy inputs, batch {batch}",
                    f"≥ {least}×",
                    f"{ratio:.2f}× (of {pairs} pairs {min(ratios):.2f}–{max(ratios):.2f})",
                    ratio >= least,
                    f"{length + 24} prompt and {new} output tokens a row",
                )
            )
    return findings


def logprobs(settings: Settings) -> list[Finding]:
    """What the five likeliest tokens at every position cost."""
    pairs, new = 5, 16
    with loaded(settings, num_kv_blocks=1200) as llm:
        prompts = excerpts(llm, 64, 80)
        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=5)
        ratios = []
        for _ in range(pairs):
            plain = seconds(lambda: succeeded(llm.generate(prompts, greedy(new))))
            ratios.append(seconds(lambda: succeeded(llm.generate(prompts, asked))) / plain)
    cost = median(ratios) - 1
    how = f"64 rows, 80 prompt and {new} output tokens, {pairs} pairs {min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%}"
    return [Finding("cost of top-5 log-probabilities", "≤ 10 %", f"{cost:+.0%}", cost <= 0.1, how)]


def beams(settings: Settings) -> list[Finding]:
    """Against transformers' beam search on the same prompts, and blocks against beams that share nothing."""
    asked = SamplingParams(temperature=0, max_tokens=BEAM_NEW, ignore_eos=True, beam_width=BEAMS)
    with loaded(settings) as llm:
        prompts = excerpts(llm, BEAM_ROWS, BEAM_PROMPT)
        succeeded(llm.generate(prompts[:1], greedy(2)))
        peak = PeakBlocks(llm.engine.scheduler)
        ours = seconds(lambda: succeeded(llm.generate(prompts, asked)))
        size = llm.engine.memory.block_size
    theirs = hf_beams(settings, prompts)
    unshared = BEAM_ROWS * BEAMS * -(-(BEAM_PROMPT + BEAM_NEW) // size)
    how = f"width {BEAMS}, {BEAM_ROWS} prompts of {BEAM_PROMPT} tokens, {BEAM_NEW} new, {settings.dtype}"
    ratio, share = theirs / ours, peak.most / unshared
    return [
        Finding(
            "beam search against transformers",
            "≥ 6×",
            f"{ratio:.1f}×",
            ratio >= 6,
            f"{how}: {theirs:.0f} s, {ours:.0f} s",
        ),
        Finding("KV blocks of beams against unshared", "≤ 45 %", f"{share:.0%}", share <= 0.45, how),
    ]


class PeakBlocks:
    """Watches a scheduler's pool after every step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.most = 0
        schedule, blocks = scheduler.schedule, scheduler.block_manager

        def watched() -> object:
            batch = schedule()
            self.most = max(self.most, blocks.num_blocks - blocks.num_free_blocks)
            return batch

        scheduler.schedule = watched  # type: ignore[method-assign, assignment]


def hf_beams(settings: Settings, prompts: list[list[int]]) -> float:
    """Seconds that `generate` with beams takes, all prompts in one batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(settings.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf_folder(settings.model), dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
    ).eval()
    options = {
        "num_beams": BEAMS,
        "max_new_tokens": BEAM_NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.inference_mode():
        return seconds(lambda: model.generate(torch.tensor(prompts), **options))


CLAIMS: dict[str, Callable[[Settings], list[Finding]]] = {
    "speculation": speculation,
    "logprobs": logprobs,
    "beams": beams,
}
