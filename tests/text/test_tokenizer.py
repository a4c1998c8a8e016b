from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paged_infer.config import ConfigError
from paged_infer.text.conversion_cache import converted_folder
from paged_infer.text.tokenizer import Tokenizer, well_formed
from tests.text.tokenizer_folders import FAMILIES, texts

Load = Callable[[str], Tokenizer]
Oracle = Callable[[str], Any]

every_family = pytest.mark.parametrize("family", list(FAMILIES))


@every_family
def test_encodes_as_hugging_face(family: str, ours: Load, theirs: Oracle) -> None:
    assert ours(family).encode_batch(texts()) == theirs(family)(list(texts())).input_ids


@every_family
def test_decodes_as_hugging_face(family: str, ours: Load, theirs: Oracle) -> None:
    tokenizer, oracle = ours(family), theirs(family)
    batch = tokenizer.encode_batch(texts())
    for skip in (True, False):
        expected = [oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for ids in batch]
        assert tokenizer.decode_batch(batch, skip_special_tokens=skip) == expected
        assert [tokenizer.decode(ids, skip_special_tokens=skip) for ids in batch] == expected


@every_family
def test_knows_the_special_tokens_of_hugging_face(family: str, ours: Load, theirs: Oracle) -> None:
    tokenizer, oracle = ours(family), theirs(family)
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.eos_token_ids == {oracle.eos_token_id}
    assert tokenizer.special_ids == {token for token, entry in oracle.added_tokens_decoder.items() if entry.special}
    assert tokenizer.vocab_size == tokenizer.num_decodable_ids == len(oracle)
    assert tokenizer.undecodable_ids == ()


@pytest.mark.parametrize("written", ["': 'search", " ...", " 'sensing", "a ,b", " do n't ?"])
@every_family
def test_decoding_keeps_the_spaces_before_punctuation(family: str, written: str, ours: Load) -> None:
    tokenizer = ours(family)
    assert tokenizer.decode(tokenizer.encode(written)) == written


def test_one_bos_wherever_the_text_comes_from(ours: Load, theirs: Oracle) -> None:
    tokenizer = ours("llama3")
    bos = tokenizer.bos_token_id
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages)
    assert chat.count(bos) == 1
    assert tokenizer.encode(tokenizer.render_chat(messages)) == chat
    assert tokenizer.encode("Hi").count(bos) == 1
    assert theirs("llama3")(tokenizer.render_chat(messages)).input_ids == [bos, *chat]


@pytest.mark.parametrize(("family", "opening"), [("gpt2", []), ("llama3", ["<|begin_of_text|>"]), ("gemma", ["<bos>"])])
def test_an_empty_prompt_is_what_the_tokenizer_adds_by_itself(family: str, opening: list[str], ours: Load) -> None:
    tokenizer = ours(family)
    ids = tokenizer.encode("")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(opening)
    assert len(ids) == len(opening)


@every_family
def test_surrogates(family: str, ours: Load) -> None:
    tokenizer = ours(family)
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")
    assert tokenizer.encode_batch(["x\ud83d", "a\udc00b"]) == tokenizer.encode_batch(["x\ufffd", "a\ufffdb"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", "plain"), ("\ud83d", "\ufffd"), ("\udc00\ud83d", "\ufffd\ufffd"), ("\ud83d\ud83d\ude00", "\ufffd😀")],
)
def test_well_formed(text: str, expected: str) -> None:
    assert well_formed(text) == expected


def test_ids_that_stand_for_nothing_are_named(tmp_path: Path) -> None:
    Backend(models.BPE(vocab={"a": 0, "b": 3}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.num_decodable_ids, tokenizer.undecodable_ids) == (4, 2, (1, 2))
    assert [tokenizer.is_decodable(i) for i in range(-1, 5)] == [False, True, False, False, True, False]
    assert tokenizer.decode([1, 0, 2]) == "a"


def test_special_tokens_that_only_the_configuration_names(
    tmp_path: Path, folder_of: Callable[[str], Path], theirs: Oracle
) -> None:
    from transformers import AutoTokenizer

    shutil.copy(folder_of("gpt2") / "tokenizer.json", tmp_path)
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|stop|>", "lstrip": False, "rstrip": True},
        "additional_special_tokens": ["<|extra|>"],
        "image_token": "<image>",
        "added_tokens_decoder": {"900": {"content": "<tool>", "special": False, "normalized": False}},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, oracle = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<|stop|> b<|extra|><image><tool> c"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == oracle.decode(oracle(text).input_ids, skip_special_tokens=True) == "ab<tool> c"
    assert len(tokenizer.eos_token_ids) == 1
    assert ids.count(next(iter(tokenizer.eos_token_ids))) == 1


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    backend = Backend.from_file(str(folder_of("gpt2") / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=12)
    backend.save(str(tmp_path / "tokenizer.json"))
    short, long = Tokenizer.load(tmp_path).encode_batch(["a", "one two three four five six seven"])
    assert len(short) == 1
    assert len(long) > 7


def test_slow_files_are_converted_once(
    tmp_path: Path, folder_of: Callable[[str], Path], ours: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_INFER_CACHE", str(tmp_path / "cache"))
    model = json.loads((folder_of("gpt2") / "tokenizer.json").read_text())["model"]
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "vocab.json").write_text(json.dumps(model["vocab"]))
    (slow / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    plain = [text for text in texts() if "<|im" not in text]
    assert Tokenizer.load(slow).encode_batch(plain) == ours("gpt2").encode_batch(plain)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Tokenizer.load(slow).encode("again") == ours("gpt2").encode("again")


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_an_unusable_folder_is_a_configuration_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_loading_and_encoding_never_import_transformers(folder_of: Callable[[str], Path]) -> None:
    script = (
        "import sys; from paged_infer.text.tokenizer import Tokenizer; t = Tokenizer.load(sys.argv[1]);"
        "t.apply_chat_template([{'role': 'user', 'content': 'Hi'}]);"
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder_of("llama3"))], check=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no tokenizer found \(tokenizer\.json, or files it can be made from\)"),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: not a readable tokenizer: "),
        ({"tokenizer.model": "no sentencepiece"}, r"its tokenizer cannot be converted to tokenizer\.json: "),
        ({"vocab.json": "{", "merges.txt": ""}, r"its tokenizer cannot be converted to tokenizer\.json: "),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("PAGED_INFER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(folder)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path, folder_of: Callable[[str], Path]) -> None:
    shutil.copy(folder_of(next(iter(FAMILIES))) / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: Expecting"):
        Tokenizer.load(tmp_path)


def test_a_chat_template_that_is_not_there_is_named(ours: Load) -> None:
    with pytest.raises(ConfigError, match="no chat template 'rag' comes with this tokenizer; it has: "):
        ours(next(iter(FAMILIES))).chat_template("rag")


def test_a_cache_that_cannot_be_written_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"cannot keep a converted tokenizer in .*; set PAGED_INFER_CACHE"):
        converted_folder([tmp_path / "source"], tmp_path / "cache", lambda folder: None)
