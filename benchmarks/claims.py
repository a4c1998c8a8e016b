"""What articles on paged attention and continuous batching claim, beside what this engine does here.

    python benchmarks/claims.py [--only NAME ...]

Each claim is a function that runs the engine (or, where only block counts matter, its scheduler without a model) and
returns rows of claimed, measured and how. Results go to `benchmarks/results/claims.json` and `.md`; with `--only`,
the other claims' last results stay.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import claims_decoding
import report
from claim import BLOCK_SIZE, Finding, Settings, greedy, succeeded
from model_folder import hf_folder
from recorder import RecordingRunner
from subject import Measurement, OtherShare, Subject
from workload import read_rows, shared_lengths

from paged_infer.config import DEMO_MODEL
from paged_infer.engine.batch import StepOutput
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.engine import Engine
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence as Scheduled
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.types import Request, SamplingParams

HERE = Path(__file__).resolve().parent

TOPICS = ("volcanoes", "bread", "the Roman Empire", "black holes", "chess", "whales", "electric motors", "tea")
FORMS = (
    "What is the one-word plural or category that best describes {}? Answer in one word.",
    "Explain {} in one sentence.",
    "What are {}?",
    "List five facts about {}.",
    "Write a short poem about {}.",
    "Give me a step-by-step guide for a beginner interested in {}.",
    "Write a short story that involves {}.",
    "Compare two opinions that people hold about {}.",
)


def distinct_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


# --- Memory ---------------------------------------------------------------------------------------------------------


def kv_waste(settings: Settings) -> list[Finding]:
    """Unused places in held blocks, over every step of a run."""
    rows = read_rows(num_rows=64)
    with settings.engine() as (llm, recorder):
        succeeded(llm.generate([row["prompt"] for row in rows], [greedy(row["max_tokens"]) for row in rows]))
    steps = [step for step in recorder.steps if step.held_blocks]
    worst = max(step.worst_waste for step in steps)
    used = sum(step.stored_tokens for step in steps) / sum(step.held_blocks * BLOCK_SIZE for step in steps)
    how = f"64 rows of workload.jsonl, {len(steps)} steps, blocks of {BLOCK_SIZE}; each block in use counted once"
    return [
        Finding(
            "KV waste of a sequence", f"≤ {BLOCK_SIZE - 1} tokens", f"{worst} tokens at most", worst < BLOCK_SIZE, how
        ),
        Finding("KV memory in use that holds tokens", "≥ 96 %", f"{used:.1%}", used >= 0.96, how),
    ]


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of a prompt, and of the answer up to and including its EOS."""

    prompt: int
    output: int


MAX_TOKENS = 512


@functools.cache
def real_lengths(settings: Settings) -> tuple[Length, ...]:
    """How long the model's own answers to 64 questions are, EOS decided, at most `MAX_TOKENS`."""
    questions = [form.format(topic) for form in FORMS for topic in TOPICS]
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=MAX_TOKENS)
    with settings.engine() as (llm, _):
        answers = succeeded(llm.chat([[{"role": "user", "content": question}] for question in questions], params))
    return tuple(Length(answer.prompt_tokens, len(answer.token_ids)) for answer in answers)


def concurrency_paged(lengths: Sequence[Length], num_blocks: int) -> tuple[float, float]:
    """Mean number of running sequences while others wait, and tokens computed again after preemption per token needed.

    The engine's own scheduler and block manager, every token made up at once. An output ends at its real length, which
    the scheduler does not know beforehand: it may go on to `MAX_TOKENS`. Prefixes are not shared.
    """
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=False),
        WaitingQueue("input"),
        max_num_seqs=num_blocks,
        max_num_batched_tokens=8192,
    )
    for i, length in enumerate(lengths):
        scheduler.add(Scheduled(i, Request(i, [1] * length.prompt, greedy(MAX_TOKENS)), MAX_TOKENS))
    running = []
    while (batch := scheduler.schedule()) is not None:
        if scheduler.num_waiting:
            running.append(scheduler.num_running)
        sampled = [item.seq_id for item in batch.scheduled if item.samples]
        for sequence, _ in scheduler.update(StepOutput(batch.step, sampled, [[0]] * len(sampled))):
            if sequence.num_output_tokens == lengths[sequence.seq_id].output:
                scheduler.finish(sequence)
    needed = sum(length.prompt + length.output - 1 for length in lengths)
    return fmean(running), scheduler.stats.num_recomputed_tokens / needed


def concurrency_reserved(lengths: Sequence[Length], pool_tokens: int, reserve: Callable[[Length], int]) -> float:
    """The same for an engine that sets aside a fixed number of tokens for a sequence as long as it runs."""
    waiting = deque(lengths)
    running: list[tuple[int, int]] = []  # (steps left, tokens reserved)
    free, counts = pool_tokens, []
    while True:
        while waiting and reserve(waiting[0]) <= free:
            length = waiting.popleft()
            free -= reserve(length)
            running.append((length.output, reserve(length)))
        if not waiting:
            return fmean(counts)
        counts.append(len(running))
        free += sum(tokens for left, tokens in running if left == 1)
        running = [(left - 1, tokens) for left, tokens in running if left > 1]


def reservation(settings: Settings) -> list[Finding]:
    """Sequences that run at once in the same KV memory, with the lengths real answers have."""
    measured = real_lengths(settings)
    lengths = list(measured) * 8
    random.Random(0).shuffle(lengths)
    pool = 16 * 2048
    paged, again = concurrency_paged(lengths, pool // BLOCK_SIZE)
    most = concurrency_reserved(lengths, pool, lambda length: 2048)
    fitted = concurrency_reserved(lengths, pool, lambda length: length.prompt + MAX_TOKENS)
    outputs = sorted(length.output for length in measured)
    how = (
        f"{len(measured)} chat answers with their own EOS ({median(outputs):.0f} tokens at the median, mean "
        f"{fmean(outputs):.0f}, {sum(o == MAX_TOKENS for o in outputs)} cut at {MAX_TOKENS}), each 8 times in random "
        f"order, no shared prefixes; pool of {pool:,} tokens; the engine's scheduler without the model against "
        f"reservation in the same order; mean while requests wait: {paged:.1f} at once, "
    )
    cost = f"; {again:.1%} of tokens computed again after preemption"
    return [
        Finding(
            "concurrent sequences, against 2,048 tokens reserved for each",
            "2–4×",
            f"{paged / most:.1f}×",
            paged / most >= 2,
            f"{how}{most:.1f} with reservation{cost}",
        ),
        Finding(
            "concurrent sequences, against prompt + max_tokens reserved",
            "2–4×",
            f"{paged / fitted:.1f}×",
            paged / fitted >= 2,
            f"{how}{fitted:.1f} with reservation{cost}",
        ),
    ]


# --- Time -----------------------------------------------------------------------------------------------------------


def continuous_batching(settings: Settings) -> list[Finding]:
    """The same requests on the same engine, refilled as rows end, or batch by batch."""
    slots = 16
    lengths = [min(length.output, 256) for length in real_lengths(settings)]
    random.Random(0).shuffle(lengths)
    prompts = distinct_prompts(len(lengths), 32)
    params = [greedy(length) for length in lengths]
    with settings.engine(max_num_seqs=slots, order="input", prefix_caching=False) as (llm, recorder):
        llm.generate(prompts[:slots], greedy(2))
        recorder.steps.clear()
        start = time.perf_counter()
        for first in range(0, len(prompts), slots):
            succeeded(llm.generate(prompts[first : first + slots], params[first : first + slots]))
        static, static_steps = time.perf_counter() - start, len(recorder.steps)
        recorder.steps.clear()
        start = time.perf_counter()
        succeeded(llm.generate(prompts, params))
        continuous, continuous_steps = time.perf_counter() - start, len(recorder.steps)
    how = (
        f"{len(prompts)} requests with real answer lengths (≤ 256, mean {fmean(lengths):.0f}), {slots} slots, same "
        f"engine: static {static:.1f} s in {static_steps} steps, "
        f"continuous {continuous:.1f} s in {continuous_steps} steps"
    )
    return [
        Finding("continuous against static batching, wall time", "up to 8×", f"{static / continuous:.2f}×", None, how),
        Finding(
            "continuous against static batching, steps",
            "fewer steps",
            f"{static_steps / continuous_steps:.2f}×",
            static_steps > continuous_steps,
            how,
        ),
    ]


def stall(settings: Settings) -> list[Finding]:
    """The longest time running decodes wait for their next token while a 4,000-token prompt comes in."""
    kinds: dict[str, dict[str, object]] = {
        "chunks of 256": {"max_num_batched_tokens": 256},
        "chunks of 512": {"max_num_batched_tokens": 512},
        "whole": {"chunked_prefill": False, "max_num_batched_tokens": 4096},
    }
    longest, usual = {}, {}
    for name, options in kinds.items():
        with settings.engine(order="input", prefix_caching=False, **options) as (llm, recorder):
            longest[name], usual[name] = longest_gap(llm.engine, recorder)
    how = (
        "16 decodes running when a 4,000-token prompt arrives; time between two tokens of the same sequence; "
        f"without the prompt {usual['whole']:.2f} s at the median; "
        + ", ".join(f"{name} {gap:.2f} s" for name, gap in longest.items())
    )
    ratio = longest["whole"] / longest["chunks of 512"]
    return [
        Finding(
            "longest stall of running decodes, whole prompt against chunks of 512",
            "chunking bounds it",
            f"{longest['whole']:.2f} s → {longest['chunks of 512']:.2f} s ({ratio:.1f}× shorter)",
            ratio > 1,
            how,
        )
    ]


def longest_gap(engine: Engine, recorder: RecordingRunner) -> tuple[float, float]:
    """Seconds of the longest gap between tokens of a running sequence from the long prompt's arrival on, and of the
    median gap before."""
    for i, prompt in enumerate(distinct_prompts(16, 64)):
        engine.add(Request(i, prompt, greedy(96)))
    while recorder_tokens(recorder, 0) < 12:
        engine.step()
    arrived = len(recorder.steps)
    engine.add(Request(16, distinct_prompts(1, 4000, seed=1)[0], greedy(2)))
    while engine.has_unfinished():
        succeeded(engine.step())
    before: list[float] = []
    after: list[float] = []
    last: dict[int, float] = {}
    for number, step in enumerate(recorder.steps):
        for seq_id in step.sampled:
            if seq_id in last:
                (before if number < arrived else after).append(step.end - last[seq_id])
            last[seq_id] = step.end
    return max(after), median(before)


def recorder_tokens(recorder: RecordingRunner, seq_id: int) -> int:
    """Tokens a sequence has got so far."""
    return sum(seq_id in step.sampled for step in recorder.steps)


def prefix_cache(settings: Settings) -> list[Finding]:
    """A long system prompt in front of short questions."""
    system, questions = distinct_prompts(1, 1000)[0], distinct_prompts(9, 200, seed=1)
    prompts = [system + question for question in questions]
    ideal = shared_lengths(prompts, BLOCK_SIZE)[1] / len(prompts[1])
    seconds = {}
    for caching in (False, True):
        with settings.engine(prefix_caching=caching) as (llm, _):
            succeeded(llm.generate(prompts[:1], greedy(1)))
            start = time.perf_counter()
            answers = succeeded(llm.generate(prompts[1:], greedy(1)))
            seconds[caching] = time.perf_counter() - start
    saved = sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
    how = (
        "1,000-token system prompt in the cache, 8 questions of 200 tokens, one token each; whole blocks of 16 allow "
        f"62 of 1,000 / 16 = {ideal:.1%}"
    )
    return [
        Finding("prompt computation saved by a 1,000-token system prompt", "83 %", f"{saved:.1%}", saved >= ideal, how),
        Finding(
            "time for those prompts, without sharing against with it",
            "–",
            f"{seconds[False] / seconds[True]:.1f}× ({seconds[False]:.2f} s → {seconds[True]:.2f} s)",
            None,
            how,
        ),
    ]


def admission_order(settings: Settings) -> list[Finding]:
    """Rows as they come, against the order of an engine that sees them ahead."""
    prefixes, questions = distinct_prompts(6, 400), distinct_prompts(48, 40, seed=1)
    interleaved = [prefixes[i % 6] + question for i, question in enumerate(questions)]
    computed, shared_s = {}, {}
    for order in ("input", "auto"):
        with settings.engine(order=order, kv_cache_memory=None, num_kv_blocks=160, max_num_seqs=8) as (llm, _):
            succeeded(llm.generate(distinct_prompts(1, 32, seed=2), greedy(2)))
            start = time.perf_counter()
            answers = succeeded(llm.generate(interleaved, greedy(8)))
            shared_s[order] = time.perf_counter() - start
        computed[order] = sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
    outputs = [16 + i % 33 for i in range(56)] + [256] * 8
    prompts = distinct_prompts(len(outputs), 32, seed=3)
    steps, tail_s = {}, {}
    for order in ("input", "auto"):
        with settings.engine(order=order, max_num_seqs=16) as (llm, recorder):
            succeeded(llm.generate(prompts[:16], greedy(2)))
            recorder.steps.clear()
            start = time.perf_counter()
            succeeded(llm.generate(prompts, [greedy(output) for output in outputs]))
            steps[order], tail_s[order] = len(recorder.steps), time.perf_counter() - start
    return [
        Finding(
            "`--order auto` on shared prefixes: prompt tokens computed, and time",
            "–",
            f"{computed['input']:,} → {computed['auto']:,} ({computed['input'] / computed['auto']:.1f}×), "
            f"{shared_s['input']:.1f} s → {shared_s['auto']:.1f} s ({shared_s['input'] / shared_s['auto']:.1f}×)",
            computed["auto"] < computed["input"] and shared_s["auto"] < shared_s["input"],
            "48 rows: 6 prefixes of 400 tokens in turns, each with a question of 40; 8 tokens each; 160 blocks of KV, "
            "5 prefixes' worth",
        ),
        Finding(
            "`--order auto` on a long tail: steps, and time",
            "–",
            f"{steps['input']} → {steps['auto']} ({steps['input'] / steps['auto']:.2f}×), "
            f"{tail_s['input']:.1f} s → {tail_s['auto']:.1f} s ({tail_s['input'] / tail_s['auto']:.2f}×)",
            steps["auto"] < steps["input"] and tail_s["auto"] < tail_s["input"],
            "56 rows of 16–48 tokens, then 8 of 256; 16 slots",
        ),
    ]


def naive_pipeline(settings: Settings) -> list[Finding]:
    """Against `generate` one prompt at a time, and in a padded batch of prompts as they come."""
    folder = str(hf_folder(settings.model))
    naive = run_adapter(settings, "hf_generate.py", folder, 8, "--batch-size", "1", "--order", "input")
    padded = run_adapter(settings, "hf_generate.py", folder, 16, "--batch-size", "16", "--order", "input")
    ours = run_adapter(settings, "own.py", settings.model, 64)
    how = (
        f"workload.jsonl, generated tokens a second, {settings.dtype}: transformers {naive.version} batch 1 "
        f"{naive.rate:.1f} (8 rows), a padded batch of 16 {padded.rate:.1f} (16 rows), "
        f"ours {ours.rate:.1f} (64 rows)"
    )
    users, steps = users_at(settings, READING_SPEED)
    paces = ", ".join(f"{size}: {seconds * 1000:.0f} ms" for size, seconds in steps.items())
    naive_users = naive.rate / READING_SPEED
    ratio = ours.rate / naive.rate
    return [
        Finding("throughput against one prompt at a time", "up to 24×", f"{ratio:.1f}×", None, how),
        Finding("throughput against a padded batch", "up to 24×", f"{ours.rate / padded.rate:.1f}×", None, how),
        Finding("cost of a token, same machine", "−80 %", f"−{1 - 1 / ratio:.0%}", ratio >= 5, how),
        Finding(
            f"users served at once with {READING_SPEED} tokens/s for each",
            "10×",
            f"{users / naive_users:.1f}× ({naive_users:.1f} → {users})",
            users >= 10 * naive_users,
            "one prompt at a time: its rate shared out; ours: the largest batch of decodes over 200-token prompts "
            f"whose step keeps the pace (median step with {paces})",
        ),
    ]


READING_SPEED = 5
"""Tokens a second that a reader follows."""


def users_at(settings: Settings, rate: float, most: int = 256) -> tuple[int, dict[int, float]]:
    """How many decodes keep a pace of `rate` tokens a second each, in eights, and the step times on the way there.

    Eight sequences with prompts of 200 tokens join at a time, until a step that only decodes takes longer than 1/rate.
    """
    group = 8
    steps: dict[int, float] = {}
    with settings.engine(prefix_caching=False, max_num_seqs=most, kv_cache_memory=6 << 30) as (llm, recorder):
        for size in range(group, most + 1, group):
            for i, prompt in enumerate(distinct_prompts(group, 200, seed=size)):
                llm.engine.add(Request(size + i, prompt, greedy(2000)))
            decodes: list[float] = []
            while len(decodes) < 5:
                succeeded(llm.engine.step())
                step = recorder.steps[-1]
                if step.num_tokens == step.running == size:
                    decodes.append(step.seconds)
            steps[size] = median(decodes)
            if steps[size] > 1 / rate:
                return size - group, steps
    return most, steps


def run_adapter(settings: Settings, script: str, model: str, num_rows: int, *options: str) -> Measurement:
    """One run of an adapter over evenly spread rows."""
    with tempfile.TemporaryDirectory() as scratch:
        workload = Path(scratch) / "workload.jsonl"
        workload.write_text("".join(json.dumps(row) + "\n" for row in read_rows(num_rows=num_rows)))
        command = [sys.executable, str(HERE / "peers" / script), *options, "--model", model]
        command += ["--workload", str(workload), "--dtype", settings.dtype, "--threads", str(settings.threads)]
        return Subject(script, command).measure(timeout_s=400)


CLAIMS: dict[str, Callable[[Settings], list[Finding]]] = {
    "kv-waste": kv_waste,
    "reservation": reservation,
    "continuous-batching": continuous_batching,
    "stall": stall,
    "prefix-cache": prefix_cache,
    "order": admission_order,
    "naive-pipeline": naive_pipeline,
    **claims_decoding.CLAIMS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=list(CLAIMS), default=list(CLAIMS), metavar="NAME", help=", ".join(CLAIMS))
    add("--model", default=DEMO_MODEL)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    settings = Settings(args.model, args.dtype, args.threads)
    path = report.RESULTS / "claims.json"
    findings = json.loads(path.read_text())["findings"] if path.exists() else {}
    for name in args.only:
        start, others = time.perf_counter(), OtherShare()
        found = CLAIMS[name](settings)
        findings[name] = [asdict(finding) | {"other_share": others()} for finding in found]
        print(f"{name}: {time.perf_counter() - start:.0f} s, others took {others():.0%} of the CPU", file=sys.stderr)
    findings = {name: findings[name] for name in CLAIMS if name in findings}
    words = {True: "yes", False: "no", None: "–"}
    rows = [
        (f["claim"], f["claimed"], f["measured"], words[f["holds"]], f"{f['other_share']:.0%}", f["how"])
        for fs in findings.values()
        for f in fs
    ]
    text = "\n".join(
        [
            "# Claimed and measured",
            "",
            f"{args.model}, {args.dtype}, {args.threads} threads; {report.machine_line()}.",
            "",
            report.table(("claim", "claimed", "measured", "holds", "CPU of others", "how"), rows),
        ]
    )
    report.write("claims", {"machine": report.machine(), "settings": asdict(settings), "findings": findings}, text)
    print(text)


if __name__ == "__main__":
    main()
