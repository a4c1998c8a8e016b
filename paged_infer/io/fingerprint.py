"""Whether inputs are still what they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_infer.io.readers import Inputs


def difference(recorded: Sequence[Mapping[str, Any]], inputs: Inputs) -> str | None:
    """Names the first file that differs; None where none does."""
    now = inputs.fingerprint()
    if len(now) != len(recorded):
        return f"there are {len(now)} inputs, there were {len(recorded)}"
    for before, after in zip(recorded, now, strict=True):
        if before != after and (after["size"] or 0) <= (before["size"] or 0):
            return f"{after['name']} has changed"
    return None
