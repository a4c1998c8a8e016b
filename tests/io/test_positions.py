"""Places in the inputs: reading on from one gives exactly the rows that were still to come, cheaply."""

from __future__ import annotations

import bz2
import gzip
import io
import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_infer.config import ConfigError
from paged_infer.io.fingerprint import difference
from paged_infer.io.readers import Inputs, Position, lines

LINES = [
    b'\xef\xbb\xbf{"prompt": "first"}\r',
    b"",
    b"  ",
    b"{bad",
    b'{"prompt": "\xff"}',
    '{"prompt": "\u2028\u0085"}'.encode(),
    b"",
    b'{"prompt": "last"}',
]
CSV = b'prompt,note\r\n"two\r\nlines",1\r\n\r\nplain,"a, b"\rold mac,2\n\xff,3\n"""quoted""",\n"never closed,5\nrest'
TABLE = pa.table({"prompt": [f"row {i}" for i in range(50)], "n": range(50)})


def write_inputs(folder):
    """A file of each kind, in the order of their names."""
    text = b"\n".join(LINES)
    (folder / "a.jsonl").write_bytes(text)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:] + b"\n"))
    (folder / "c.txt").write_bytes(b"one\n\n \ntwo\r\nthree")
    (folder / "d.csv").write_bytes(CSV)
    pq.write_table(TABLE, folder / "e.parquet", row_group_size=7)
    for name, new in (("f.arrow", pa.ipc.new_stream), ("g.feather", pa.ipc.new_file)):
        with new(folder / name, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=9)
    (folder / "g2.arrow").write_bytes((folder / "f.arrow").read_bytes()[:-300])
    (folder / "h.jsonl.bz2").write_bytes(bz2.compress(text))
    (folder / "i.jsonl").write_bytes(b"")
    (folder / "j.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "%s"}\n' % bytes(range(97, 123)) * 9)[:-9])
    (folder / "k.jsonl").write_bytes(text)
    return [str(path) for path in sorted(folder.iterdir())]


def outline(rows):
    return [(row.index, row.where, row.data, str(row.error)) for row in rows]


def test_reading_goes_on_from_any_place(tmp_path):
    paths = write_inputs(tmp_path)
    inputs = Inputs(paths)
    positions, rows = [Position()], []
    for row in inputs.rows():
        rows.append(row)
        positions.append(inputs.position)
    everything = outline(rows)
    assert {row[1].split("/")[-1].split(" ")[0] for row in everything} == {
        path.split("/")[-1] for path in paths if not path.endswith("i.jsonl")
    }
    for position in positions:
        again = Inputs(paths)
        stored = Position.from_json(json.loads(json.dumps(position.to_json())))
        assert outline(again.rows(stored)) == everything[position.index :]
        assert again.position == positions[-1]


def test_a_plain_file_is_entered_without_reading_what_lies_before(tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n' * 1_000_000)
    read = 0

    class Counting(io.FileIO):
        def readinto(self, buffer):
            nonlocal read
            count = super().readinto(buffer)
            read += count
            return count

    monkeypatch.setattr(
        "paged_infer.io.readers.files.open", lambda path, mode, buffering: Counting(path), raising=False
    )
    inputs = Inputs([str(path)])
    first = next(inputs.rows(Position(999_999, 0, 999_999, 999_999 * 16)))
    assert (first.index, first.line, first.data) == (999_999, 1_000_000, {"prompt": "x"})
    assert 0 < read <= 32
    assert inputs.position == Position(1_000_000, 0, 1_000_000, 16_000_000)


def test_standard_input_has_no_middle(monkeypatch):
    inputs = Inputs(["-"])
    with pytest.raises(ConfigError, match="save it as a file"):
        inputs.rows(Position(1, 0, 1, 10))
    with pytest.raises(ConfigError, match="cannot be counted"):
        inputs.count()


@pytest.mark.parametrize(
    "value", [{}, {"index": 1}, {"index": -1, "source": 0, "line": 0, "offset": 0}, {"index": "1"}]
)
def test_what_is_no_position_is_refused(value):
    with pytest.raises(ValueError, match="no position"):
        Position.from_json(value)


def test_there_is_nothing_behind_the_last_file(tmp_path):
    paths = write_inputs(tmp_path)
    assert list(Inputs(paths).rows(Position(9, len(paths)))) == []
    with pytest.raises(ConfigError, match="no input number"):
        Inputs(paths).rows(Position(9, len(paths) + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_shards_are_contiguous_and_together_everything(tmp_path, n):
    paths = write_inputs(tmp_path)
    everything = outline(Inputs(paths).rows())
    assert Inputs(paths).count() == len(everything)
    joined, sizes = [], []
    for i in range(1, n + 1):
        inputs = Inputs(paths)
        start, stop = inputs.shard(i, n)
        assert start.index == len(joined)
        shard = [row for row in outline(inputs.rows(start)) if row[0] < stop]
        joined += shard
        sizes.append(len(shard))
    assert joined == everything
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"x", b" ", b"\t\x0b\r", b"", b"\xef\xbb\xbf", b"long" * 9, b"\x85", b"\xc2\xa0"])),
    st.booleans(),
    st.integers(3, 40),
)
def test_rows_are_counted_as_they_are_read(texts, ended, block):
    content = b"\n".join(texts) + b"\n" * ended
    before = lines._SCAN_BYTES
    lines._SCAN_BYTES = block
    try:
        read = list(lines.read_lines(io.BytesIO(content), 1, 0))
        assert lines.scan_lines(io.BytesIO(content))[0] == len(read)
        for i, (number, offset, _) in enumerate(read, start=1):
            assert lines.scan_lines(io.BytesIO(content), i) == (i, number, offset)
    finally:
        lines._SCAN_BYTES = before


def changed(path, content):
    path.write_bytes(content)
    return Inputs([str(path)])


def test_a_file_that_only_grew_at_its_end_is_the_same(tmp_path):
    path = tmp_path / "in.jsonl"
    text = b'{"prompt": "some prompt"}\n' * 10_000
    recorded = changed(path, text).fingerprint()
    assert json.loads(json.dumps(recorded)) == recorded
    assert difference(recorded, changed(path, text)) is None
    assert difference(recorded, changed(path, text + b"more\n")) is None
    assert "is not what it was (260,000 bytes before, now 259,974)" in difference(recorded, changed(path, text[26:]))
    assert "is not what it was" in difference(recorded, changed(path, b"X" + text[1:]))
    assert "is not what it was" in difference(recorded, changed(path, text[:-2] + b"X\n"))
    assert "is not what it was" in difference(recorded, changed(path, text[:-2] + b"X\nmore"))


def test_a_last_line_without_an_end_may_get_one_but_not_more(tmp_path):
    path = tmp_path / "in.jsonl"
    inputs = changed(path, b'{"prompt": "a"}\n{"prompt": 1}')
    recorded = inputs.fingerprint()
    assert len(list(inputs.rows())) == 2
    end = inputs.position
    for grown in (b'\n{"prompt": "c"}', b'\r\n{"prompt": "c"}\n', b"\n\n"):
        again = changed(path, b'{"prompt": "a"}\n{"prompt": 1}' + grown)
        assert difference(recorded, again) is None
        rows = list(again.rows(end))
        assert [(row.index, row.line) for row in rows] == ([(2, 3)] if b"c" in grown else [])
    assert "is not what it was" in difference(recorded, changed(path, b'{"prompt": "a"}\n{"prompt": 1}2\n'))


def test_what_is_compressed_or_a_table_does_not_grow(tmp_path):
    whole = gzip.compress(b'{"prompt": "a"}\n')
    recorded = changed(tmp_path / "in.jsonl.gz", whole).fingerprint()
    assert difference(recorded, changed(tmp_path / "in.jsonl.gz", whole + whole)) is not None


def test_files_are_known_by_content_and_may_be_followed_by_others(tmp_path):
    for name, text in (("a.jsonl", "1\n"), ("b.jsonl", "2\n"), ("moved.jsonl", "1\n"), ("c.jsonl", "3\n")):
        (tmp_path / name).write_text(text)

    def inputs(*names):
        return Inputs([str(tmp_path / name) for name in names])

    recorded = inputs("a.jsonl", "b.jsonl").fingerprint()
    assert difference(recorded, inputs("moved.jsonl", "b.jsonl")) is None
    assert difference(recorded, inputs("a.jsonl", "b.jsonl", "c.jsonl")) is None
    assert "2 input files were there before, now 1" in difference(recorded, inputs("a.jsonl"))
    assert "b.jsonl is not what it was" in difference(recorded, inputs("b.jsonl", "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("1\n1\n")
    assert "a.jsonl is not what it was" in difference(recorded, inputs("a.jsonl", "b.jsonl"))
    standard = Inputs(["-"]).fingerprint()
    assert standard == [{"name": "-", "size": None, "head": None, "tail": None}]
    assert difference(standard, Inputs(["-"])) is None
    assert "was - before" in difference(standard, inputs("c.jsonl"))
