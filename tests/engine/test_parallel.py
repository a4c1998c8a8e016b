"""Ranks that run one model together answer as Hugging Face and as one process do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch

from paged_infer.config import ConfigError
from paged_infer.engine import build
from paged_infer.engine.batch import NewSequence, ScheduledBatch, ScheduledSequence, StepOutput
from paged_infer.engine.executor import BeforeLast, RankGroup
from paged_infer.llm import LLM
from paged_infer.parallel.place import places
from paged_infer.parallel.process import Worker, WorkerFailed
from paged_infer.types import SamplingParams
from tests.fixtures.checkpoints import hf_greedy, hf_logits, hf_model
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


def step_on(group, steps):
    for step in range(1, steps):
        group.submit(one_token(step))
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


def test_a_rank_that_refuses_says_why():
    ranks = Ranks(r1=targets.refusing_rank, r0=targets.hanging_rank)
    with pytest.raises(ConfigError, match="no memory"):
        ranks.group()
    assert not ranks.alive()


@pytest.mark.full
@pytest.mark.parametrize("phase", ["load", "run"])
def test_ctrl_c_leaves_no_process_and_a_job_that_goes_on(random_model, tmp_path, phase):
    rows = tmp_path / "in.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "row {i}"}}' for i in range(400)))
    code = "from paged_infer.cli import main; main()"
    command = ["run", str(rows), "-m", str(random_model("llama", **SHAPE)), "-o", str(tmp_path / "out.arrow")]
    options = ["--tensor-parallel-size", "2", "--ignore-eos", "--max-tokens", "60", "--dtype", "float32"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    job = subprocess.Popen([sys.executable, "-c", code, *command, *options], env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    children = []
    while time.monotonic() < until and (len(children) < 2 or (phase == "run" and not partial(tmp_path))):
        children = psutil.Process(job.pid).children(recursive=True)
        time.sleep(0.05)
    assert len(children) >= 2
    job.send_signal(signal.SIGINT)
    assert job.wait(40) == 130  # seconds on an idle machine
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert phase == "load" or (tmp_path / "out.arrow.partial").exists()


def partial(folder):
    """Whether rows have been written."""
    path = folder / "out.arrow.partial"
    return path.exists() and path.stat().st_size > 4000
