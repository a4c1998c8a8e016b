"""Runs of sequences that begin with the same blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paged_infer.engine.shared_prefix import MIN_SEQUENCES, MIN_TOKENS, shared_prefixes

BLOCK = 16


def tables(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


def test_a_run_between_others() -> None:
    """Sequences 1 to 5 share 20 blocks, of which the shortest has computed 18 whole ones."""
    shared = list(range(100, 120))
    rows = [[i * 1000 + j for j in range(30)] for i in range(7)]
    for i in range(1, 6):
        rows[i][:20] = shared
    computed = np.array([480, 470, 18 * BLOCK + 3, 400, 320, 333, 480])
    found = shared_prefixes(tables(*rows), computed, BLOCK)
    assert found is not None
    assert found.starts.tolist() == [0, 1, 6, 7]
    assert found.lengths.tolist() == [0, 18 * BLOCK, 0]


def test_a_batch_that_is_one_run() -> None:
    found = shared_prefixes(tables(*[list(range(40))] * 5), np.full(5, 640), BLOCK)
    assert found is not None
    assert (found.starts.tolist(), found.lengths.tolist()) == ([0, 5], [640])


def test_few_sequences_or_short_prefixes_are_left_alone() -> None:
    rows = tables(*[list(range(40))] * (MIN_SEQUENCES - 1))
    assert shared_prefixes(rows, np.full(len(rows), 640), BLOCK) is None
    rows = tables(*[list(range(40))] * 8)
    assert shared_prefixes(rows, np.full(8, MIN_TOKENS - 1), BLOCK) is None


def test_a_much_shorter_prefix_starts_a_run_of_its_own() -> None:
    long, short = list(range(64)), [*range(16), *range(200, 248)]
    found = shared_prefixes(tables(*[long] * 4, *[short] * 4), np.full(8, 1024), BLOCK)
    assert found is not None
    assert (found.starts.tolist(), found.lengths.tolist()) == ([0, 4, 8], [1024, 1024])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 640)), min_size=1, max_size=24))
def test_what_is_called_shared_is(rows: list[tuple[int, int, int]]) -> None:
    """Every sequence of a run has all the run's tokens computed, in the same blocks; the runs cover the batch."""
    block_tables = tables(*[[family * 100 + j if j < n else 1000 * i + j for j in range(40)]
                            for i, (family, n, _) in enumerate(rows, start=1)])  # fmt: skip
    computed = np.array([tokens for _, _, tokens in rows])
    found = shared_prefixes(block_tables, computed, BLOCK)
    if found is None:
        return
    assert found.starts[0] == 0
    assert found.starts[-1] == len(rows)
    assert (np.diff(found.starts) > 0).all()
    for first, stop, length in zip(found.starts[:-1], found.starts[1:], found.lengths, strict=True):
        blocks = length // BLOCK
        assert blocks * BLOCK == length
        assert (computed[first:stop] >= length).all()
        assert (block_tables[first:stop, :blocks] == block_tables[first, :blocks]).all()
        assert length == 0 or stop - first >= MIN_SEQUENCES
