"""Writers: one schema, the input's order, and nothing presented as complete that is not."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from paged_infer.config import ConfigError
from paged_infer.io import writers
from paged_infer.io.columns import Sample
from paged_infer.io.ledger import Ledger
from paged_infer.io.readers import Position
from paged_infer.io.schema import JSON_FIELD, RESULT_FIELDS, read_settings, result_schema
from paged_infer.io.targets import check_writable, make_target
from paged_infer.io.writers import ResultWriter, journal_path, ledger_path, read_results
from paged_infer.types import Completion, RowError

SCHEMA = result_schema(settings={"seed": 1})


def answer(row, text="x", **kw):
    return Completion(row, [row, 2], "stop", text=text, prompt_tokens=3, **kw)


def partial_path(path):
    return journal_path(make_target(path))


def writer_of(path, schema=SCHEMA):
    """A writer that goes on with what is at the path, if anything is."""
    target = make_target(path)
    return ResultWriter(target, schema, Ledger.load(ledger_path(target)) or Ledger({}, 0))


def write(path, completions, schema=SCHEMA, kept=()):
    """Rows of one sample each, unless consecutive completions are of one row."""
    with writer_of(path, schema) as writer:
        for row, samples in itertools.groupby(completions, key=lambda completion: completion.request_id):
            writer.add([Sample(f"id{row}", sample, kept) for sample in samples])
        writer.finish()


def table(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def test_rows_come_out_in_input_order_from_many_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "FLUSH_BYTES", 4000)
    order = list(range(5000))
    random.Random(1).shuffle(order)
    path = tmp_path / "out.arrow"
    write(path, (answer(row, text=f"text {row}") for row in order))
    result = table(path)
    assert result["row"].to_pylist() == list(range(5000))
    assert result["text"].to_pylist() == [f"text {row}" for row in range(5000)]
    assert result["token_ids"].to_pylist() == [[row, 2] for row in range(5000)]
    assert result["id"].to_pylist() == [f"id{row}" for row in range(5000)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.arrow"]


def test_rows_are_recalled_until_they_are_sealed(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "SEGMENT_ROWS", 2)
    path = tmp_path / "out.arrow"
    pair = [answer(2, "a", sample=0, stop_reason="x"), answer(2, "b", sample=1, valid=True)]
    failed = Completion.failed(3, RowError("invalid_json", "no"))
    with writer_of(path) as writer:
        writer.answers = {"ab": 2}
        writer.add([Sample(None, each, ()) for each in pair])
        assert writer.recall(2) == pair
        writer.flush()
        writer.add([Sample(None, failed, ())])
        assert (writer.recall(2), writer.recall(3), writer.recall(1), writer.recall(9)) == (pair, None, None, None)
    with writer_of(path) as writer:
        assert writer.answers == {"ab": 2}
        assert (writer.recall(2), writer.recall(3)) == (pair, None)
        writer.reached(1, Position(2))
        writer.reached(3, Position(4))
        for row in (0, 1):
            writer.add([Sample(None, answer(row), ())])
        assert writer.recall(2) is None
        writer.finish()


def test_samples_of_a_row_keep_their_order(tmp_path):
    path = tmp_path / "out.arrow"
    write(path, [answer(1, sample=0), answer(1, sample=1), answer(0, sample=0), answer(0, sample=1)])
    result = table(path)
    assert result["row"].to_pylist() == [0, 0, 1, 1]
    assert result["sample"].to_pylist() == [0, 1, 0, 1]


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet"])
def test_the_schema_does_not_depend_on_the_data(tmp_path, suffix, monkeypatch):
    """Not even where each row is a batch, and the first error and stop reason come after batches of nulls."""
    monkeypatch.setattr(writers, "FLUSH_BYTES", 1)
    monkeypatch.setattr(writers, "ORDERED_BATCH_ROWS", 1)
    failed = Completion.failed(0, RowError("prompt_too_long", "too long"))
    cases = {
        "empty": [],
        "good": [answer(i) for i in range(3)],
        "bad": [failed],
        "mixed": [answer(1), failed, answer(2, stop_reason="x")],
    }
    schemas = []
    for name, completions in cases.items():
        path = tmp_path / f"{name}{suffix}"
        write(path, completions)
        if suffix == ".parquet":
            schemas.append(pq.read_schema(path))
        else:
            read = pa.ipc.open_file if suffix == ".feather" else pa.ipc.open_stream
            schemas.append(read(pa.memory_map(str(path))).schema)
    assert all(schema.serialize().equals(schemas[0].serialize()) for schema in schemas)
    assert schemas[0].names == [field.name for field in RESULT_FIELDS]
    assert not any(pa.types.is_null(field.type) for field in schemas[0])
    assert read_settings(schemas[0]) == {"seed": 1}


def test_columns_of_an_error_row_and_of_an_answer(tmp_path):
    path = tmp_path / "out.arrow"
    write(path, [Completion.failed(1, RowError("prompt_too_long", "33 > 32")), answer(0, stop_reason="END")])
    good, bad = table(path).to_pylist()
    assert good["stop_reason"] == "END"
    assert (good["prompt_tokens"], good["output_tokens"], good["error"]) == (3, 2, None)
    assert (bad["finish_reason"], bad["error_type"], bad["error"]) == ("error", "prompt_too_long", "33 > 32")
    assert bad["text"] is None
    assert bad["token_ids"] is None


def test_kept_columns(tmp_path):
    kept = [
        pa.field("text", pa.large_string(), metadata=JSON_FIELD),
        pa.field("label", pa.dictionary(pa.int8(), pa.string())),
    ]
    schema = result_schema(kept)
    assert schema.names[-2:] == ["input_text", "label"]
    write(tmp_path / "out.arrow", [answer(0)], schema, kept=('{"a": 1}', "yes"))
    assert table(tmp_path / "out.arrow").select(["input_text", "label"]).to_pylist() == [
        {"input_text": '{"a": 1}', "label": "yes"}
    ]
    write(tmp_path / "out.jsonl", [answer(0)], schema, kept=('{"a": 1}', "yes"))
    assert json.loads((tmp_path / "out.jsonl").read_text())["input_text"] == {"a": 1}


def test_jsonl_is_one_line_a_row_and_has_no_nan(tmp_path):
    schema = result_schema([pa.field("loss", pa.float64())])
    path = tmp_path / "out.jsonl"
    texts = ["a\u2028b\u0085c\nd", "e"]
    with writer_of(path, schema) as writer:
        for i, loss in ((1, float("nan")), (0, float("-inf"))):
            writer.add([Sample(None, answer(i, text=texts[i]), (loss,))])
        writer.finish()
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [(r["row"], r["text"], r["loss"]) for r in rows] == [(0, texts[0], None), (1, texts[1], None)]


def test_an_interrupted_writer_leaves_only_a_readable_partial_file(tmp_path):
    path = tmp_path / "out.arrow"

    def answers():
        yield from (answer(4), answer(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, answers())
    assert not path.exists()
    assert table(partial_path(path))["row"].to_pylist() == [4]


def test_a_failure_while_finishing_leaves_the_partial_file(tmp_path, monkeypatch):
    path = tmp_path / "out.arrow"
    replace = os.replace

    def full(source, destination):
        if str(destination) == str(path):
            raise OSError("disk full")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write(path, [answer(0)])
    assert not path.exists()
    assert table(partial_path(path)).num_rows == 1
    monkeypatch.undo()
    write(path, [])
    assert table(path).num_rows == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.arrow"]


ENDLESS = """
import sys
from pathlib import Path
from paged_infer.io import writers
from paged_infer.io.schema import result_schema
from paged_infer.types import Completion
from paged_infer.io.columns import Sample
from paged_infer.io.ledger import Ledger
from paged_infer.io.readers import Position
from paged_infer.io.targets import make_target
writers.FLUSH_BYTES = 20_000
with writers.ResultWriter(make_target(Path(sys.argv[1])), result_schema(), Ledger({}, 0)) as writer:
    row = 0
    while True:
        writer.add([Sample(str(row), Completion(row, [row], "stop", text=f"text {row}" * 9), ())])
        row += 1
"""


def test_a_killed_writer_loses_no_flushed_row_and_presents_nothing(tmp_path):
    path = tmp_path / "out.arrow"
    partial = partial_path(path)
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)])
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 200_000):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.exists()
    size = partial.stat().st_size
    whole = [batch.num_rows for batch in read_results(partial)]
    for cut in (0, 1, 9, 1000, 30_000):
        with open(partial, "r+b") as file:
            file.truncate(size - cut)
        rows = [row for batch in read_results(partial) for row in batch["row"].to_pylist()]
        assert rows == list(range(len(rows)))
        assert len(rows) >= sum(whole[: -2 if cut < 20_000 else -4])


def test_a_complete_file_cut_short_is_an_error_not_a_shorter_file(tmp_path):
    path = tmp_path / "out.arrow"
    write(path, [answer(i) for i in range(100)])
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ConfigError, match="no readable results"):
        list(read_results(path))


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet", ".jsonl"])
def test_results_of_every_format_are_read_back(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    write(path, [answer(1), answer(0)])
    rows = [row for batch in read_results(path) for row in batch.to_pylist()]
    assert [(row["row"], row["text"], row["error"]) for row in rows] == [(0, "x", None), (1, "x", None)]


def test_where_results_cannot_go(tmp_path):
    (tmp_path / "there.arrow").write_bytes(b"")
    (tmp_path / "folder.arrow").mkdir()
    for name, message in (
        ("folder.arrow", "is a folder"),
        ("x.txt", "expected a name that ends in"),
        ("there.arrow/x.arrow", "there.arrow is a file and no folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_writable(make_target(tmp_path / name))
    check_writable(make_target(tmp_path / "new/deep/x.arrow"))


def test_datasets_opens_the_stream_memory_mapped(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "out.arrow"
    write(path, [answer(i) for i in range(5)])
    dataset = datasets.Dataset.from_file(str(path))
    assert dataset["row"][:] == [0, 1, 2, 3, 4]
    assert dataset[2]["token_ids"] == [2, 2]
