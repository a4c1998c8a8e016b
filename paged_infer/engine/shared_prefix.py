"""Which neighbours in a batch begin with the same KV blocks, so that attention can read those once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SEQUENCES = 4
"""Fewer sequences that share are not worth a second pass."""

MIN_TOKENS = 256
"""Nor is a shorter prefix."""


@dataclass(frozen=True, slots=True)
class PrefixRuns:
    """Runs of neighbouring sequences.

    Attributes:
        starts: [G + 1] int64, run g is the sequences [starts[g], starts[g + 1]).
        lengths: [G] int32, tokens its sequences share, whole blocks; 0 where nothing is worth sharing.
    """

    starts: np.ndarray
    lengths: np.ndarray


def shared_prefixes(block_tables: np.ndarray, num_computed: np.ndarray, block_size: int) -> PrefixRuns | None:
    """The runs of a batch; None where none shares enough to be worth it.

    Args:
        block_tables: [S, W], of which a sequence's first ceil(num_computed / block_size) columns count.
        num_computed: [S], tokens stored before this step: what is shared lies among them, so every query sees it all.
    """
    if len(num_computed) < MIN_SEQUENCES:
        return None
    same = block_tables[1:] == block_tables[:-1]
    common = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
    whole = num_computed // block_size
    common = np.minimum(common, np.minimum(whole[1:], whole[:-1])) * block_size  # between a sequence and the next
    starts, lengths = [0], []
    length = 0
    for i, tokens in enumerate([*common.tolist(), 0], start=1):
        alone = i - starts[-1] == 1
        joined = tokens if alone else min(length, tokens)
        if joined >= MIN_TOKENS and (alone or 2 * joined >= length):
            length = joined
            continue
        lengths.append(length if i - starts[-1] >= MIN_SEQUENCES else 0)
        starts.append(i)
        length = 0
    if not any(lengths):
        return None
    return PrefixRuns(np.array(starts), np.array(lengths, np.int32))
