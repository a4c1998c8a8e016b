"""The engine end to end on tiny checkpoints: Hugging Face or arithmetic says what must come out.

Greedy runs use random models whose outputs depend on the whole prefix; stops, seeds and limits use Markov checkpoints,
where the next token is a table.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_infer.config import ConfigError
from paged_infer.llm import LLM
from paged_infer.types import Request, SamplingParams, noise_key
from tests.fixtures.checkpoints import chain_table, hf_greedy, markov_checkpoint, markov_table

MARGIN = 1e-3
"""Below this gap between the two best logits float rounding may choose either."""


def prompts_of(lengths: Sequence[int], vocab_size: int = 320, seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(4, vocab_size) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams.resolve({"max_tokens": max_tokens, "ignore_eos": True, **options})


def assert_greedy_equal(folder: Path, prompts: list[list[int]], outputs: list[list[int]], max_tokens: int) -> None:
    expected, margins = hf_greedy(folder, prompts, max_tokens)
    compared = 0
    for ours, theirs, gaps in zip(outputs, expected, margins, strict=True):
        certain = next((i for i, gap in enumerate(gaps) if gap < MARGIN), max_tokens)
        assert ours[:certain] == theirs[:certain]
        assert len(ours) == max_tokens
        compared += certain
    assert compared > 0.8 * len(prompts) * max_tokens


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_equals_hugging_face(random_model: Callable[..., Path], family: str, backend: str) -> None:
    folder = random_model(family)
    prompts = prompts_of([1, 5, 15, 16, 17, 33, 48, 64, 70, 3, 100])
    with LLM(str(folder), attention_backend=backend, max_num_batched_tokens=64, dtype="float32") as llm:
        outputs = [c.token_ids for c in llm.generate(prompts, greedy(20))]
    assert_greedy_equal(folder, prompts, outputs, 20)


@pytest.mark.parametrize("block_size", [4, 16])
def test_every_length_across_block_borders(llama: Path, block_size: int) -> None:
    prompts = prompts_of([1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
    longest = hf_greedy(llama, prompts, 9)[0]
    with LLM(str(llama), block_size=block_size, num_kv_blocks=64, dtype="float32") as llm:
        for max_tokens in range(10):
            answers = llm.generate(prompts, greedy(max_tokens))
            assert [c.token_ids for c in answers] == [ids[:max_tokens] for ids in longest]
            assert {c.finish_reason for c in answers} == {"length"}
        llm.engine.scheduler.check_invariants()
        assert llm.engine.scheduler.block_manager.num_free_blocks == 64


def test_blocks_of_other_prompts_are_not_served(llama: Path) -> None:
    """A pool of 8 blocks of 4 cycles through 30 prompts; the first one must not hit a block that holds other tokens."""
    prompts = prompts_of([9] * 31)
    prompts.append(prompts[0])
    with LLM(str(llama), block_size=4, num_kv_blocks=8, max_num_seqs=1, dtype="float32") as llm:
        outputs = [c.token_ids for c in llm.generate(prompts, greedy(8))]
    assert_greedy_equal(llama, prompts, outputs, 8)
    assert outputs[0] == outputs[-1]


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (31, 16), (32, 16), (33, 32)])
def test_a_prompt_that_is_cached_whole_still_runs_its_last_token(llama: Path, length: int, cached: int) -> None:
    prompt = prompts_of([length])[0]
    with LLM(str(llama), block_size=16, max_num_seqs=1, order="input", dtype="float32") as llm:
        first, second = llm.generate([prompt, prompt], greedy(8))
    with LLM(str(llama), block_size=16, prefix_caching=False, dtype="float32") as llm:
        alone = llm.generate([prompt], greedy(8))[0]
        assert alone.cached_tokens == 0
    assert first.token_ids == second.token_ids == alone.token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)


def test_prompts_may_be_given_as_rows_have_them(llama: Path) -> None:
    with LLM(str(llama), dtype="float32") as llm:
        plain, named = llm.generate([[1, 2, 3], {"prompt_token_ids": [1, 2, 3]}], greedy(4))
        assert plain.token_ids == named.token_ids
        assert len(llm.chat([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}])) == 1
        with pytest.raises(TypeError, match="5: expected"):
            llm.generate([5], greedy(4))  # type: ignore[list-item]
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.generate([[1]], {"max_tokens": 2})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="1 contexts for 2"):
            llm.score([[1]], [[2], [3]])
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], greedy(1))


def test_two_equal_prompts_in_one_batch(llama: Path) -> None:
    prompt = prompts_of([40])[0]
    with LLM(str(llama), dtype="float32") as llm:
        first, second = llm.generate([prompt, prompt], greedy(8))
    assert first.token_ids == second.token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 16, "prefix_caching": False},
        {"num_kv_blocks": 9},
        {"num_kv_blocks": 9, "prefix_caching": False},
        {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 5},
        {"order": "input"},
    ],
    ids=str,
)
def test_nothing_but_the_prompt_decides(llama: Path, options: dict[str, object]) -> None:
    """Alone or together, chunked or whole, cached or not, preempted or not: the same tokens."""
    shared = prompts_of([40], seed=5)[0]
    prompts = prompts_of([5, 17, 33, 48, 60], seed=1) + [shared + tail for tail in prompts_of([1, 9, 20], seed=2)]
    shuffled = list(range(len(prompts)))
    random.Random(3).shuffle(shuffled)
    with LLM(str(llama), dtype="float32", **options) as llm:
        outputs = [c.token_ids for c in llm.generate([prompts[i] for i in shuffled], greedy(64))]
        preemptions = llm.engine.scheduler.stats.num_preemptions
    assert_greedy_equal(llama, [prompts[i] for i in shuffled], outputs, 64)
    if options.get("num_kv_blocks") == 9:
        assert preemptions > 0


def test_the_pool_is_too_small_for_some(llama: Path) -> None:
    """Impossible rows fail with the numbers, the others finish, nothing hangs."""
    prompts = prompts_of([200] * 5) + prompts_of([10] * 10, seed=1) + prompts_of([90], seed=2)
    with LLM(str(llama), block_size=16, num_kv_blocks=6, dtype="float32") as llm:
        answers = llm.generate(prompts, greedy(30))
        assert llm.engine.memory.max_model_len == 96
    assert [c.finish_reason for c in answers] == ["error"] * 5 + ["length"] * 11
    assert "200 tokens" in str(answers[0].error)
    assert "96" in str(answers[0].error)
    assert [len(c.token_ids) for c in answers[5:]] == [30] * 10 + [6]
    assert_greedy_equal(llama, prompts[5:15], [c.token_ids for c in answers[5:15]], 30)


def test_context_limit(llama: Path) -> None:
    with LLM(str(llama), max_model_len=32, dtype="float32") as llm:
        p30, p31, p32, p33 = prompts_of([30, 31, 32, 33])
        answers = llm.generate([p31, p31, p32, p33, p30], [greedy(-1), greedy(2), greedy(1), greedy(1), greedy(100)])
        zero = llm.generate([p32], greedy(0))[0]
    assert [len(c.token_ids) for c in answers] == [1, 1, 0, 0, 2]
    assert [c.finish_reason for c in answers] == ["length", "length", "error", "error", "length"]
    assert "33 tokens" in str(answers[3].error)
    assert "32" in str(answers[3].error)
    assert (zero.finish_reason, zero.token_ids, zero.prompt_tokens) == ("length", [], 32)


def test_messages_count_as_the_template_renders_them(llama: Path) -> None:
    conversations = [[{"role": "user", "content": "ab " * n}] for n in range(1, 16)]
    with LLM(str(llama), dtype="float32") as llm:
        lengths = [answer.prompt_tokens for answer in llm.chat(conversations, greedy(1))]
    assert {31, 32, 33} & set(lengths)
    with LLM(str(llama), max_model_len=32, dtype="float32") as llm:
        answers = llm.chat(conversations, greedy(1))
    for length, answer in zip(lengths, answers, strict=True):
        assert (answer.finish_reason == "error") == (length >= 32)
        assert length < 32 or f"{length} tokens" in str(answer.error)


@pytest.mark.parametrize("bad", [320, -1, 2**63, "5", 5.5, True])
def test_bad_token_ids_fail_alone(llama: Path, bad: object) -> None:
    good = prompts_of([6, 7])
    with LLM(str(llama), dtype="float32") as llm:
        answers = llm.generate([good[0], [5, bad, 6], good[1]], greedy(4))  # type: ignore[list-item]
    assert [c.finish_reason for c in answers] == ["length", "error", "length"]
    assert "prompt_token_ids" in str(answers[1].error)
    assert answers[1].error_type == "invalid_parameter"
    assert_greedy_equal(llama, good, [answers[0].token_ids, answers[2].token_ids], 4)


def test_an_empty_prompt_fails_alone_unless_the_tokenizer_adds_bos(
    llama: Path, random_model: Callable[..., Path]
) -> None:
    with LLM(str(llama), dtype="float32") as llm:
        empty, fine = llm.generate(["", "hello"], greedy(3))
        assert empty.error_type == "empty_prompt"
        assert fine.finish_reason == "length"
    with LLM(str(random_model("llama", add_bos=True)), dtype="float32") as llm:
        empty, ids = llm.generate(["", [5, 6]], greedy(3))
        assert (empty.prompt_tokens, len(empty.token_ids)) == (1, 3)
        assert ids.prompt_tokens == 2  # what is given as ids gets no BOS


def test_settings_no_kernel_can_run_are_a_configuration_error(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='cpu'.*float16"):
        LLM(str(llama), attention_backend="cpu", dtype="float16")
    with pytest.raises(ConfigError, match=r"attention_backend='cpu'.*block size 4"):
        LLM(str(llama), attention_backend="cpu", block_size=4)


# --- Markov checkpoints: arithmetic --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens 0..7; every token is followed by 0..4 with fixed probabilities."""
    row = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.25, 4: 0.15}
    return markov_checkpoint(tmp_path_factory.mktemp("coin"), markov_table(8, dict.fromkeys(range(8), row)))


def test_a_seeded_row_never_changes(coin: Path) -> None:
    """Alone, among others, shuffled, with few or many slots, chunked and preempted: the same draws."""
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16)
    other = SamplingParams(temperature=1.0, max_tokens=40)
    with LLM(str(coin)) as llm:
        alone = llm.generate([[1, 2, 3]], seeded)[0].token_ids
        again = llm.generate([[1, 2, 3]], seeded)[0].token_ids
        other_seed = llm.generate([[1, 2, 3]], SamplingParams(seed=43, temperature=0.8, max_tokens=16))[0].token_ids
    assert alone == again
    assert alone != other_seed
    neighbours = prompts_of([1, 9, 17, 30, 33, 40, 50], vocab_size=8)
    for options in (
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 4},
        {"num_kv_blocks": 6},
        {"attention_backend": "reference", "block_size": 4},
    ):
        for place in (0, 3, 7):
            rows = [*neighbours[:place], [1, 2, 3], *neighbours[place:]]
            params = [other] * 8
            params[place] = seeded
            with LLM(str(coin), **options) as llm:
                assert llm.generate(rows, params)[place].token_ids == alone


def test_unseeded_rows_differ_between_runs_and_within_one(coin: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24)
    with LLM(str(coin)) as one, LLM(str(coin)) as two:
        first = [c.token_ids for c in one.generate([[1]] * 4, params)]
        second = [c.token_ids for c in two.generate([[1]] * 4, params)]
    assert len({tuple(ids) for ids in first + second}) == 8
    with LLM(str(coin), seed=7) as one, LLM(str(coin), seed=7) as two:
        assert [c.token_ids for c in one.generate([[1]] * 4, params)] == [
            c.token_ids for c in two.generate([[1]] * 4, params)
        ]


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in probabilities.items())


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, {"temperature": 1.0}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}, {3: 1.0}),
        ({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, {"temperature": 1.0, "top_p": 0.5}, {2: 3 / 7, 3: 4 / 7}),
        (
            {0: 0.6, 1: 0.25, 2: 0.1, 3: 0.05},
            {"temperature": 2.0, "min_p": 0.3},
            {i: math.sqrt(p) / sum(map(math.sqrt, (0.6, 0.25, 0.1))) for i, p in enumerate((0.6, 0.25, 0.1))},
        ),
        ({0: 0.6, 1: 0.4}, {"temperature": 1.0, "top_p": 1e-8}, {0: 1.0}),
        ({0: 0.6, 1: 0.4}, {"temperature": 1.0, "top_k": 10**7}, {0: 0.6, 1: 0.4}),
    ],
)
def test_frequencies(
    tmp_path: Path, row: dict[int, float], options: dict[str, float], expected: dict[int, float]
) -> None:
    folder = markov_checkpoint(tmp_path, markov_table(6, dict.fromkeys(range(6), row)))
    rows = 300
    with LLM(str(folder), seed=1) as llm:
        answers = llm.generate([[5]] * rows, greedy(10, **options))
    counts = Counter(token for c in answers for token in c.token_ids)
    assert sum(counts.values()) == rows * 10
    # 99.99 % quantile for three degrees of freedom
    assert chi_square(counts, expected) < 21.1


@pytest.fixture(scope="module")
def several_eos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain 1 → 2 → 7 → 3 → 6 → 4 → 5 → 1; generation settings call 6 and 7 EOS, the tokenizer 5."""
    return markov_checkpoint(
        tmp_path_factory.mktemp("eos"),
        chain_table(10, [1, 2, 7, 3, 6, 4, 5, 1]),
        tokenizer_eos=5,
        generation_config={"eos_token_id": [6, 7]},
    )


def test_every_eos_counts(several_eos: Path) -> None:
    with LLM(str(several_eos)) as llm:
        (default,) = llm.generate([[1]])
        assert (default.token_ids, default.finish_reason, default.stop_reason) == ([2, 7], "stop", None)
        assert default.text == " 2"
        (from_tokenizer,) = llm.generate([[4]])
        assert from_tokenizer.token_ids == [5]
        ignored = llm.generate([[1]], SamplingParams(ignore_eos=True, max_tokens=6))[0]
        assert (ignored.token_ids, ignored.finish_reason) == ([2, 7, 3, 6, 4, 5], "length")
        own = llm.generate([[1]], SamplingParams(ignore_eos=True, stop_token_ids=(6,), max_tokens=9))[0]
        assert (own.token_ids, own.finish_reason, own.stop_reason) == ([2, 7, 3, 6], "stop", "6")


def test_min_tokens_bans_every_eos(tmp_path: Path) -> None:
    row = {5: 0.4, 6: 0.3, 7: 0.2, 1: 0.1}
    folder = markov_checkpoint(
        tmp_path,
        markov_table(10, dict.fromkeys(range(10), row)),
        tokenizer_eos=5,
        generation_config={"eos_token_id": [6, 7]},
    )
    with LLM(str(folder)) as llm:
        (answer,) = llm.generate([[1]], SamplingParams(min_tokens=4, max_tokens=9))
        assert (answer.token_ids, answer.finish_reason) == ([1, 1, 1, 1, 5], "stop")
        rows = llm.generate([[1]] * 40, SamplingParams(min_tokens=4, max_tokens=9, temperature=5.0, seed=None))
        assert all(set(c.token_ids[:4]) <= {0, 1, 2, 3, 4, 8, 9} for c in rows)


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain <s> → foo → ba → r!x → z → </s>."""
    return markov_checkpoint(
        tmp_path_factory.mktemp("spelled"),
        chain_table(8, [0, 1, 2, 3, 4, 5]),
        eos_token_id=5,
        special_ids=(0,),
        pieces=["<s>", "foo", "ba", "r!x", "z", "</s>", "q", "w"],
    )


@pytest.mark.parametrize(
    ("options", "text", "ids", "stop"),
    [
        ({}, "foobar!xz", [1, 2, 3, 4, 5], None),
        ({"stop": ["bar"]}, "foo", [1, 2, 3], "bar"),
        ({"stop": "bar"}, "foo", [1, 2, 3], "bar"),
        ({"stop": ["bar"], "include_stop_str_in_output": True}, "foobar", [1, 2, 3], "bar"),
        ({"stop": ["b", "bar"]}, "foo", [1, 2], "b"),
        ({"stop": ["o"]}, "f", [1], "o"),
        ({"stop": ["nothing"]}, "foobar!xz", [1, 2, 3, 4, 5], None),
        ({"stop_token_ids": [3]}, "fooba", [1, 2, 3], "3"),
        ({"stop_token_ids": [3], "include_stop_str_in_output": True}, "foobar!x", [1, 2, 3], "3"),
        ({"stop": ["foo"], "min_tokens": 3}, "foobar!xz", [1, 2, 3, 4, 5], None),
        ({"stop": ["z"], "max_tokens": 3}, "foobar!x", [1, 2, 3], None),
    ],
)
def test_stops(spelled: Path, options: dict[str, object], text: str, ids: list[int], stop: str | None) -> None:
    with LLM(str(spelled)) as llm:
        (answer,) = llm.generate([[0]], SamplingParams.resolve(options))
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, ids, stop)
    assert answer.finish_reason == ("length" if options.get("max_tokens") == 3 else "stop")


def test_prompt_text_never_stops(spelled: Path) -> None:
    with LLM(str(spelled)) as llm:
        (answer,) = llm.generate([[1, 2]], SamplingParams(stop=("foo", "ob", "oba")))
    assert answer.text == "r!xz"


def test_each_row_keeps_its_own_options(spelled: Path) -> None:
    params = [
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=5, temperature=1.0, stop=("r!",)),
        SamplingParams(max_tokens=9, stop=("z",)),
    ]
    with LLM(str(spelled)) as llm:
        answers = llm.generate([[0]] * 3, params)
    assert [c.token_ids for c in answers] == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert [c.text for c in answers] == ["fooba", "fooba", "foobar!x"]
    assert [c.finish_reason for c in answers] == ["length", "stop", "stop"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_non_finite_logits_fail_alone(tmp_path: Path, value: float, temperature: float, backend: str) -> None:
    table = chain_table(8, [1, 2, 3, 4, 1])
    table[3, 5] = value
    folder = markov_checkpoint(tmp_path, table)
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1)
    with LLM(str(folder), attention_backend=backend) as llm:
        answers = llm.generate([[6], [1], [7], [5]], params)
    assert [c.finish_reason for c in answers] == ["length", "error", "length", "length"]
    assert answers[1].error_type == "non_finite_logits"
    assert "position 2: the model overflows here; --dtype float32 may help" in str(answers[1].error)
    assert [c.token_ids for c in answers] == [[6] * 6, [], [7] * 6, [5] * 6]


def test_what_float16_cannot_hold_is_each_rows_error(
    random_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint in bfloat16 whose activations pass 65504: said when it is loaded, never token 0 over and over."""
    shutil.copytree(random_model("llama"), tmp_path, dirs_exist_ok=True)
    tensors = {name: value.bfloat16() for name, value in load_file(tmp_path / "model.safetensors").items()}
    tensors["model.layers.0.mlp.down_proj.weight"] *= 3e4
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = {}
    for dtype in ("float32", "float16"):
        with LLM(str(tmp_path), dtype=dtype, attention_backend="reference") as llm:
            found[dtype] = llm.generate([[5, 6, 7], [9]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(caplog.records) == (1 if dtype == "float16" else 0)
    assert [answer.finish_reason for answer in found["float32"]] == ["length"] * 2
    assert [answer.error_type for answer in found["float16"]] == ["non_finite_logits"] * 2
    assert "bfloat16 checkpoint" in caplog.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_the_tokenizer_cannot_decode_are_never_sampled(tmp_path: Path, temperature: float) -> None:
    """Model rows 64..79 have no text and the best logits."""
    table = torch.zeros(80, 80)
    table[:, 64:] = 5.0
    table[:, 9] = 1.0
    folder = markov_checkpoint(tmp_path, table, pieces=[*(f" {i}" for i in range(63)), "<end>"], eos_token_id=63)
    with LLM(str(folder), seed=3) as llm:
        answers = llm.generate([[1]] * 100, greedy(10, temperature=temperature))
        structured = SamplingParams(max_tokens=4, temperature=temperature, regex=r"( \d+)*", logprobs=5)
        within = llm.generate([[1]] * 20, structured)
    seen = {token for c in answers for token in c.token_ids}
    assert max(seen) < 64
    assert [c.error for c in within] == [None] * 20
    assert max(token for c in within for token in c.token_ids) < 64
    assert max(token for c in within for top in c.logprobs.top_token_ids for token in top) < 64
    assert seen == {9} if temperature == 0 else len(seen) > 50


def test_greedy_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    table = markov_table(8, {t: {2: 0.5, 5: 0.5} for t in range(8)})
    with LLM(str(markov_checkpoint(tmp_path, table))) as llm:
        assert llm.generate([[5]], greedy(5))[0].token_ids == [2] * 5


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tokens_never_pass_the_limits(tmp_path: Path, backend: str) -> None:
    folder = markov_checkpoint(tmp_path, chain_table(8, [1, 2, 3, 1]), max_position_embeddings=24)
    with LLM(str(folder), attention_backend=backend) as llm:
        for max_tokens in range(1, 13):
            (answer,) = llm.generate([[1] * (24 - max_tokens)], greedy(max_tokens))
            assert len(answer.token_ids) == max_tokens
            assert answer.token_ids == [2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1][:max_tokens]


def test_rows_can_join_while_others_run(coin: Path) -> None:
    with LLM(str(coin)) as llm:
        engine = llm.engine
        params = SamplingParams(seed=5, temperature=1.0, max_tokens=12)
        engine.add(Request(0, [1], params, noise_key(5, 0, 0)))
        answers = {}
        for _ in range(6):
            answers.update({c.request_id: c.token_ids for c in engine.step()})
        engine.add(Request(1, [1], params, noise_key(5, 0, 1)))
        while engine.has_unfinished():
            answers.update({c.request_id: c.token_ids for c in engine.step()})
        assert answers[0] == answers[1]
        assert engine.stats.output_tokens == 24
