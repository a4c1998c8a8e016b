"""Whether inputs are still the ones an earlier run read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_infer.io.readers import Inputs
from paged_infer.io.readers.files import DIGEST_BYTES
from paged_infer.io.readers.lines import TextSource

Fingerprint = Sequence[Mapping[str, Any]]


def difference(recorded: Fingerprint, inputs: Inputs) -> str | None:
    """What differs between the files of an earlier run and those of now, in words; None when nothing does.

    Content counts, not where the files lie. Files that come after the recorded ones make no difference, and neither do
    lines at the end of the last recorded one: what was read is still there.

    Args:
        recorded: what `Inputs.fingerprint` gave then.
    """
    if len(inputs.paths) < len(recorded):
        return f"{len(recorded)} input files were there before, now {len(inputs.paths)}"
    for ordinal, (before, source) in enumerate(zip(recorded, inputs.sources, strict=False)):
        now = source.identity()
        if before["head"] is None or now["head"] is None:
            if before["name"] != now["name"]:
                return f"input {now['name']} was {before['name']} before"
        elif any(before[key] != now[key] for key in ("size", "head", "tail")):
            last = ordinal == len(recorded) - 1
            if not (last and source.appendable and isinstance(source, TextSource) and _only_grew(before, source)):
                sizes = (
                    "" if before["size"] == now["size"] else f" ({before['size']:,} bytes before, now {now['size']:,})"
                )
                return f"input {now['name']} is not what it was{sizes}"
    return None


def _only_grew(before: Mapping[str, Any], source: TextSource) -> bool:
    """Whether the file begins with the recorded one, as far as its digests tell, and goes on with a line of its own."""
    size, file = before["size"], source.file
    if file.size is None or file.size <= size:
        return False
    if file.digest(0, min(size, DIGEST_BYTES)) != before["head"]:
        return False
    if file.digest(size - DIGEST_BYTES, size) != before["tail"]:
        return False
    seam = file.stored_bytes(size - 1, size + 2) or b""
    return not size or seam.startswith(b"\n") or seam[1:].startswith((b"\n", b"\r\n"))
