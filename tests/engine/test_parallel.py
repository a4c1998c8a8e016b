"""Ranks that run one model together answer as Hugging Face and as one process do."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pyarrow as pa
import pyarrow.ipc
import pytest
import torch

from paged_infer.config import ConfigError
from paged_infer.engine import build
from paged_infer.engine.batch import NewSequence, ScheduledBatch, ScheduledSequence, StepOutput
from paged_infer.engine.executor import BeforeLast, RankGroup
from paged_infer.llm import LLM
from paged_infer.parallel import process
from paged_infer.parallel.place import places
from paged_infer.parallel.process import Worker, WorkerFailed
from paged_infer.types import SamplingParams
from tests.fixtures.checkpoints import hf_greedy, hf_logits, hf_model, markov_checkpoint
from tests.models import quantized_files as files
from tests.models.test_quantization import ROUNDING, WEIGHT_ONLY, rounded
from tests.parallel import targets

OPTIONS = {"dtype": "float32", "num_kv_blocks": 48, "seed": 7, "max_num_batched_tokens": 64}
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 131}


def prompts(vocab_size, count=10):
    return [[3 + (7 * i + 3 * j * j) % (vocab_size - 8) for j in range(5 + 4 * i)] for i in range(count)]


def check(folder, oracle=None, **sizes):
    """Greedy against Hugging Face; samples, log-probabilities and beams against one process.

    oracle: the same weights in a form that Hugging Face reads.
    """
    rows = prompts(SHAPE["vocab_size"])
    params = [
        *[SamplingParams(max_tokens=12, ignore_eos=True)] * len(rows),
        SamplingParams(max_tokens=8, temperature=1, n=3, seed=5, logprobs=3),
        SamplingParams(max_tokens=6, beam_width=3),
        SamplingParams(max_tokens=4, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.8, repetition_penalty=1.3, stop_token_ids=[5, 9, 11]),
    ]
    rows += rows[-4:]
    with LLM(str(folder), **OPTIONS, **sizes) as llm:
        answers = llm.generate(rows, params)
        llm.engine.scheduler.check_invariants()
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.generate(rows, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    for answer, right in zip(answers, expected, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(answer, name), getattr(right, name)
            if theirs is not None:
                assert torch.allclose(
                    torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, equal_nan=True
                )
                assert [len(ids) for ids in ours.top_token_ids] == [len(ids) for ids in theirs.top_token_ids]
        assert max(answer.token_ids, default=0) < SHAPE["vocab_size"]
    for answer, ids, gaps in zip(answers, *hf_greedy(oracle or folder, rows[:4], 12), strict=False):
        sure = next((i for i, gap in enumerate(gaps) if gap < 1e-3), 12)
        assert sure > 3
        assert answer.token_ids[:sure] == ids[:sure]


def test_tensor_and_pipeline_parallel_together(random_model):
    check(random_model("llama", **SHAPE), tensor_parallel_size=2, pipeline_parallel_size=2)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHAPES = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "gemma2": {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mixtral", {"tensor_parallel_size": 2}),
        ("qwen2_moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("gemma2", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("phi3", {"tensor_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 4}),
        ("llama", {"tensor_parallel_size": 8}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 3}),
        ("qwen2", {"tensor_parallel_size": 2}),
        ("qwen3", {"tensor_parallel_size": 4}),
        ("mistral", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen2", {"tensor_parallel_size": 2, "speculative": "ngram"}),
    ],
)
def test_every_size(random_model, family, sizes):
    check(random_model(family, **SHAPE, **SHAPES.get(family, {})), **sizes)


def test_rows_that_pad_the_vocabulary_or_have_no_text_are_never_chosen(tmp_path):
    """67 rows in shares of 34: the 68th is all zeros, a better logit than those that may be chosen, and is nowhere."""
    table = torch.full((67, 67), -5.0)
    table[:, 64:] = 5.0
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    folder = markov_checkpoint(tmp_path, table, pieces=[f" {i}" for i in range(64)], **heads)
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as llm:
        drawn = llm.generate([[1]] * 100, SamplingParams(max_tokens=10, temperature=1, logprobs=5))
        (best,) = llm.generate([[1]], SamplingParams(max_tokens=3))
    assert {token for answer in drawn for token in answer.token_ids} == {*range(64)}
    assert max(token for answer in drawn for top in answer.logprobs.top_token_ids for token in top) < 64
    expected = -5 - math.log(64 * math.exp(-5) + 3 * math.exp(5))
    assert [value for answer in drawn for value in answer.logprobs.logprobs] == pytest.approx(
        [expected] * 1000, abs=1e-4
    )
    assert best.token_ids == [0, 0, 0]


QUANTIZED = {
    "gptq, act-order": WEIGHT_ONLY["gptq v2, act-order"],
    "awq": WEIGHT_ONLY["awq"],
    "w4a16": WEIGHT_ONLY["w4a16"],
    "fp8": ROUNDING["w8a8 float"],
    "fp8 blocks": ROUNDING["fp8 blocks"],
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def quantized(random_model, tmp_path, packer, settings, family="llama"):
    return files.write(tmp_path, random_model(family, **{**SHAPE, **WIDE}), packer, settings)


def test_a_quantised_model_in_shares(random_model, tmp_path):
    folder, exact = quantized(random_model, tmp_path, *QUANTIZED["gptq, act-order"])
    check(folder, exact, tensor_parallel_size=2)


@pytest.mark.full
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 2), (2, 2)], ids="tp {0[0]} pp {0[1]}".format)
def test_every_quantised_kind(random_model, tmp_path, name, sizes):
    """float8 products keep the activations as they are on a CPU, so all of these are exact."""
    folder, exact = quantized(random_model, tmp_path, *QUANTIZED[name], family="qwen2")
    tp, pp = sizes
    check(folder, exact, tensor_parallel_size=tp, pipeline_parallel_size=pp)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 2), (2, 2)], ids="tp {0[0]} pp {0[1]}".format)
def test_activations_are_rounded_in_each_share(random_model, tmp_path, sizes):
    """Hugging Face's layers see inputs rounded to int8: a token's as a whole, or those that a rank has of them."""
    tp, pp = sizes
    folder, exact = quantized(random_model, tmp_path, *ROUNDING["w8a8"])
    row = prompts(SHAPE["vocab_size"], 6)[5]
    hooks = []
    for name, module in hf_model(exact).named_modules():
        if name.endswith("_proj"):
            size = module.in_features // (tp if name.endswith(("o_proj", "down_proj")) else 1)
            hooks.append(module.register_forward_pre_hook(lambda _, x, size=size: rounded(x[0], torch.int8, size)))
    try:
        expected = hf_logits(exact, row).log_softmax(dim=-1)
    finally:
        for hook in hooks:
            hook.remove()
    with LLM(str(folder), **OPTIONS, tensor_parallel_size=tp, pipeline_parallel_size=pp) as llm:
        (answer,) = llm.generate([row], [SamplingParams(max_tokens=1, prompt_logprobs=0)])
    found = torch.tensor(answer.prompt_logprobs.logprobs[1:])
    error = (found - expected[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]).abs()
    # a rounding that falls the other way moves a logit by far more than float32's noise, but few do
    assert error.median() <= 1e-3


def test_what_cannot_be_cut_is_refused_before_anything_is_loaded(random_model, monkeypatch):
    for name in ("Worker", "load_decoder"):
        monkeypatch.delattr(build, name)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3: 8 attention heads"):
        LLM(str(random_model("llama", **SHAPE)), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="4 layers"):
        LLM(str(random_model("llama", **SHAPE)), pipeline_parallel_size=5)


class Ranks:
    """Ranks without a model."""

    def __init__(self, **targets_by_rank):
        self.workers: list[Worker] = []
        self._targets = targets_by_rank

    def start(self, place, rendezvous):
        target = self._targets.get(f"r{place.rank}", targets.fake_rank)
        self.workers.append(Worker(str(place), target, place.rank))
        return self.workers[-1]

    def group(self):
        return RankGroup(self.start, places(2, 2), 3, max)

    def alive(self):
        return [worker.pid for worker in self.workers if psutil.pid_exists(worker.pid)]


def one_token(step):
    new = [NewSequence(7, [1, 2], 2, SamplingParams(), 0)] if step == 0 else []
    return ScheduledBatch(step, new, [ScheduledSequence(7, step + 1 if step else 0, 1 if step else 2, [], True)])


def step_on(group, steps, also_new=None):
    """also_new: makes batches larger than what a socket takes before somebody reads."""
    for step in range(1, steps):
        group.submit(replace(one_token(step), new=[also_new] if also_new else []))
        group.collect()


def test_ranks_agree_and_each_batch_reaches_all_of_them():
    ranks = Ranks()
    group = ranks.group()
    assert group.agreed == 3  # the greatest of what they sent
    for step in range(3):
        group.submit(one_token(step))
        assert group.collect() == StepOutput(step, [7], [[100 + step]])
    group.close()
    assert not ranks.alive()


def test_stages_before_the_last_are_told_what_was_sampled():
    before = BeforeLast()
    first = before.batch(one_token(0))
    assert [item.samples for item in first.scheduled] == [False]
    before.sampled(StepOutput(0, [7], [[100]]))
    assert [item.new_token_ids for item in before.batch(one_token(1)).scheduled] == [[100]]
    assert [item.new_token_ids for item in before.batch(one_token(2)).scheduled] == [[]]
    before.sampled(StepOutput(1, [7], [[101]]))
    again = replace(one_token(3), new=[NewSequence(7, [1, 2, 100, 101], 2, SamplingParams(), 0)], finished_ids=[7])
    assert [item.new_token_ids for item in before.batch(again).scheduled] == [[]]


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(victim):
    ranks = Ranks()
    group = ranks.group()
    group.submit(one_token(0))
    group.collect()
    os.kill(ranks.workers[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=rf"rank {victim} .*SIGKILL"):
        step_on(group, 1000)
    group.close()
    assert time.monotonic() - began < 10
    assert not ranks.alive()


def test_a_rank_that_is_killed_while_it_loads_is_named():
    ranks = Ranks(r2=targets.hanging_rank)

    def killer():
        while len(ranks.workers) < 4:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(ranks.workers[2].pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    with pytest.raises(WorkerFailed, match=r"rank 2 .*SIGKILL"):
        ranks.group()
    thread.join()
    assert not ranks.alive()


@pytest.mark.parametrize("phase", ["load", "run"])
def test_a_rank_that_is_stopped_is_named(monkeypatch, phase):
    monkeypatch.setattr(process, "HUNG_SECONDS", 1.5)
    ranks = Ranks(**({"r1": targets.stopped_rank} if phase == "load" else {}))
    with pytest.raises(WorkerFailed, match=r"rank 1 .* gave no sign of life"):
        with_a_stopped_rank(ranks)
    assert not ranks.alive()


def with_a_stopped_rank(ranks):
    group = ranks.group()
    os.kill(ranks.workers[1].pid, signal.SIGSTOP)
    try:
        step_on(group, 1000, NewSequence(8, list(range(1 << 18)), 2, SamplingParams(), 0))
    finally:
        group.close()


def test_a_rank_that_takes_its_time_is_waited_for(monkeypatch):
    monkeypatch.setattr(process, "HUNG_SECONDS", 1.5)
    ranks = Ranks(r2=targets.slow_rank)
    group = ranks.group()
    group.submit(one_token(0))
    assert group.collect().token_ids == [[100]]
    group.close()


def test_a_rank_that_refuses_says_why():
    ranks = Ranks(r1=targets.refusing_rank, r0=targets.hanging_rank)
    with pytest.raises(ConfigError, match="no memory"):
        ranks.group()
    assert not ranks.alive()


ROWS = [f"row {i}" for i in range(400)]


class Job:
    """The command over `ROWS`, in a process of its own; its workers are in others."""

    def __init__(self, model, folder, *options):
        self.folder = folder
        rows = folder / "in.jsonl"
        rows.write_text("\n".join(f'{{"prompt": "{row}"}}' for row in ROWS))
        code = "from paged_infer.cli import main; main()"
        command = ["run", str(rows), "-m", str(model), "-o", str(folder / "out.arrow"), "--progress", "none"]
        fixed = ["--ignore-eos", "--max-tokens", "60", "--dtype", "float32", "--temperature", "0"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code, *command, *fixed, *options]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def workers(self, phase, count):
        """Its processes, once they are there; of the phase `run`, once rows are written."""
        until = time.monotonic() + 120
        found = []
        while time.monotonic() < until and (len(found) < count or (phase == "run" and not self._has_written())):
            found = psutil.Process(self.process.pid).children(recursive=True)
            time.sleep(0.05)
        assert len(found) >= count
        return found

    def _has_written(self):
        path = self.folder / "out.arrow.partial"
        return path.exists() and path.stat().st_size > 4000

    def end(self, seconds):
        """Exit code and what it said on the way."""
        said = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode, said

    def token_ids(self):
        with pa.memory_map(str(self.folder / "out.arrow")) as source:
            return pa.ipc.open_stream(source).read_all()["token_ids"].to_pylist()


@pytest.fixture(scope="module")
def job_model(random_model):
    return random_model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def in_one_process(job_model):
    """The tokens of all rows."""
    with LLM(str(job_model), dtype="float32", num_kv_blocks=2000) as llm:
        answers = llm.generate(ROWS, SamplingParams(max_tokens=60, ignore_eos=True))
    return [answer.token_ids for answer in answers]


def all_gone(processes):
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.full
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", ["load", "run"])
def test_ctrl_c_leaves_no_process_and_a_job_that_goes_on(job_model, tmp_path, phase, times):
    options = "--tensor-parallel-size", "2"
    job = Job(job_model, tmp_path, *options)
    workers = job.workers(phase, 2)
    for _ in range(times):
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert job.end(40)[0] in ([130] if times == 1 else [130, -signal.SIGINT])  # seconds on an idle machine
    assert all_gone(workers)
    assert phase == "load" or (tmp_path / "out.arrow.partial").exists()
    assert Job(job_model, tmp_path, *options).end(120)[0] == 0
    assert [len(ids) for ids in job.token_ids()] == [60] * len(ROWS)


@pytest.mark.full
@pytest.mark.parametrize("phase", ["load", "run"])
def test_a_killed_job_leaves_no_process(random_model, tmp_path, phase):
    job = Job(
        random_model("llama", num_hidden_layers=4),
        tmp_path,
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "2",
    )
    workers = job.workers(phase, 4)
    job.process.kill()
    job.end(10)
    assert all_gone(workers)


@pytest.mark.full
@pytest.mark.parametrize("phase", ["load", "run"])
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_a_worker_killed_at_any_moment_costs_no_finished_row(job_model, in_one_process, tmp_path, kind, phase):
    choose = random.Random(f"{kind} {phase}")
    options = f"--{kind}-parallel-size", "2"
    job = Job(job_model, tmp_path, *options)
    workers = job.workers(phase, 2)
    time.sleep(choose.uniform(0, 1))
    victim = choose.randrange(2)
    workers[victim].kill()
    killed_at = time.monotonic()
    code, said = job.end(60)
    assert all_gone(workers)
    if kind == "data":
        assert code == 0
        assert "was killed by SIGKILL" in said
    else:
        assert time.monotonic() - killed_at < 15
        assert code == 1
        assert re.search(rf"rank [01] .*\(process {workers[victim].pid}\) was killed by SIGKILL", said)
        assert Job(job_model, tmp_path, *options).end(120)[0] == 0
    assert job.token_ids() == in_one_process
