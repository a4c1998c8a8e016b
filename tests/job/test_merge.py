"""Shards become one file only when they are whole, finished and of one job."""

from __future__ import annotations

import errno
import os

import pytest

from paged_infer.config import ConfigError
from paged_infer.io.columns import Sample, result_batch
from paged_infer.io.schema import result_schema
from paged_infer.io.stream import ArrowStream
from paged_infer.job.merge import merge
from paged_infer.types import Completion


def shard(folder, name, rows):
    """A finished shard with the numbers of these rows."""
    schema = result_schema()
    stream = ArrowStream.create(folder / name, schema)
    samples = [Sample(None, Completion(row, [1], "stop", text=str(row)), ()) for row in rows]
    if samples:
        stream.append(result_batch(samples, schema))
    stream.close()


@pytest.mark.parametrize(
    ("shards", "given", "message"),
    [
        ({}, ["out.arrow"], r"no shards named like out\.1-of-8\.arrow"),
        ({"out.1-of-2.arrow": [0]}, ["out.arrow"], "1 of 2 shards given, missing: 2"),
        ({"a.1-of-2.arrow": [0], "b.2-of-3.arrow": [1]}, ["a.1-of-2.arrow", "b.2-of-3.arrow"], "different jobs"),
        ({"a.arrow": [0], "b.arrow": [1]}, ["a.arrow", "b.arrow"], "expected the name of a shard"),
        ({"out.1-of-2.arrow": [0]}, ["out.1-of-2.arrow", "out.2-of-2.arrow"], r"2-of-2\.arrow is not finished"),
        ({"out.1-of-2.arrow": [0, 2], "out.2-of-2.arrow": [3]}, ["out.arrow"], r"1-of-2\.arrow: row 1 is missing"),
        ({"out.1-of-2.arrow": [0], "out.2-of-2.arrow": [5]}, ["out.arrow"], "row 1 is missing, 5 is there instead"),
        ({"out.1-of-1.arrow": []}, ["out.arrow"], None),
        ({"out.1-of-1.jsonl": None}, ["out.jsonl"], "there are no rows to join"),
        ({"out.1-of-1.parquet": None}, ["out.parquet"], r"1-of-1\.parquet cannot be read: .*0 bytes"),
        ({"out.1-of-2.arrow": [0], "out.2-of-2.arrow": [1]}, ["."], r"has no manifest\.json: its job is not finished"),
    ],
)
def test_what_cannot_be_joined(tmp_path, shards, given, message):
    for name, rows in shards.items():
        if rows is None:
            (tmp_path / name).touch()
        else:
            shard(tmp_path, name, rows)
    paths = [tmp_path / name for name in given]
    if message is None:
        assert merge(paths, tmp_path / "all.arrow").rows == 0
        return
    with pytest.raises(ConfigError, match=message):
        merge(paths, tmp_path / "all.arrow")
    assert {path.name for path in tmp_path.iterdir()} == {*shards}


def test_where_joined_results_cannot_go(tmp_path):
    shard(tmp_path, "out.1-of-1.arrow", [0])
    for name, message in (("all.txt", r"expected a name that ends in \.arrow"), ("out.1-of-1.arrow", "exists already")):
        with pytest.raises(ConfigError, match=message):
            merge([tmp_path / "out.arrow"], tmp_path / name)


def test_a_full_disk_leaves_nothing_half_joined(tmp_path, monkeypatch):
    shard(tmp_path, "out.1-of-1.arrow", [0])

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        merge([tmp_path / "out.arrow"], tmp_path / "all.arrow")
    assert [path.name for path in tmp_path.iterdir()] == ["out.1-of-1.arrow"]
