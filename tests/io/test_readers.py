"""Readers: whatever the bytes, every row comes out once, good or as an error that names its line."""

from __future__ import annotations

import bz2
import gzip
import io
import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_infer.config import ConfigError
from paged_infer.io.readers import Inputs, json_text, lines, parse_json_line
from paged_infer.types import RowError


def read(tmp_path, content: bytes, name: str = "in.jsonl", keep=()):
    path = tmp_path / name
    path.write_bytes(content)
    return list(Inputs([str(path)], keep).rows())


def outline(rows):
    """(index, line, prompt or error type) of each row."""
    return [(r.index, r.line, r.error.error_type if r.error else r.data.get("prompt")) for r in rows]


def test_only_the_byte_0a_ends_a_line(tmp_path):
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf".replace("\x0b", "\\u000b").replace("\x0c", "\\f")
    content = f'{{"prompt": "{odd}"}}\r\n{{"prompt": "last"}}'.encode()
    assert outline(read(tmp_path, content)) == [
        (0, 1, "a\u2028b\u2029c\u0085d\x0be\x0cf"),
        (1, 2, "last"),
    ]


def test_raw_control_characters_do_not_split_a_row(tmp_path):
    rows = read(tmp_path, b'{"prompt": "a\x0b\x0cb"}\n{"prompt": "good"}\n')
    assert outline(rows) == [(0, 1, "invalid_json"), (1, 2, "good")]


def test_each_bad_line_is_one_error_row_with_its_line_number(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"prompt": "first"}\r',
        b"",
        b"   \t\r",
        b"[1]",
        b"null",
        b'"x"',
        b"{bad",
        b'{"prompt": "\xff"}',
        b'{"prompt": "old", "prompt": "new"}',
        b"17",
        b'{"prompt": "end"}',
    ]
    assert outline(read(tmp_path, b"\n".join(lines))) == [
        (0, 1, "first"),
        (1, 4, "invalid_json"),
        (2, 5, "invalid_json"),
        (3, 6, "invalid_json"),
        (4, 7, "invalid_json"),
        (5, 8, "invalid_utf8"),
        (6, 9, "new"),
        (7, 10, "invalid_json"),
        (8, 11, "end"),
    ]


def test_empty_and_blank_files_have_no_rows(tmp_path):
    for content in (b"", b"\n", b"\xef\xbb\xbf", b"\r\n \n\t\n"):
        assert read(tmp_path, content) == []


def test_surrogate_pairs_join_and_lone_halves_are_replaced():
    row = parse_json_line(rb'{"pair": "\ud83d\ude00", "high": "\ud83d", "low": ["a\udc00b"], "\ud800": 1}')
    assert row == {"pair": "\U0001f600", "high": "\ufffd", "low": ["a\ufffdb"], "\ufffd": 1}
    json.dumps(row, ensure_ascii=False).encode()


@pytest.mark.parametrize("digits", ["18446744073709551616", "-99999999999999999999", "9" * 40, "1" * 5000])
def test_integers_keep_every_digit(digits):
    value = parse_json_line(b'{"id": %s}' % digits.encode())["id"]
    assert not isinstance(value, float)
    assert value == digits or json_text(value) == digits


def test_numbers_and_nesting_beyond_reason():
    assert parse_json_line(b'{"t": 1e999}')["t"] == float("inf")
    deep = parse_json_line(b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}")
    assert json_text(deep).count("[") == 200
    with pytest.raises(RowError, match="nested too deeply"):
        parse_json_line(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_types_may_change_from_row_to_row(tmp_path):
    content = b'{"meta": 1}\n{"meta": "x"}\n{"meta": {"deep": [null]}}\n{"late": true}\n'
    rows = read(tmp_path, content, keep=["meta", "late"])
    assert [r.kept for r in rows] == [("1", None), ('"x"', None), ('{"deep":[null]}', None), (None, "true")]


def test_a_very_long_row_among_small_ones(tmp_path):
    long = "x" * 40_000_000
    rows = read(tmp_path, b'{"prompt": "a"}\n{"prompt": "%s"}\n{"prompt": "b"}\n' % long.encode())
    assert [len(r.data["prompt"]) for r in rows] == [1, 40_000_000, 1]


def test_a_line_beyond_the_limit_is_skipped_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 64)
    content = b'{"prompt": "a"}\n{"prompt": "' + b"y" * 300 + b'"}\n' + b"z" * 63 + b'\n{"prompt": "b"}\n'
    assert outline(read(tmp_path, content)) == [
        (0, 1, "a"),
        (1, 2, "line_too_long"),
        (2, 3, "invalid_json"),
        (3, 4, "b"),
    ]


ROW = st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20), max_size=4)
LINE = st.one_of(
    st.binary(max_size=60).map(lambda b: b.replace(b"\n", b" ")),
    ROW.map(lambda row: json.dumps(row).encode()),
    ROW.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LINE, max_size=12), st.booleans())
def test_any_bytes_give_rows_and_no_good_row_is_lost(tmp_path_factory, lines, crlf):
    path = tmp_path_factory.mktemp("any") / "in.jsonl"
    path.write_bytes((b"\r\n" if crlf else b"\n").join(lines))
    rows = list(Inputs([str(path)]).rows())
    stripped = [line.removeprefix(b"\xef\xbb\xbf") if i == 0 else line for i, line in enumerate(lines)]
    full = [i + 1 for i, line in enumerate(stripped) if line.strip()]
    assert [row.index for row in rows] == list(range(len(full)))
    assert [row.line for row in rows] == full
    for row in rows:
        try:
            expected = json.loads(stripped[row.line - 1].decode("utf-8"))
        except ValueError:
            expected = None
        assert (row.error is None) == isinstance(expected, dict)
        if row.error is None:
            assert len(row.data) <= len(expected)
            json_text(row.data).encode()


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"])
@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=400))
def test_any_bytes_in_any_format_are_rows_or_a_clear_refusal(tmp_path_factory, suffix, content):
    path = tmp_path_factory.mktemp("any") / f"in{suffix}"
    path.write_bytes(content)
    try:
        rows = list(Inputs([str(path)]).rows())
    except ConfigError as refused:
        message = str(refused)
        rows = []
    else:
        message = str(path)
    assert str(path) in message
    assert all(row.data or row.error for row in rows)


PLAIN_ROWS = b"".join(b'{"prompt": "row %d", "n": %d}\n' % (i, i) for i in range(30))
WHOLE_TABLE = pa.table(
    {
        "prompt": [f"row {i}" for i in range(30)],
        "n": range(30),
        "messages": [[{"role": "user", "content": str(i)}] for i in range(30)],
        "label": pa.array(["yes", "no", None] * 10).dictionary_encode(),
    }
)


def whole_file(suffix):
    """A good file of 30 rows."""
    sink = io.BytesIO()
    if suffix == ".parquet":
        pq.write_table(WHOLE_TABLE, sink, row_group_size=10)
    elif suffix in (".arrow", ".feather", ".zstd.feather"):
        options = pa.ipc.IpcWriteOptions(compression="zstd" if "zstd" in suffix else None)
        new = pa.ipc.new_stream if suffix == ".arrow" else pa.ipc.new_file
        with new(sink, WHOLE_TABLE.schema, options=options) as writer:
            writer.write_table(WHOLE_TABLE, max_chunksize=10)
    elif suffix == ".csv":
        sink.write(b"prompt,n\n" + b"".join(b'"row\n%d",%d\n' % (i, i) for i in range(30)))
    else:
        compress = {".jsonl.gz": gzip.compress, ".jsonl.bz2": bz2.compress, ".jsonl.zst": zstd.compress}
        sink.write(compress.get(suffix, bytes)(PLAIN_ROWS))
    return sink.getvalue()


KINDS = [".jsonl", ".csv", ".jsonl.gz", ".jsonl.bz2", ".jsonl.zst", ".parquet", ".arrow", ".feather", ".zstd.feather"]


@pytest.mark.parametrize("suffix", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_in_a_file_is_rows_or_a_clear_refusal(tmp_path_factory, suffix, data):
    """Neither a traceback nor the end of the process: Arrow itself reads beyond its buffers where offsets are wrong."""
    content = bytearray(whole_file(suffix))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    if data.draw(st.integers(0, 3)) == 0:
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.mktemp("damaged") / f"in{suffix}"
    path.write_bytes(content)
    try:
        rows = list(Inputs([str(path)]).rows())
    except ConfigError as refused:
        rows, message = [], str(refused)
    else:
        message = str(path)
    assert str(path) in message
    assert [row.index for row in rows] == list(range(len(rows)))
    assert all(row.error is not None or row.data for row in rows)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(PLAIN_ROWS) - 1), st.integers(0, 255))
def test_a_changed_byte_costs_two_rows_at_most(tmp_path_factory, place, byte):
    """Two when it makes or unmakes a line end."""
    path = tmp_path_factory.mktemp("changed") / "in.jsonl"
    path.write_bytes(PLAIN_ROWS[:place] + bytes([byte]) + PLAIN_ROWS[place + 1 :])
    good = {row.data.get("n") for row in Inputs([str(path)]).rows() if row.error is None}
    assert len({*range(30)} & good) >= 28


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_compressed_input(tmp_path, name):
    plain = b"".join(b'{"prompt": "%d"}\n' % i for i in range(5000))
    codec = pa.Codec("gzip" if name.endswith("gz") else "zstd")
    if name.endswith("gz"):
        content = gzip.compress(plain[:30_000]) + gzip.compress(plain[30_000:])
    else:
        content = codec.compress(plain, asbytes=True)
    assert [r.data["prompt"] for r in read(tmp_path, content, name)] == [str(i) for i in range(5000)]


def test_several_inputs_number_their_rows_on(tmp_path):
    for name, text in (("a.jsonl", '{"prompt": "1"}\n\n{"prompt": "2"}'), ("b.txt", "3\n\n4\r\n")):
        (tmp_path / name).write_text(text)
    inputs = Inputs([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    rows = list(inputs.rows())
    assert outline(rows) == [(0, 1, "1"), (1, 3, "2"), (2, 1, "3"), (3, 3, "4")]
    assert inputs.fraction_read() == 1.0
    assert rows[2].where.endswith("b.txt line 1")


def test_csv(tmp_path):
    content = b'\xef\xbb\xbfprompt,n\r\n"two\nlines, one value",4\r\nplain,\r\ntoo,many,values\r\n\xff,1\r\n\r\nlast,2'
    rows = read(tmp_path, content, "in.csv", keep=["n"])
    assert outline(rows) == [
        (0, 2, "two\nlines, one value"),
        (1, 4, "plain"),
        (2, 5, "invalid_csv"),
        (3, 6, "invalid_utf8"),
        (4, 8, "last"),
    ]
    assert all(row.is_table for row in rows)
    assert [row.kept for row in rows] == [("4",), ("",), (None,), (None,), ("2",)]


TABLE = pa.table(
    {
        "prompt": pa.array([f"p{i}" for i in range(3000)]),
        "when": pa.array(range(3000), pa.timestamp("ns", "UTC")),
        "label": pa.array(["yes", "no", None] * 1000).dictionary_encode(),
        "wide": pa.array([[{"a": i}] for i in range(3000)]),
    }
)


def write_table(path):
    if path.suffix == ".parquet":
        pq.write_table(TABLE, path, row_group_size=1100)
    else:
        new = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
        with new(path, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=700)


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow", "in.feather"])
def test_tables_keep_types_and_read_only_what_is_used(tmp_path, name):
    path = tmp_path / name
    write_table(path)
    inputs = Inputs([str(path)], ["when", "label"], columns={"prompt", "id"})
    assert [f.type for f in inputs.kept_fields] == [pa.timestamp("ns", "UTC"), TABLE.schema.field("label").type]
    rows = list(inputs.rows())
    assert [r.data["prompt"] for r in rows] == TABLE["prompt"].to_pylist()
    assert set(rows[0].data) == {"prompt", "when", "label"}
    assert [r.line for r in rows] == list(range(1, 3001))
    whens = pa.array([r.kept[0] for r in rows], pa.timestamp("ns", "UTC"))
    assert whens.equals(TABLE["when"].combine_chunks())
    assert inputs.columns() == TABLE.schema.names


def test_a_table_without_any_used_column_still_has_its_rows(tmp_path):
    for name in ("in.parquet", "in.arrow"):
        write_table(tmp_path / name)
        assert len(list(Inputs([str(tmp_path / name)], columns={"question"}).rows())) == 3000


def test_a_value_that_cannot_be_read_costs_one_row(tmp_path):
    text = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc")]
    )
    path = tmp_path / "in.arrow"
    with pa.ipc.new_stream(path, pa.schema([("prompt", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([text], names=["prompt"]))
    assert outline(Inputs([str(path)]).rows()) == [(0, 1, "a"), (1, 2, "invalid_value"), (2, 3, "c")]


@pytest.mark.parametrize(
    ("name", "content", "keep", "message"),
    [
        ("in.json", b"{}", (), "cannot tell what"),
        ("in.parquet.gz", b"", (), "cannot tell what"),
        ("in.parquet", b"not parquet", (), "cannot be read"),
        ("in.csv", b"prompt,b\n", ("c",), "no column 'c'; its columns are prompt, b"),
        ("in.txt", b"x", ("c",), "only the column 'prompt'"),
        (None, b"", (), "no such file"),
    ],
)
def test_unusable_inputs_are_refused_with_a_reason(tmp_path, name, content, keep, message):
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Inputs([str(path)], keep)


def test_kept_columns_of_two_types_are_refused(tmp_path):
    write_table(tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("when\n1")
    with pytest.raises(ConfigError, match="keep='when'"):
        Inputs([str(tmp_path / "a.parquet"), str(tmp_path / "b.csv")], ["when"])


def test_lines_of_text_that_are_too_long_cost_themselves_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 64)
    rows = read(tmp_path, b"a\n" + b"y" * 200 + b"\n\xff\nb\n", "in.txt")
    assert outline(rows) == [(0, 1, "a"), (1, 2, "line_too_long"), (2, 3, "invalid_utf8"), (3, 4, "b")]


def test_csv_lines_and_values_that_are_too_long_cost_themselves_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 64)
    line = b"y" * 200
    content = b'prompt,n\na,1\n"' + line + b'",2\nb,3\n"' + b"z" * 60 + b"\n" + b"z" * 20 + b'",4\nc,5\n' + line
    rows = read(tmp_path, content, "in.csv")
    assert [(r.line, r.error.error_type if r.error else r.data) for r in rows] == [
        (2, {"prompt": "a", "n": "1"}),
        (3, "line_too_long"),
        (4, {"prompt": "b", "n": "3"}),
        (5, "invalid_csv"),
        (7, {"prompt": "c", "n": "5"}),
        (8, "line_too_long"),
    ]
    assert "not CSV: field larger than field limit" in str(rows[3].error)
    inputs = Inputs([str(tmp_path / "in.csv")])
    places = [(row.index, inputs.position) for row in inputs.rows()]
    for index, place in places:
        assert [row.index for row in Inputs([str(tmp_path / "in.csv")]).rows(place)] == [*range(index + 1, 6)]


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
def test_the_blocks_csv_is_read_in_do_not_show(tmp_path, monkeypatch, end):
    content = end.join([b"prompt,n", *(b"%d,%d" % (i, i) for i in range(50))]) + end
    for size in (16, 17, 18, 19, 200, 1 << 20):
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", size)
        rows = read(tmp_path, content, "in.csv")
        assert [(r.line, r.data) for r in rows] == [(i + 2, {"prompt": f"{i}", "n": f"{i}"}) for i in range(50)]


@pytest.mark.parametrize("name", ["in.csv", "in.txt", "in.parquet"])
def test_a_kept_column_must_be_there(tmp_path, name):
    path = tmp_path / name
    if name == "in.parquet":
        pq.write_table(pa.table({"prompt": ["a"]}), path)
    else:
        path.write_text("prompt\na\n")
    with pytest.raises(
        ConfigError, match=rf"{name} has (no column 'label'; its columns are prompt|lines of text and only)"
    ):
        Inputs([str(path)], ["label"])
