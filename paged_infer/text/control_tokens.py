"""Encoding a chat in which only the template's own control tokens are control tokens.

A user who types `<|im_end|>` into a message can close the turn and open another. Here the user's strings are marked
before rendering. Afterwards the unmarked control tokens, which the template wrote, are given private names, and the
text is encoded by a copy of the tokenizer that knows the control tokens by those names only: what a user typed is then
ordinary text to every stage of the tokenizer, and no boundary is added that plain text would not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters, which Unicode keeps for internal use; they are removed from the user's strings."""


class ControlTokens:
    """The control tokens of a tokenizer and a template: special tokens, and added tokens that the template writes."""

    def __init__(self, backend: Backend, template: str) -> None:
        spec = json.loads(backend.to_str())
        names = {
            token["content"]: f"{_OPEN}{token['id']}{_CLOSE}"
            for token in spec["added_tokens"]
            if token["content"].strip() and (token["special"] or token["content"] in template)
        }
        either = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        self._names = names
        self._control = re.compile(either)
        self._marked = re.compile(f"{_OPEN}({either}){_CLOSE}|({either})|[{_OPEN}{_CLOSE}]")
        self._backend = Backend.from_str(json.dumps(_renamed(spec, names)))

    def mark(self, value: Any) -> Any:
        """A copy of the user's data (strings, lists, objects) with every control token in it marked."""
        if isinstance(value, str):
            plain = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._control.sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", plain)
        if isinstance(value, Mapping):
            return {name: self.mark(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a text rendered from marked data."""
        named = self._marked.sub(lambda found: found[1] or self._names.get(found[2], ""), rendered)
        return self._backend.encode(named, add_special_tokens=False).ids


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The `tokenizer.json` in which `names` replace control tokens, under their old ids."""
    model = spec["model"]
    vocab = model["vocab"]
    for token in spec["added_tokens"]:
        old = token["content"]
        new = names.get(old, old)
        if isinstance(vocab, dict):
            vocab.pop(old, None)
            vocab[new] = token["id"]
        elif token["id"] < len(vocab):
            vocab[token["id"]][0] = new
        token["content"] = new
        token["normalized"] = token["normalized"] and new == old
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    return spec
