"""What a cached block holds: all tokens from the start of the sequence to the block's end, as a chain of digests.

Keys and values of a token depend on every token before it (and on whatever else changes the model's answer, such as an
adapter), so that whole history is the identity of a block's content. A `Prefix` names it by a SHA-256 digest over
(digest of the parent, token ids of the block) and keeps both parts, so that a look-up by digest can be verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """The digest used everywhere outside of tests that force collisions."""
    return hashlib.sha256(data).digest()


class Prefix:
    """One link of the chain. `parent` is None for the root, whose content is the scope instead of token ids."""

    __slots__ = ("content", "digest", "parent")

    def __init__(self, parent: Prefix | None, content: bytes, digest: bytes) -> None:
        self.parent = parent
        self.content = content
        self.digest = digest

    @classmethod
    def root(cls, digest: Digest, **scope: str) -> Prefix:
        """The empty prefix in a scope of named values; equal only where every name and value is equal.

        Names and lengths are part of the content, so `salt="x"` and `adapter="x"` are different scopes.
        """
        parts = [part.encode("utf-8", "surrogatepass") for item in sorted(scope.items()) for part in item]
        content = b"".join(b"%d:%s" % (len(part), part) for part in parts)
        return cls(None, content, digest(b"scope" + content))

    def extend(self, digest: Digest, content: bytes) -> Prefix:
        """The prefix one block longer; `content` is the block's token ids as little-endian int32."""
        return Prefix(self, content, digest(self.digest + content))

    def same(self, other: Prefix) -> bool:
        """Whether both stand for the same tokens in the same scope, whatever the digests say.

        Walks towards the root only as far as the two chains are different objects.
        """
        a: Prefix | None = self
        b: Prefix | None = other
        while a is not b:
            if a is None or b is None or a.content != b.content:
                return False
            a, b = a.parent, b.parent
        return True
