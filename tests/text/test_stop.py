from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from paged_infer.text.detokenizer import output_text
from paged_infer.text.stop import StopChecker, StopMatch
from paged_infer.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import FAMILIES, whole_sequence

PIECES = ["foo", "ba", "r!x", "b", "bar", "a", "aab", "inj", "ury", " ", "<eos>"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens are exactly `PIECES`."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<eos>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    folder = tmp_path_factory.mktemp("pieces")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def run(
    tokenizer: Tokenizer, output: Sequence[str], stops: Sequence[str], prompt: Sequence[str] = (), **options: object
) -> StopMatch | None:
    checker = StopChecker(tokenizer, [PIECES.index(p) for p in prompt], stops, **options)  # type: ignore[arg-type]
    for piece in output:
        match = checker.add(PIECES.index(piece))
        if match is not None:
            return match
    return None


@pytest.mark.parametrize(
    ("output", "stops", "include", "expected"),
    [
        (["foo", "ba", "r!x"], ["bar"], False, StopMatch("foo", "bar", 3)),
        (["foo", "ba", "r!x"], ["bar"], True, StopMatch("foobar", "bar", 3)),
        (["foo", "ba", "r!x"], ["b", "bar"], False, StopMatch("foo", "b", 2)),
        (["foo", "bar"], ["bar", "b"], False, StopMatch("foo", "b", 2)),
        (["foo", "bar"], ["bar", "b"], True, StopMatch("foob", "b", 2)),
        (["foo", "ba", "r!x"], ["!", "bar"], False, StopMatch("foo", "bar", 3)),
        (["foo", "ba", "r!x"], ["x", "r"], False, StopMatch("fooba", "r", 3)),
        (["foo"], ["foo"], False, StopMatch("", "foo", 1)),
        (["foo", "foo"], ["oof"], False, StopMatch("f", "oof", 2)),
        (["a", "a", "aab"], ["aaab"], False, StopMatch("a", "aaab", 3)),
        (["foo", "ba", "r!x"], ["barn", "oba!"], False, None),
        (["inj", "ury", "<eos>"], ["stop"], False, None),
    ],
)
def test_where_an_output_stops(
    output: list[str], stops: list[str], include: bool, expected: StopMatch | None, pieces: Tokenizer
) -> None:
    assert run(pieces, output, stops, include_stop_str=include) == expected


def test_a_hidden_stop_token_takes_no_text_with_it(pieces: Tokenizer) -> None:
    output = [PIECES.index(piece) for piece in ("inj", "ury", "<eos>")]
    assert output_text(pieces, [0], output) == "injury"


def test_the_prompt_never_stops_an_output(pieces: Tokenizer) -> None:
    assert run(pieces, ["r!x", "foo"], ["bar", "foob"], prompt=["foo", "ba"]) is None
    assert run(pieces, ["foo", "bar"], ["bar"], prompt=["bar"]) == StopMatch("foo", "bar", 2)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [
        (0, StopMatch("", "b", 1)),
        (1, StopMatch("", "b", 1)),
        (2, StopMatch("bfoo", "b", 3)),
        (3, StopMatch("bfoo", "b", 3)),
        (4, StopMatch("bfooba", "b", 4)),
        (5, None),
    ],
)
def test_min_tokens_holds_stop_strings_back(min_tokens: int, expected: StopMatch | None, pieces: Tokenizer) -> None:
    assert run(pieces, ["b", "foo", "ba", "b", "a"], ["b"], min_tokens=min_tokens) == expected


def test_a_stop_begun_before_min_tokens_and_completed_after_counts(pieces: Tokenizer) -> None:
    assert run(pieces, ["foo", "ba", "r!x"], ["bar"], min_tokens=3) == StopMatch("foo", "bar", 3)
    assert run(pieces, ["foo", "ba", "r!x", "a"], ["bar"], min_tokens=4) is None


def test_forty_stops(pieces: Tokenizer) -> None:
    stops = [f"never {i}" for i in range(39)] + ["ury"]
    assert run(pieces, ["foo", "inj", "ury"], stops) == StopMatch("fooinj", "ury", 3)


def test_stops_see_the_spaces_before_punctuation(ours: Callable[[str], Tokenizer]) -> None:
    for family in FAMILIES:
        tokenizer = ours(family)
        prompt, output = tokenizer.encode("x"), tokenizer.encode("a ,b")[tokenizer._adds_bos :]
        checker = StopChecker(tokenizer, prompt, [" ,"])
        matches = [match for token in output if (match := checker.add(token))]
        assert matches[0].text.strip() == "a"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_random_outputs_stop_where_a_search_of_every_prefix_says(family: str, ours: Callable[[str], Tokenizer]) -> None:
    tokenizer = ours(family)
    parts = [*tokenizer.fallback_bytes][128:] or [*range(3, 259)]
    token = st.sampled_from(parts) | st.sampled_from(sorted(tokenizer.special_ids)) | st.integers(0, 599)
    ids = st.lists(token, max_size=25)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(ids, ids | st.text(max_size=12).map(tokenizer.encode), st.data())
    def check(prompt: list[int], output: list[int], data: st.DataObject) -> None:
        def text(count: int) -> str:
            return whole_sequence(tokenizer, prompt, output[:count])

        full = text(len(output)).replace("\ufffd", "")
        cuts = st.tuples(st.integers(0, max(len(full) - 1, 0)), st.integers(1, 4))
        drawn = data.draw(st.lists(cuts, min_size=1, max_size=3))
        stops = [stop for start, size in drawn if (stop := full[start : start + size])] or ["never"]
        min_tokens = data.draw(st.integers(0, 4))

        def expected() -> StopMatch | None:
            passed = len(text(min_tokens - 1).rstrip("\ufffd")) if min_tokens else 0
            for count in range(max(1, min_tokens), len(output) + 1):
                shown = text(count)
                found = [
                    (at, len(stop), stop)
                    for stop in stops
                    for at in range(len(shown))
                    if shown.startswith(stop, at) and at + len(stop) > passed
                ]
                if found:
                    at, _, stop = min(found)
                    return StopMatch(shown[:at], stop, count)
            return None

        checker = StopChecker(tokenizer, prompt, stops, min_tokens=min_tokens)
        matches = (checker.add(token) for token in output)
        assert next((match for match in matches if match), None) == expected()

    check()


def test_lone_surrogates_in_a_stop_string_match_what_replaces_them(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "\ufffd": 1, "b": 2}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    checker = StopChecker(Tokenizer.load(tmp_path), [], ["\ud83db"])
    assert [checker.add(token) for token in (0, 1, 2)] == [None, None, StopMatch("a", "\ufffdb", 3)]
