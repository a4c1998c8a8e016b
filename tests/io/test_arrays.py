"""Arrays made through buffers are those that pyarrow makes, without its search for pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_infer.io.arrays import flags, integers, lists, numbers, texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def same(ours: pa.Array, values: list[object], kind: pa.DataType) -> None:
    ours.validate(full=True)
    right = pa.array(values, kind)
    assert ours.equals(right)
    assert ours.null_count == right.null_count


@settings(deadline=None)
@given(st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_whole_numbers(values):
    for kind in (pa.int32(), pa.int64()):
        same(numbers(values, kind), values, kind)


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(width=32, allow_nan=False), max_size=20))
def test_floating_numbers(values):
    for kind in (pa.float32(), pa.float64()):
        same(numbers(values, kind), values, kind)


@settings(deadline=None)
@given(st.lists(st.none() | st.booleans(), max_size=20))
def test_booleans(values):
    same(flags(values), values, pa.bool_())


@settings(deadline=None)
@given(st.lists(st.none() | TEXT, max_size=20))
def test_strings(values):
    for kind in (pa.string(), pa.large_string()):
        same(texts(values, kind), values, kind)


@settings(deadline=None)
@given(st.lists(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=9))
def test_lists_of_numbers(values):
    same(lists(values, pa.large_list(pa.int32())), values, pa.large_list(pa.int32()))


def test_numpy_arrays_are_taken_as_they_are():
    same(numbers(np.arange(9)[::2], pa.int32()), [0, 2, 4, 6, 8], pa.int32())
    same(flags(np.arange(11) > 7), [False] * 8 + [True] * 3, pa.bool_())


def test_what_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        numbers([2**31], pa.int32())
    with pytest.raises(UnicodeEncodeError):
        texts(["\ud800"], pa.string())


def test_results_are_written_and_gone_on_with_without_pandas(tmp_path):
    code = """
import sys
import numpy as np
from pathlib import Path
from paged_infer.io.columns import Sample
from paged_infer.io.counts import ResultCounts
from paged_infer.io.ledger import Ledger
from paged_infer.io.schema import result_schema
from paged_infer.io.targets import make_target
from paged_infer.io.writers import ResultWriter, ledger_path, read_results
from paged_infer.types import Completion, Logprobs, RowError
logprobs = Logprobs([5, 6], np.zeros(2), np.ones(2), np.ones((2, 3)), np.zeros((2, 3)))
path = Path(sys.argv[1])
target = make_target(path)
with ResultWriter(target, result_schema(), Ledger({}, 0)) as writer:
    writer.add([Sample("x", Completion(1, [5, 6], "stop", text="a", logprobs=logprobs), ())])
with ResultWriter(target, result_schema(), Ledger.load(ledger_path(target))) as writer:
    writer.add([Sample(None, Completion.failed(0, RowError("a", "b")), ())])
    writer.finish()
counts = ResultCounts()
for batch in read_results(path):
    counts.count_batch(batch)
print(counts.rows, dict(counts.errors), dict(counts.finish_reasons), "pandas" in sys.modules)
"""
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out.arrow"], capture_output=True, text=True)
    assert done.stdout == "2 {'a': 1} {'error': 1, 'stop': 1} False\n", done.stderr


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64()])
def test_integers_come_back_as_they_are(kind):
    whole = pa.array([3, -1, 2**31 - 1, 7], kind)
    assert integers(whole).tolist() == whole.to_pylist()
    assert integers(whole.slice(1, 2)).tolist() == [-1, 2**31 - 1]
    assert integers(whole.slice(4)).tolist() == integers(numbers([], kind)).tolist() == []
