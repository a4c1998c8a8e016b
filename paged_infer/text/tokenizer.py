"""A model's tokenizer: text to token ids and back, chats included.

Works from `tokenizer.json` through the `tokenizers` library alone. Transformers is imported only for folders that lack
that file, once, to convert them. Ids are what Hugging Face's `tokenizer(text).input_ids` gives, with one exception: a
text that already starts with the BOS token gets no second one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paged_infer.config import ConfigError, cache_dir
from paged_infer.text.chat_template import ChatTemplate
from paged_infer.text.control_tokens import ControlTokens
from paged_infer.text.conversion_cache import converted_folder
from paged_infer.types import RowError


def well_formed(text: str) -> str:
    """The text with UTF-16 halves joined, and lone surrogates, which no encoding can hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Tokenizer:
    """Encodes prompts and chats, decodes outputs. Immutable once loaded, safe to share between threads.

    Attributes:
        bos_token_id: the token that opens a sequence, None if the model has none.
        eos_token_id: the token that it calls EOS, None if it names none.
        eos_token_ids: the tokens that end a sequence, as far as the tokenizer knows.
        special_ids: control tokens, left out of decoded text.
        fallback_bytes: for SentencePiece-style tokenizers, the byte that each byte token (`<0x0A>`) stands for.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any], chat_templates: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        named = _named_tokens(config)
        _add_tokens(backend, config, named)
        names = {name: token.content for name, token in named.items()}
        self._templates = {name: ChatTemplate(source, names) for name, source in chat_templates.items()}
        self._control_tokens: dict[str, ControlTokens] = {}
        self.bos_token_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
        self.eos_token_id = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
        endings = [names.get("eos_token"), *config.get("additional_eos_tokens", ())]
        ids = [backend.token_to_id(token) for token in endings if token is not None]
        self.eos_token_ids = frozenset(token for token in ids if token is not None)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.fallback_bytes = _fallback_bytes(backend)
        opening = backend.encode("", add_special_tokens=True).ids
        self._adds_bos = self.bos_token_id is not None and opening[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, path: Path | str, *, chat_template: str | None = None) -> Tokenizer:
        """Load from a model folder, or from a single `tokenizer.json`.

        A folder without `tokenizer.json` is converted through transformers, and the result kept in the cache.

        Args:
            path: the folder or file.
            chat_template: a template to use instead of the folder's own.

        Raises `ConfigError` when there is no tokenizer, when it cannot be read, or when `chat_template` is not valid.
        """
        file = Path(path)
        if file.is_dir():
            folder = file if (file / "tokenizer.json").is_file() else _converted(file)
            file = folder / "tokenizer.json"
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file}: not a readable tokenizer: {error}") from error
        config = _config(file.parent)
        if chat_template is None:
            return cls(backend, config, _chat_templates(file.parent, config))
        tokenizer = cls(backend, config, {"default": chat_template})
        tokenizer._templates["default"].check()
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the tokenizer's own rules say."""
        return self.encode_batch([text])[0]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a piece of text, nothing added."""
        return self._backend.encode(well_formed(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, on the library's own threads."""
        encodings = self._backend.encode_batch_fast([well_formed(text) for text in texts], add_special_tokens=True)
        return [self._one_bos(encoding.ids) for encoding in encodings]

    def _one_bos(self, ids: list[int]) -> list[int]:
        return ids[1:] if self._adds_bos and ids[1:2] == [self.bos_token_id] else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces left as they are; ids that stand for nothing yield nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_batch(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """`decode` for many lists at once, on the library's own threads."""
        return self._backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The whole tokenizer in the form of `tokenizer.json`."""
        return self._backend.to_str()

    @cached_property
    def _decodable_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def num_decodable_ids(self) -> int:
        """How many ids stand for a token."""
        return len(self._decodable_ids)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that stands for a token."""
        return max(self._decodable_ids, default=-1) + 1

    @cached_property
    def undecodable_ids(self) -> tuple[int, ...]:
        """The holes: ids below `vocab_size` that stand for no token, in order."""
        if self.num_decodable_ids == self.vocab_size:
            return ()
        return tuple(i for i in range(self.vocab_size) if i not in self._decodable_ids)

    def is_decodable(self, token: int) -> bool:
        """Whether the id stands for a token."""
        return token in self._decodable_ids

    def first_difference(self, other: Tokenizer) -> int | None:
        """The lowest id that stands for another token there than here; ids that only one of them has do not count."""
        here, there = (
            {i: text for text, i in one._backend.get_vocab(with_added_tokens=True).items()} for one in (self, other)
        )
        return min((i for i in here.keys() & there.keys() if here[i] != there[i]), default=None)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def chat_template(self, name: str = "default") -> str:
        """The source of a chat template. Raises `ConfigError` where there is none of that name."""
        if name not in self._templates:
            known = ", ".join(self._templates) or "none"
            raise ConfigError(f"no chat template {name!r} comes with this tokenizer; it has: {known}")
        return self._templates[name].source

    def render_chat(self, messages: object, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation, see `ChatTemplate.render`. Raises `RowError`."""
        template = self._template(variables)
        return well_formed(template.render(messages, add_generation_prompt=add_generation_prompt, **variables))

    def apply_chat_template(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        split_special_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: its rendering, to which nothing is added.

        Control tokens that a message's text spells out count as such, as they do in Hugging Face; with
        `split_special_tokens` they are ordinary text, and only those that the template writes count.

        Raises `RowError`, see `ChatTemplate.render`.
        """
        if not split_special_tokens:
            text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        source = self._template(variables).source
        if source not in self._control_tokens:
            self._control_tokens[source] = ControlTokens(self._backend, source)
        control = self._control_tokens[source]
        marked: dict[str, Any] = control.mark(variables)
        text = self.render_chat(control.mark(messages), add_generation_prompt=add_generation_prompt, **marked)
        return control.encode(text)

    def _template(self, variables: Mapping[str, Any]) -> ChatTemplate:
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = f" (it has {', '.join(self._templates)})" if self._templates else ""
            raise RowError(
                "chat_template",
                f"this model has no default chat template{known}: send a plain prompt, or give a template",
                "messages",
            )
        return self._templates[name]


def _config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, completed by the older `special_tokens_map.json`."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            try:
                values = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{file}: {error}") from error
            merged |= {key: value for key, value in values.items() if value is not None}
    return merged


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. Template files win over the configuration's field, which is one template or a named list."""
    found: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = main.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    field = config.get("chat_template")
    if isinstance(field, str):
        return {"default": field}
    return {entry["name"]: entry["template"] for entry in field or ()}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """`bos_token`, `eos_token`, ... and model-specific ones such as `image_token`, all special."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(config.get("extra_special_tokens"), Mapping):
        named |= config["extra_special_tokens"]
    return {name: _added_token(value) for name, value in named.items() if isinstance(value, str | Mapping)}


def _added_token(value: str | Mapping[str, Any], special: bool = True) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=False)
    flags = {name: value[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=special, **flags)


def _add_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Make sure that every token the configuration names is one, and that special ones are marked so."""
    listed = config.get("added_tokens_decoder", {})
    wanted = [_added_token(listed[key], bool(listed[key].get("special"))) for key in sorted(listed, key=int)]
    extra: Iterable[Any] = ()
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(name), list):
            extra = config[name]
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = [
        token for token in wanted if token.content not in present or _flags(token) != _flags(present[token.content])
    ]
    known = present | {token.content: token for token in missing}
    for token in [*named.values(), *map(_added_token, extra)]:
        if token.content not in known or not known[token.content].special:
            missing.append(token)
            known[token.content] = token
    for token in missing:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return token.special, token.single_word, token.lstrip, token.rstrip, token.normalized


def _fallback_bytes(backend: Backend) -> dict[int, int]:
    decoder = backend.decoder
    if decoder is None or b"ByteFallback" not in decoder.__getstate__():
        return {}
    ids = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token: byte for token, byte in ids.items() if token is not None}


def _converted(folder: Path) -> Path:
    """The folder converted to `tokenizer.json` form by transformers. Raises `ConfigError`."""
    names = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "tekken.json", "tokenizer_config.json")
    sources = [folder / name for name in names if (folder / name).is_file()]
    if not sources or sources[0].name == "tokenizer_config.json":
        raise ConfigError(f"{folder}: no tokenizer found (tokenizer.json, or files it can be made from)")

    def convert(target: Path) -> None:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(folder).save_pretrained(target)
        except (ImportError, OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: its tokenizer cannot be converted to tokenizer.json: {error}") from error

    return converted_folder(sources, cache_dir(), convert)
