"""Few combinations of many options, such that every pair of values of two options occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(options: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy: each combination starts at a pair not yet seen and takes, of 20 random ends, the one that adds most."""
    names = list(options)
    rng = random.Random(seed)

    def pairs(row: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(options[a], options[b])
    }
    rows = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        ends = [{name: rng.choice(options[name]) for name in names} | {a: x, b: y} for _ in range(20)]
        rows.append(max(ends, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows
