from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from paged_infer.config import ConfigError
from paged_infer.gguf_header import read_header
from paged_infer.text.gguf_tokenizer import tokenizer_folder
from paged_infer.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_gguf(path: Path, tokens: Sequence[str], types: Sequence[int], model: str, **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def vocabulary(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The `tokenizer.json` of a folder, and its tokens by id."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    return spec, sorted(vocab, key=vocab.__getitem__)


@pytest.fixture
def llama3_gguf(tmp_path: Path, folder_of: Callable[[str], Path]) -> Callable[..., Path]:
    """The Llama-3-like tokenizer written the way llama.cpp's converter writes it."""
    spec, tokens = vocabulary(folder_of("llama3"))
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in spec["added_tokens"]}

    def write(pre: str = "llama-bpe", padding: int = 3) -> Path:
        return write_gguf(
            tmp_path / "model.gguf",
            [*tokens, *(f"[PAD{i}]" for i in range(padding))],
            [*(kinds.get(token, NORMAL) for token in tokens), *[UNUSED] * padding],
            "gpt2",
            tokenizer_pre=pre,
            token_merges=[" ".join(pair) for pair in spec["model"]["merges"]],
            bos_token_id=tokens.index("<|begin_of_text|>"),
            eos_token_id=tokens.index("<|end_of_text|>"),
            eot_token_id=tokens.index("<|eot_id|>"),
            add_bos_token=True,
            chat_template="{{ bos_token }}{{ messages[0].content }}",
        )

    return write


def test_a_byte_level_tokenizer_survives_the_trip(
    tmp_path: Path, llama3_gguf: Callable[..., Path], ours: Callable[[str], Tokenizer]
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder(llama3_gguf(), tmp_path / "cache"))
    assert tokenizer.encode_batch(texts()) == ours("llama3").encode_batch(texts())
    assert tokenizer.special_ids == ours("llama3").special_ids
    assert tokenizer.vocab_size == ours("llama3").vocab_size
    assert tokenizer.eos_token_ids == {tokenizer.encode(name)[-1] for name in ("<|end_of_text|>", "<|eot_id|>")}
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<|begin_of_text|>Hi"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", ["It", "'S", " x", "123", "45", " ", " (", "a", ")\n\n", "b"]),
        ("qwen2", ["It", "'S", " x", "1", "2", "3", "4", "5", " ", " (", "a", ")\n\n", "b"]),
        ("gpt-2", ["It", "'", "S", " x", "12345", " ", " (", "a", ")", "\n", "\n", "b"]),
        ("default", ["It", "'", "S", " x", "12345", " ", " (", "a", ")", "\n", "\n", "b"]),
        ("smollm", ["It", "'", "S", " x", "1", "2", "3", "4", "5", " ", " (", "a", ")", "\n", "\n", "b"]),
        ("gpt-4o", ["It'S", " x", "123", "45", " ", " (", "a", ")\n\n", "b"]),
        ("tekken", ["It", "'S", " x", "1", "2", "3", "4", "5", " ", " (", "a", ")\n\n", "b"]),
    ],
)
def test_the_named_pre_tokenizer_splits_as_its_model_does(
    tmp_path: Path, llama3_gguf: Callable[..., Path], pre: str, words: list[str]
) -> None:
    """Words worked out by hand from each model's published pattern."""
    tokenizer = Tokenizer.load(tokenizer_folder(llama3_gguf(pre), tmp_path / "cache"))
    backend = tokenizer._backend
    text = "It'S x12345  (a)\n\nb"
    found = [text[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]  # type: ignore[union-attr]
    assert found == words


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE: always join the neighbours whose union scores best, the leftmost of equals."""
    pieces = list(text)
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joined:
            return pieces
        _, at = min(joined)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("prefix_space", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(
    tmp_path: Path, folder_of: Callable[[str], Path], prefix_space: bool
) -> None:
    _, tokens = vocabulary(folder_of("llama2"))
    ranks = {piece: rank for rank, piece in enumerate(tokens[259:])}
    tokens[259:] = random.Random(3).sample(tokens[259:], len(ranks))
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(ranks[piece]) for piece in tokens[259:]]
    path = write_gguf(
        tmp_path / "model.gguf",
        tokens,
        types,
        "llama",
        token_scores=scores,
        unk_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=prefix_space,
    )
    tokenizer = Tokenizer.load(tokenizer_folder(path, tmp_path / "cache"))
    by_piece = dict(zip(tokens[259:], scores[259:], strict=True))
    ids = {token: i for i, token in enumerate(tokens)}
    for text in (text[:250] for text in texts() if "</s>" not in text):
        marked = ("▁" if prefix_space and text else "") + text.replace(" ", "▁")
        expected = [1]
        for piece in merge_by_score(marked, by_piece):
            expected += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_ids == {0, 1, 2}


def test_runs_of_spaces_that_a_file_spells_with_spaces(tmp_path: Path) -> None:
    tokens = ["<unk>", "<bos>", "▁", "a", "  ", "    "]
    path = write_gguf(
        tmp_path / "model.gguf",
        tokens,
        [UNKNOWN, CONTROL, NORMAL, NORMAL, USER_DEFINED, USER_DEFINED],
        "llama",
        token_scores=[0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
        unk_token_id=0,
        bos_token_id=1,
        add_bos_token=False,
        add_space_prefix=False,
    )
    tokenizer = Tokenizer.load(tokenizer_folder(path, tmp_path / "cache"))
    assert tokenizer.encode("a    a  a a") == [3, 5, 3, 4, 3, 2, 3]
    assert tokenizer.decode([3, 5, 3, 4, 3, 2, 3]) == "a    a  a a"


def test_what_is_not_known_is_refused(tmp_path: Path, llama3_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"'brand-new' is not known; give --tokenizer"):
        tokenizer_folder(llama3_gguf("brand-new"), tmp_path / "cache")
    bert = write_gguf(tmp_path / "bert.gguf", ["a"], [NORMAL], "bert")
    with pytest.raises(ConfigError, match=r"'bert'"):
        tokenizer_folder(bert, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert not list((tmp_path / "cache" / "tokenizers").iterdir())


def test_converted_once_and_again_when_the_file_changes(tmp_path: Path, llama3_gguf: Callable[..., Path]) -> None:
    cache = tmp_path / "cache"
    first = tokenizer_folder(llama3_gguf(), cache)
    stamp = (first / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(tmp_path / "model.gguf", cache) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == stamp
    assert tokenizer_folder(llama3_gguf("qwen2", padding=5), cache) != first


def test_metadata_as_the_reference_reader_gives_it(llama3_gguf: Callable[..., Path]) -> None:
    path = llama3_gguf()
    reader = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert read_header(path).metadata == expected
    assert set(read_header(path, prefix="tokenizer.chat").metadata) == {"tokenizer.chat_template"}


@pytest.mark.parametrize("damage", ["empty", "other", "cut"])
def test_an_unreadable_file_is_a_configuration_error(
    tmp_path: Path, llama3_gguf: Callable[..., Path], damage: str
) -> None:
    whole = llama3_gguf().read_bytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes({"empty": b"", "other": b"PK" * 100, "cut": whole[: len(whole) // 2]}[damage])
    with pytest.raises(ConfigError, match=r"damaged\.gguf"):
        read_header(path)


@pytest.mark.demo_model
def test_smollm2(tmp_path: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of the published SmolLM2 tokenizer, which splits numbers into single digits."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = Tokenizer.load(tokenizer_folder(smollm2_gguf, tmp_path))
    assert tokenizer.encode("Hello, we can use") == [19556, 28, 392, 416, 722]
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, {2}, 49152)
    assert tokenizer.special_ids == set(range(17))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.full
@pytest.mark.demo_model
def test_smollm2_as_hugging_face_with_its_digits_split(tmp_path: Path, smollm2_gguf: Path) -> None:
    """Transformers reads the same file but ignores the pre-tokenizer's name, so it gets the digits rule here."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = Tokenizer.load(tokenizer_folder(smollm2_gguf, tmp_path))
    ids = tokenizer.encode_batch(texts())
    assert ids == oracle(list(texts())).input_ids
    assert tokenizer.decode_batch(ids) == [
        oracle.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in ids
    ]


def test_a_value_of_a_kind_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99))
    with pytest.raises(ConfigError, match=r"x\.gguf: not a readable GGUF file \(unknown value type 99\)"):
        read_header(path)
