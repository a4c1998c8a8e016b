"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer folder.

GGUF keeps a vocabulary, merges (or scores), token types and the *name* of the pre-tokenizer; the splitting rule behind
the name lives in llama.cpp. `_PRE_TOKENIZERS` gives the rule of each name as the original models' `tokenizer.json`
spells it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_infer.config import ConfigError
from paged_infer.gguf_header import read_header
from paged_infer.text.conversion_cache import converted_folder

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_Json = dict[str, Any]

_BYTE_LEVEL: _Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: _Json = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> list[_Json]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ]


_GPT2 = [_BYTE_LEVEL]
_SINGLE_DIGITS = [_DIGITS, _BYTE_LEVEL]
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL)
_QWEN2 = _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL)
_QWEN35 = _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = _split(_CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL)
_GPT4O = _split(_CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL)

_PRE_TOKENIZERS: Mapping[str, Sequence[_Json]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("trillion", "granite-docling", "gigachat"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}

_WHOLE_WORDS_FIRST = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "tekken")
)
"""Names whose models take a word that is itself in the vocabulary before any merge (`ignore_merges`)."""

_POSITION_RANKED = frozenset(("gemma", "gemma2", "gemma3"))
"""Architectures whose merge order is the order of the vocabulary: their scores do not follow it."""


def tokenizer_folder(gguf: Path, cache_dir: Path) -> Path:
    """A folder with `tokenizer.json`, `tokenizer_config.json` and, if the file has one, `chat_template.jinja`.

    Converted on the first call and kept under `cache_dir`. Raises `ConfigError` for a kind of tokenizer or a
    pre-tokenizer name that is not known: guessing would silently change what the model reads.
    """
    return converted_folder([gguf], cache_dir, lambda folder: _convert(gguf, folder))


def _convert(gguf: Path, folder: Path) -> None:
    architecture = read_header(gguf, prefix="general.architecture").metadata.get("general.architecture", "")
    fields = {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value
        for key, value in read_header(gguf, prefix="tokenizer.").metadata.items()
    }
    kind = fields.get("model")
    if kind == "gpt2":
        spec = _byte_level(fields, gguf)
    elif kind == "llama":
        spec = _sentencepiece(fields, by_position=architecture in _POSITION_RANKED)
    else:
        raise ConfigError(
            f"{gguf}: a tokenizer of kind {kind!r} is not supported (gpt2 and llama are); "
            "give --tokenizer a folder with the model's tokenizer.json"
        )
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_config(fields), ensure_ascii=False, indent=2), encoding="utf-8"
    )
    if fields.get("chat_template"):
        (folder / "chat_template.jinja").write_text(fields["chat_template"], encoding="utf-8")


def _config(fields: Mapping[str, Any]) -> _Json:
    tokens = fields["tokens"]
    named = {
        "bos_token": fields.get("bos_token_id"),
        "eos_token": fields.get("eos_token_id"),
        "unk_token": fields.get("unknown_token_id"),
        "pad_token": fields.get("padding_token_id"),
    }
    ending = (fields.get("eot_token_id"), fields.get("eom_token_id"))
    config: _Json = {name: tokens[token] for name, token in named.items() if token is not None and token < len(tokens)}
    config["additional_eos_tokens"] = [tokens[token] for token in ending if token is not None]
    config["clean_up_tokenization_spaces"] = False
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config


def _byte_level(fields: Mapping[str, Any], gguf: Path) -> _Json:
    """GPT-2's byte-level BPE: the vocabulary is spelled in its 256-letter byte alphabet, merges are listed."""
    pre = fields.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{gguf}: pre-tokenizer {pre!r} is not known; give --tokenizer a folder with the model's tokenizer.json"
        )
    types = fields.get("token_type") or [_NORMAL] * len(fields["tokens"])
    vocab = {token: i for i, token in enumerate(fields["tokens"]) if types[i] != _UNUSED}
    merges = []
    for merge in fields.get("merges", ()):
        cut = merge.index(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left in vocab and right in vocab and left + right in vocab:
            merges.append(merge)
    steps = _PRE_TOKENIZERS[pre]
    return _spec(
        fields,
        vocab=vocab,
        merges=merges,
        added=_added_tokens(fields["tokens"], types),
        normalizer=None,
        pre_tokenizer=steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)},
        decoder=_BYTE_LEVEL,
        add_bos=bool(fields.get("add_bos_token", pre in _WHOLE_WORDS_FIRST)),
        model={
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
        },
    )


def _sentencepiece(fields: Mapping[str, Any], by_position: bool) -> _Json:
    """SentencePiece BPE: spaces are `▁`, unknown characters fall back to byte tokens, merges follow from the scores."""
    types = fields.get("token_type") or [_NORMAL] * len(fields["tokens"])
    blank = {i for i, token in enumerate(fields["tokens"]) if token and not token.strip(" ")}
    tokens = ["▁" * len(token) if i in blank else token for i, token in enumerate(fields["tokens"])]
    padding = {i for i, token in enumerate(tokens) if types[i] == _UNUSED and token.startswith("[PAD")}
    vocab = {token: i for i, token in enumerate(tokens) if i not in padding}
    scores = [-float(i) for i in range(len(tokens))] if by_position else fields["scores"]
    mergeable = (_NORMAL, _USER_DEFINED, _UNUSED)
    pieces = {token: i for token, i in vocab.items() if types[i] in mergeable and " " not in token}
    unknown = fields.get("unknown_token_id")
    prefix = bool(fields.get("add_space_prefix", True))
    to_mark: _Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoding: list[_Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoding.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _spec(
        fields,
        vocab=vocab,
        merges=_merges_from_scores(pieces, scores),
        added=[token for token in _added_tokens(tokens, types) if token["id"] not in blank],
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, to_mark]}
        if prefix
        else to_mark,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoding},
        add_bos=bool(fields.get("add_bos_token", True)),
        model={
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    )


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """Every way to join two pieces into a third, best score first; ties keep the order of the vocabulary."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-scores[i], -len(left), -len(right), left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3])
    return [f"{left} {right}" for *_, left, right in merges]


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[_Json]:
    """Tokens that are matched in the text as a whole: control tokens are special, user-defined ones are not."""
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] in (_CONTROL, _UNKNOWN),
        }
        for i, token in enumerate(tokens)
        if token and types[i] in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]


def _spec(
    fields: Mapping[str, Any],
    *,
    vocab: Mapping[str, int],
    merges: Sequence[str],
    added: list[_Json],
    normalizer: _Json | None,
    pre_tokenizer: _Json | None,
    decoder: _Json,
    add_bos: bool,
    model: _Json,
) -> _Json:
    """The `tokenizer.json` around a BPE model."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(
            fields["tokens"],
            fields.get("bos_token_id") if add_bos else None,
            fields.get("eos_token_id") if fields.get("add_eos_token") else None,
        ),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            **model,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _post_processor(tokens: Sequence[str], bos: int | None, eos: int | None) -> _Json | None:
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[_Json]:
        parts: list[_Json] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if bos is not None:
            parts.insert(0, {"SpecialToken": {"id": tokens[bos], "type_id": type_id}})
        if eos is not None:
            parts.append({"SpecialToken": {"id": tokens[eos], "type_id": type_id}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (bos, eos) if i is not None
        },
    }
