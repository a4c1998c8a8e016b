from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_infer.text.detokenizer import IncrementalDetokenizer, output_text, output_texts
from paged_infer.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import FAMILIES, whole_sequence

Load = Callable[[str], Tokenizer]

every_family = pytest.mark.parametrize("family", list(FAMILIES))
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a byte, whatever merges the tokenizer knows."""
    if tokenizer.fallback_bytes:
        ids = {byte: token for token, byte in tokenizer.fallback_bytes.items()}
    else:
        from tokenizers.pre_tokenizers import ByteLevel

        letters = sorted(ByteLevel.alphabet(), key=lambda letter: (ord(letter) >= 256, ord(letter)))
        printable = [byte for byte in range(256) if chr(byte) in letters]
        others = [byte for byte in range(256) if byte not in printable]
        order = dict(zip([*printable, *others], letters, strict=True))
        ids = {byte: tokenizer._backend.token_to_id(letter) for byte, letter in order.items()}
    return [ids[byte] for byte in text.encode()]


@every_family
def test_characters_split_between_tokens_come_out_whole(family: str, ours: Load) -> None:
    tokenizer = ours(family)
    prompt, output = tokenizer.encode("x"), byte_ids(tokenizer, "ď 🌶 世")
    assert output_text(tokenizer, prompt, output) == "ď 🌶 世"
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces = [detokenizer.add([token]) for token in output]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == "ď 🌶 世"


@every_family
def test_an_incomplete_end_is_the_decode_of_the_ids(family: str, ours: Load) -> None:
    tokenizer = ours(family)
    prompt, output = tokenizer.encode("x"), byte_ids(tokenizer, "ď🌶")[:-1]
    expected = tokenizer.decode(prompt + output).removeprefix("x")
    assert expected.endswith("\ufffd")
    assert output_text(tokenizer, prompt, output) == expected
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert detokenizer.add(output) + detokenizer.flush() == expected


@every_family
def test_a_prompt_that_ends_inside_a_character(family: str, ours: Load) -> None:
    tokenizer = ours(family)
    prompt = tokenizer.encode("Hello world ") + byte_ids(tokenizer, "🌶")
    assert output_text(tokenizer, prompt[:-1], prompt[-1:]) == "🌶"
    detokenizer = IncrementalDetokenizer(tokenizer, prompt[:-1])
    assert detokenizer.add(prompt[-1:]) + detokenizer.flush() == "🌶"


def test_the_space_of_the_first_word_stays(ours: Load) -> None:
    for family in FAMILIES:
        tokenizer = ours(family)
        ids = tokenizer.encode("The capital of France is Paris.")
        for cut in range(1, len(ids)):
            shown = tokenizer.decode(ids[:cut])
            assert shown + output_text(tokenizer, ids[:cut], ids[cut:]) == "The capital of France is Paris."


def test_text_after_a_special_token_keeps_its_space(ours: Load) -> None:
    tokenizer = ours("llama2")
    space_word = tokenizer.encode("x the")[-1]
    assert tokenizer.decode([space_word, space_word]).endswith(" the")
    eos = next(iter(tokenizer.eos_token_ids))
    output = [space_word, eos, space_word]
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    pieces = [detokenizer.add([token]) for token in output]
    assert pieces == [" the", "", " the"]
    assert output_text(tokenizer, tokenizer.encode("x"), output) == " the the"


def sequences(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids: mostly parts of characters, in runs, with special tokens and words between."""
    parts = [*tokenizer.fallback_bytes][128:] or [*range(3, 259)]
    token = st.sampled_from(parts) | st.sampled_from(sorted(tokenizer.special_ids)) | st.integers(0, 599)
    return st.lists(token, max_size=60)


@every_family
def test_random_ids_equal_the_whole_sequence_rule(family: str, ours: Load) -> None:
    tokenizer = ours(family)
    ids = sequences(tokenizer)

    @fuzz
    @given(ids, ids, st.lists(st.integers(1, 5), max_size=60))
    def check(prompt: list[int], output: list[int], steps: list[int]) -> None:
        expected = whole_sequence(tokenizer, prompt, output)
        assert output_text(tokenizer, prompt, output) == expected
        assert output_texts(tokenizer, [(prompt, output), ([], output)]) == [expected, tokenizer.decode(output)]
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        shown, at = "", 0
        for step in [*steps, len(output)]:
            shown += detokenizer.add(output[at : at + step])
            at += step
            assert expected.startswith(shown)
        assert shown + detokenizer.flush() == expected

    check()


@every_family
def test_real_text_cut_anywhere(family: str, ours: Load) -> None:
    tokenizer = ours(family)

    @fuzz
    @given(st.text(max_size=40), st.data())
    def check(text: str, data: st.DataObject) -> None:
        ids = tokenizer.encode(text)
        cut = data.draw(st.integers(0, len(ids)))
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut])
        shown = "".join(detokenizer.add([token]) for token in ids[cut:]) + detokenizer.flush()
        assert shown == output_text(tokenizer, ids[:cut], ids[cut:]) == whole_sequence(tokenizer, ids[:cut], ids[cut:])

    check()


@every_family
@pytest.mark.parametrize("kind", ["text", "bytes", "broken bytes"])
def test_cost_is_linear_in_the_output(family: str, kind: str, ours: Load) -> None:
    """Counts what the library is asked to decode, so that no clock is involved."""
    tokenizer = ours(family)
    unit = {"text": "some words ", "bytes": "世", "broken bytes": "世"}[kind]
    one = tokenizer.encode(unit)[1:] if kind == "text" else byte_ids(tokenizer, unit)
    output = (one[:2] if kind == "broken bytes" else one) * 1000
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:  # type: ignore[override]
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    counting = Counting.__new__(Counting)
    counting.__dict__.update(tokenizer.__dict__)
    detokenizer = IncrementalDetokenizer(counting, tokenizer.encode("x"))
    for token in output:
        detokenizer.add([token])
    detokenizer.flush()
    assert decoded < 40 * len(output)


def test_a_long_prompt_costs_nothing(ours: Load) -> None:
    tokenizer = ours("gpt2")
    prompt = tokenizer.encode("many words " * 50_000)
    start = time.process_time()
    for _ in range(100):
        assert output_text(tokenizer, prompt, prompt[:3]) == tokenizer.decode(prompt[:3])
    assert time.process_time() - start < 0.5
