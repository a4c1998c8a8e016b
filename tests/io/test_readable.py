"""The results open in the tools that people read Arrow with, and say the same in each."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from paged_infer.io.columns import Sample
from paged_infer.io.ledger import Ledger
from paged_infer.io.schema import JSON_FIELD, result_schema
from paged_infer.io.targets import make_target
from paged_infer.io.writers import ResultWriter, journal_path
from paged_infer.types import Completion, Logprobs, RowError

SCHEMA = result_schema([pa.field("note", pa.large_string(), metadata=JSON_FIELD)], {"seed": 1})


def rows():
    """Answers with logprobs, an error row, two samples of one row."""
    logprobs = Logprobs(np.array([5]), np.array([-0.5]), np.array([1]), np.array([[5, 6]]), np.array([[-0.5, -1.0]]))
    for row in range(5):
        if row == 3:
            yield [Sample(None, Completion.failed(row, RowError("prompt_too_long", "33 > 32")), ('{"a": 2}',))]
        else:
            samples = [Completion(row, [row, 9], "stop", text=f"ä{row}", sample=i, logprobs=logprobs) for i in range(2)]
            yield [Sample(str(row), sample, ('{"a": 1}',)) for sample in samples]


TEXTS = ["ä0", "ä0", "ä1", "ä1", "ä2", "ä2", None, "ä4", "ä4"]


@pytest.fixture(params=[".arrow", ".feather", ".parquet", ".jsonl"])
def results(request, tmp_path):
    path = tmp_path / f"out{request.param}"
    with ResultWriter(make_target(path), SCHEMA, Ledger({}, 0)) as writer:
        for samples in rows():
            writer.add(samples)
        writer.finish()
    return path


def test_pyarrow(results):
    table = {
        ".arrow": lambda: pa.ipc.open_stream(str(results)).read_all(),
        ".feather": lambda: pa.ipc.open_file(str(results)).read_all(),
        ".parquet": lambda: pq.read_table(results),
        ".jsonl": lambda: __import__("pyarrow.json").json.read_json(results),
    }[results.suffix]()
    assert table["text"].to_pylist() == TEXTS
    assert table["logprobs"].to_pylist()[0][0]["top"] == [
        {"token_id": 5, "logprob": -0.5},
        {"token_id": 6, "logprob": -1.0},
    ]


def test_datasets(results):
    datasets = pytest.importorskip("datasets")
    name = {".arrow": "arrow", ".feather": "arrow", ".parquet": "parquet", ".jsonl": "json"}[results.suffix]
    cache = str(results.parent / "cache")
    dataset = datasets.load_dataset(name, data_files=str(results), split="train", cache_dir=cache)
    assert dataset["text"][:] == TEXTS
    if results.suffix == ".arrow":
        dataset = datasets.Dataset.from_file(str(results))
        assert dataset["text"][:] == TEXTS
        assert dataset[8]["token_ids"] == [4, 9]


def test_polars(results):
    polars = pytest.importorskip("polars")
    read = {
        ".arrow": polars.read_ipc_stream,
        ".feather": polars.read_ipc,
        ".parquet": polars.read_parquet,
        ".jsonl": polars.read_ndjson,
    }[results.suffix]
    frame = read(str(results))
    assert frame["text"].to_list() == TEXTS
    assert frame.filter(polars.col("error_type") == "prompt_too_long")["row"].to_list() == [3]


def test_duckdb(results):
    duckdb = pytest.importorskip("duckdb")
    if results.suffix in (".arrow", ".feather"):
        open_results = pa.ipc.open_stream if results.suffix == ".arrow" else pa.ipc.open_file
        answers = open_results(str(results)).read_all()
        found = duckdb.sql("select text from answers order by row, sample").fetchall()
        assert answers.num_rows == len(found)
    else:
        found = duckdb.sql(f"select text from '{results}' order by row, sample").fetchall()
    assert [text for (text,) in found] == TEXTS


def test_an_unfinished_file_can_be_followed(tmp_path):
    polars = pytest.importorskip("polars")
    target = make_target(tmp_path / "out.arrow")
    with ResultWriter(target, SCHEMA, Ledger({}, 0)) as writer:
        for samples in rows():
            writer.add(samples)
        writer.flush()
        assert pa.ipc.open_stream(str(journal_path(target))).read_all().num_rows == 9
        assert polars.read_ipc_stream(str(journal_path(target)))["text"].to_list() == TEXTS
