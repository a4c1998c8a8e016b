"""What a user may name: folders, patterns, URLs, datasets; and files that are damaged or fail to be read."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import sys
import threading
import tracemalloc
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from backports import zstd

from paged_infer.config import ConfigError
from paged_infer.io.readers import Inputs, Position
from paged_infer.io.readers.files import InputFile
from paged_infer.types import InputFailed

ROW = b'{"prompt": "%d"}\n'
MANY = b"".join(ROW % (i * 7919) for i in range(3000))


def prompts(*paths, **options):
    return [row.data.get("prompt") for row in Inputs([str(path) for path in paths], **options).rows()]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


FILES = {
    "b.jsonl": ROW % 2,
    "a/z.ndjson": ROW % 1,
    "c.jsonl.gz": gzip.compress(ROW % 3),
    "d.jsonl.bz2": bz2.compress(ROW % 4),
    "e.jsonl.zst": zstd.compress(ROW % 5),
}
IGNORED = {".hidden.jsonl": ROW % 9, "_log.jsonl": ROW % 9, ".git/x.jsonl": ROW % 9, "README.md": b"", "b.partial": b""}


def test_a_folder_is_its_data_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path, FILES | IGNORED)
    assert prompts(tmp_path) == ["1", "2", "3", "4", "5"]
    assert prompts(f"{tmp_path}/") == ["1", "2", "3", "4", "5"]


def test_patterns(tmp_path):
    write(tmp_path, FILES | {"e[1].jsonl": ROW % 7, "b.md": b""})
    assert prompts(tmp_path / "?.jsonl*") == ["2", "3", "4", "5"]
    assert prompts(tmp_path / "**/*.ndjson", tmp_path / "b*") == ["1", "2"]
    assert prompts(tmp_path / "e[1].jsonl") == ["7"]


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "", "a folder without data files: expected .arrow, .csv"),
        ({"a.md": b""}, "", "a folder without data files"),
        ({"a.jsonl": b"", "b.csv": b""}, "", r"several kinds of files \(.csv, .jsonl\); .*\*.csv"),
        ({"a.md": b""}, "*", "nothing that can be read fits this pattern"),
        (
            {"dataset_dict.json": b'{"splits": ["train", "test"]}'},
            "",
            "holds the splits train, test; name one: .*/train",
        ),
        ({"state.json": b"{}"}, "", "state.json is not what a saved dataset has there"),
        ({}, "a.jsonl", "a.jsonl: no such file"),
        ({"a.json": b"[]"}, "a.json", r"cannot tell what .*a\.json is .*; name it \.jsonl if it has an object a line"),
        ({"a.parquet.gz": b""}, "a.parquet.gz", r"cannot tell what .* expected one of \.arrow, .*; text formats also"),
    ],
)
def test_folders_and_patterns_that_mean_nothing_are_refused(tmp_path, files, path, message):
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=message):
        Inputs([str(tmp_path / path)])


def test_standard_input_is_read_once(monkeypatch):
    with pytest.raises(ConfigError, match="only once"):
        Inputs(["-", "-"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ROW % 1 + b"{bad\n" + ROW % 2)))
    inputs = Inputs(["-"])
    assert [row.where for row in inputs.rows()] == [f"standard input line {i}" for i in (1, 2, 3)]
    assert inputs.num_rows() is None


def test_a_pipe_is_read_once_and_not_looked_at_before(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    inputs = Inputs([str(tmp_path / "pipe.jsonl")])
    assert inputs.fingerprint()[0]["size"] is None
    writer = threading.Thread(target=(tmp_path / "pipe.jsonl").write_bytes, args=(MANY,))
    writer.start()
    assert sum(1 for _ in inputs.rows()) == 3000
    writer.join()


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    write(tmp_path, {"a.jsonl": b""})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read: permission denied"):
        Inputs([str(tmp_path / "a.jsonl")])


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_urls(memory, tmp_path):
    for name, content in FILES.items():
        memory.pipe(f"/data/{name}", content)
    table = pa.table({"prompt": ["6", "7"]})
    with memory.open("/tables/t.parquet", "wb") as stream:
        pq.write_table(table, stream)
    for name, new in (("s.arrow", pa.ipc.new_stream), ("f.feather", pa.ipc.new_file)):
        with memory.open(f"/tables/{name}", "wb") as stream, new(stream, table.schema) as writer:
            writer.write_table(table)
    assert prompts("memory://data/b.jsonl", "memory://data/e.jsonl.zst") == ["2", "5"]
    assert prompts("memory://data") == prompts("memory://data/") == ["1", "2", "3", "4", "5"]
    assert prompts("memory://data/?.jsonl*") == ["2", "3", "4", "5"]
    for name in ("t.parquet", "s.arrow", "f.feather"):
        assert prompts(f"memory://tables/{name}") == ["6", "7"]
        assert [r.data for r in Inputs([f"memory://tables/{name}"]).rows(Position(1, 0, 1, 1))] == [{"prompt": "7"}]
    inputs = Inputs(["memory://data/b.jsonl"])
    (tmp_path / "b.jsonl").write_bytes(ROW % 2)
    local = Inputs([str(tmp_path / "b.jsonl")]).fingerprint()[0]
    assert inputs.fingerprint() == [{**local, "name": "memory://data/b.jsonl"}]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://missing.jsonl", "memory://missing.jsonl: no such file"),
        ("memory://missing", "cannot tell what memory://missing is"),
        ("memory://*.jsonl", "nothing that can be read fits"),
        ("nosuch://a/b.jsonl", "nosuch://a/b.jsonl cannot be opened: Protocol not known"),
    ],
)
def test_urls_that_lead_nowhere_are_refused(memory, url, message):
    with pytest.raises(ConfigError, match=message):
        Inputs([url])


def test_a_driver_that_is_missing_is_named():
    fsspec.register_implementation("undriven", "no_such_module.FileSystem", errtxt="Install no_such_module to read it")
    with pytest.raises(ConfigError, match=r"Install no_such_module to read it \(pip install 'paged-infer\[remote\]'"):
        Inputs(["undriven://a/b.jsonl"])


class Handler(SimpleHTTPRequestHandler):
    """Serves files; knows ranges or not."""

    ranges = False

    def send_head(self):
        asked = self.headers.get("Range") if self.ranges else None
        if asked is None:
            return super().send_head()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.end_headers()
        return io.BytesIO(part)

    def end_headers(self):
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("ranges", [False, True])
def test_web_addresses(tmp_path, ranges):
    """With or without ranges: what cannot be skipped is read."""
    pytest.importorskip("aiohttp")
    write(tmp_path, {"a.jsonl": MANY, "b.jsonl.gz": gzip.compress(MANY)})
    handler = type("Serving", (Handler,), {"ranges": ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            where = f"http://127.0.0.1:{server.server_port}"
            inputs = Inputs([f"{where}/a.jsonl?version=*", f"{where}/b.jsonl.gz"])
            everything = [row.data["prompt"] for row in inputs.rows()]
            assert everything == [str(i * 7919) for i in range(3000)] * 2
            for start in (
                Position(2000, 0, 2000, len(b"".join(MANY.splitlines(keepends=True)[:2000]))),
                Position(3000, 1),
            ):
                assert [row.data["prompt"] for row in inputs.rows(start)] == everything[start.index :]
            with pytest.raises(ConfigError, match=r"missing\.jsonl"):
                Inputs([f"{where}/missing.jsonl"])
        finally:
            server.shutdown()


def test_a_saved_dataset_is_its_arrow_files(tmp_path):
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"prompt": [str(i) for i in range(10)], "n": range(10)})
    data.select([5, 3]).save_to_disk(tmp_path / "one")
    DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "two", num_shards={"train": 3, "test": 1})
    assert prompts(tmp_path / "one") == ["5", "3"]
    assert prompts(tmp_path / "two" / "train") == data["prompt"][:]
    with pytest.raises(ConfigError, match=r"name one: .*/two/train"):
        Inputs([str(tmp_path / "two")])


def test_hub_datasets_are_streamed(tmp_path):
    """A local folder stands for the hub: `datasets` loads both by the same call."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        table = pa.table({"prompt": [f"{split} {i}" for i in range(2500)], "n": range(2500)})
        pq.write_table(table, tmp_path / split / "0.parquet", row_group_size=700)
    url = f"hf://datasets/{tmp_path}:test"
    inputs = Inputs([url], ["n"], columns=["prompt"])
    assert (inputs.columns(), inputs.kept_fields[0].type) == (["prompt", "n"], pa.int64())
    rows = list(inputs.rows())
    assert [(row.data["prompt"], row.kept) for row in rows] == [(f"test {i}", (i,)) for i in range(2500)]
    assert rows[7].where == f"{url} row 8"
    assert next(Inputs([url]).rows(Position(1234, 0, 1234, 1234))).data["prompt"] == "test 1234"
    assert inputs.count() == 2500
    assert inputs.fingerprint() == [{"name": url, "size": None, "head": None, "tail": None}]
    with pytest.raises(ConfigError, match=r"has the splits .*; name one: "):
        Inputs([f"hf://datasets/{tmp_path}"])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Inputs([f"hf://datasets/{tmp_path}:nosuch"])
    with pytest.raises(ConfigError, match="expected hf://datasets/ORG/NAME"):
        Inputs([f"hf://datasets/{tmp_path}:a:b"])


@pytest.mark.parametrize(
    ("suffix", "compress", "decompressor"),
    [
        (".gz", gzip.compress, lambda: zlib.decompressobj(31)),
        (".bz2", bz2.compress, bz2.BZ2Decompressor),
        (".zst", lambda data: zstd.compress(data[:9000]) + zstd.compress(data[9000:]), None),
    ],
)
def test_a_truncated_stream_keeps_its_good_rows_and_ends_in_an_error_row(tmp_path, suffix, compress, decompressor):
    whole = compress(MANY)
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(whole)
    assert prompts(path) == [str(i * 7919) for i in range(3000)]
    first = zstd.get_frame_size(whole) if suffix == ".zst" else len(whole)
    for cut in sorted({0, 1, 5, *range(10, len(whole), len(whole) // 23), first - 1, first + 3, len(whole) - 1}):
        if cut >= len(whole):
            continue
        path.write_bytes(whole[:cut])
        if suffix == ".zst":
            complete = whole[:first] if cut > first else b""
            plain = zstd.decompress(complete) if complete else b""
            plain += zstd.ZstdDecompressor().decompress(whole[len(complete) : cut])
        else:
            plain = decompressor().decompress(whole[:cut])
        rows = list(Inputs([str(path)]).rows())
        assert [row.data["prompt"] for row in rows[:-1]] == [str(i * 7919) for i in range(plain.count(b"\n"))]
        assert rows[-1].error.error_type == "input_damaged", cut
        assert rows[-1].line == len(rows)


def test_garbage_in_the_middle_of_a_stream_stops_that_file_alone(tmp_path):
    packed = bytearray(gzip.compress(os.urandom(200_000).hex().encode() + b"\n" + MANY, mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    write(tmp_path, {"a.jsonl.gz": bytes(packed), "b.jsonl": ROW % 1})
    inputs = Inputs([str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl")])
    *_, broken, last = inputs.rows()
    assert broken.error.error_type == "input_damaged"
    assert last.data == {"prompt": "1"}
    assert [row.data for row in inputs.rows(Position(broken.index + 1, 1))] == [{"prompt": "1"}]


def test_a_damaged_row_group_costs_its_rows_alone(tmp_path):
    path = tmp_path / "in.parquet"
    table = pa.table({"prompt": [f"row {i}" for i in range(100)]})
    pq.write_table(table, path, row_group_size=30, compression="none", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 12] = b"\xff" * 12
    path.write_bytes(content)
    rows = list(Inputs([str(path)]).rows())
    assert [row.index for row in rows] == list(range(100))
    assert [row.data.get("prompt") for row in rows if row.error is None] == [
        f"row {i}" for i in range(100) if not 30 <= i < 60
    ]
    assert {row.error.error_type for row in rows[30:60]} == {"input_damaged"}
    assert "row group 1 cannot be read" in str(rows[30].error)
    assert rows[59].where == f"{path} row 60"
    assert [row.index for row in Inputs([str(path)]).rows(Position(45, 0, 45, 45))] == list(range(45, 100))


def test_a_truncated_arrow_stream_ends_in_an_error_row(tmp_path):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("prompt", pa.string())])) as writer:
        for i in range(3):
            writer.write_batch(pa.record_batch({"prompt": [str(i)]}))
    path = tmp_path / "in.arrow"
    path.write_bytes(sink.getvalue().to_pybytes()[:-40])
    rows = list(Inputs([str(path)]).rows())
    assert [row.data.get("prompt") for row in rows] == ["0", "1", None]
    assert (rows[2].error.error_type, rows[2].where) == ("input_damaged", f"{path} row 3")


def test_a_file_that_goes_away_before_it_is_read(tmp_path):
    write(tmp_path, {"a.jsonl": MANY})
    rows = Inputs([str(tmp_path / "a.jsonl")]).rows()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputFailed, match=r"a\.jsonl cannot be opened: .*No such file"):
        next(rows)


def test_what_the_system_says_of_a_file_that_cannot_be_looked_at(tmp_path, monkeypatch):
    write(tmp_path, {"a.jsonl": MANY})
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "stat", lambda path, **_: os.stat(path / "below"))
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read: .*Not a directory"):
        Inputs([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst"])
def test_a_table_without_so_much_as_a_header_is_refused(tmp_path, name):
    write(tmp_path, {name: b""})
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: the file is empty, which no compressed file is"):
        Inputs([str(tmp_path / name)])


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'paged-infer\[hub\]' brings the datasets library"):
        Inputs([f"hf://datasets/{tmp_path}:train"])


def test_a_hub_that_fails_in_the_middle_is_no_damage(tmp_path, monkeypatch):
    from datasets import IterableDataset

    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "0.parquet")
    inputs = Inputs([f"hf://datasets/{tmp_path}:train"])

    def broken(dataset, size):
        raise ConnectionError("connection reset")
        yield

    monkeypatch.setattr(IterableDataset, "iter", broken)
    with pytest.raises(InputFailed, match=r"reading hf://datasets/.* failed: connection reset"):
        next(inputs.rows())


class Failing(io.BytesIO):
    """A connection that breaks after 3 reads."""

    reads = 0

    def read1(self, size=-1):
        self.reads += 1
        if self.reads > 3:
            raise ConnectionError("connection reset")
        return super().read1(100)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_a_failing_connection_is_no_damage_and_can_be_taken_up_again(tmp_path, monkeypatch, name):
    text = b"prompt\n" + b"".join(b"%d\n" % i for i in range(10**5)) if name == "a.csv" else MANY
    write(tmp_path, {name: gzip.compress(text, 0) if name.endswith("gz") else text})
    inputs = Inputs([str(tmp_path / name)])
    whole = [row.data for row in inputs.rows()]
    monkeypatch.setattr(InputFile, "open_stored", lambda file: Failing((tmp_path / name).read_bytes()))
    rows = inputs.rows()
    before = []
    with pytest.raises(InputFailed, match=f"reading .*{name} failed: connection reset"):
        before.extend(row.data for row in rows)
    assert before or name.endswith(".gz")
    monkeypatch.undo()
    assert before + [row.data for row in Inputs([str(tmp_path / name)]).rows(inputs.position)] == whole


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Each file is 20 MB or more; what is held is a few buffers, or a batch of rows."""
    content = b"".join(b'{"prompt": "%02000d"}\n' % i for i in range(10_000))
    write(tmp_path, {"a.jsonl": content, "b.jsonl.gz": gzip.compress(content, 1), "c.csv": content})
    table = pa.table({"prompt": [f"{i:02000}" for i in range(10_000)]})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=10_000, compression="none", use_dictionary=False)
    del content, table
    pool = pa.default_memory_pool()
    for name in ("a.jsonl", "b.jsonl.gz", "c.csv", "d.parquet"):
        inputs = Inputs([str(tmp_path / name)], columns=["prompt"])
        arrow = pool.bytes_allocated()
        most = 0
        tracemalloc.start()
        for row in inputs.rows():
            if row.index % 500 == 0:
                most = max(most, pool.bytes_allocated())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert row.index >= 9_999 - (name == "c.csv")
        assert peak < 8 << 20, name
        assert most - arrow < 8 << 20, name
