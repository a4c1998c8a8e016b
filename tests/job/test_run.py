"""The job over an engine without a model: every row once, in place, whatever happens to its neighbours."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_infer.config import ConfigError
from paged_infer.io.schema import read_settings
from paged_infer.io.targets import make_target
from paged_infer.io.writers import journal_path
from paged_infer.job import run as job
from paged_infer.job.config import RunConfig
from paged_infer.job.run import JobError, preflight, run_job
from paged_infer.parallel.process import WorkerFailed
from paged_infer.types import noise_key
from tests.job.fake_engine import FakeEngine


def config(tmp_path, rows, name="in.jsonl", **options):
    path = tmp_path / name
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    elif rows is not None:
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return RunConfig.resolve({"inputs": [str(path)], "progress": "none", "overwrite": True, **options})


def partial_path(path):
    return journal_path(make_target(path))


def read(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def answers(run_config, engine=None):
    summary = run_job(run_config, engine or FakeEngine())
    return read(run_config.output_path).to_pylist(), summary


def test_bad_rows_stay_in_place_and_touch_no_neighbour(tmp_path):
    rows = [{"id": i, "prompt": f"row {i}"} for i in range(10)]
    rows[3] = {"id": 3, "prompt": "long " * 10}
    rows[5]["temperature"] = -1
    rows[7]["messages"] = [{"role": "user", "content": "x"}]
    rows[8] = {"id": 8, "messages": [{"role": "wizard", "content": "x"}]}
    result, summary = answers(config(tmp_path, rows), FakeEngine(max_model_len=40))
    assert [row["row"] for row in result] == list(range(10))
    assert [row["id"] for row in result] == [str(i) for i in range(10)]
    errors = {row["row"]: row["error_type"] for row in result if row["finish_reason"] == "error"}
    assert errors == {3: "prompt_too_long", 5: "invalid_parameter", 7: "ambiguous_prompt", 8: "chat_template"}
    assert [row["text"] for row in result if row["row"] not in errors] == [f"row {i}" for i in (0, 1, 2, 4, 6, 9)]
    assert result[5]["error"].startswith(f"{tmp_path}/in.jsonl line 6: temperature=-1")
    assert summary.exit_code == 3
    assert summary.errors == Counter(errors.values())


def test_all_good_and_empty_inputs_exit_0(tmp_path):
    for rows, count in (([{"prompt": "a"}, {"prompt": "b"}], 2), (b"", 0)):
        result, summary = answers(config(tmp_path, rows))
        assert (len(result), summary.rows, summary.exit_code) == (count, count, 0)
        assert summary.output.exists()


def test_order_is_the_inputs_whatever_order_rows_finish_in(tmp_path):
    rows = [{"prompt": f"row {i}", "max_tokens": 1 + i % 9} for i in range(2000)]
    result, _ = answers(config(tmp_path, rows), FakeEngine(rate=37))
    assert [row["text"] for row in result] == [f"row {i}"[: 1 + i % 9] for i in range(2000)]


def test_each_row_is_sampled_by_its_own_options(tmp_path):
    rows = [
        {"prompt": "a", "max_tokens": 2, "temperature": 0, "stop": "x"},
        {"prompt": "b", "max_tokens": 5, "temperature": 1, "stop": ["y", "z"]},
        {"prompt": "c"},
        {"prompt": "d", "max_tokens": None, "temperature": 0.25},
    ]
    engine = FakeEngine()
    engine.sampling_defaults = {"max_tokens": 11, "top_k": 20, "temperature": 0.6}
    answers(config(tmp_path, rows, temperature=0.5, max_tokens=9), engine)
    params = [engine.requests[i].params for i in range(4)]
    assert [p.max_tokens for p in params] == [2, 5, 9, 9]
    assert [p.temperature for p in params] == [0.0, 1.0, 0.5, 0.25]
    assert [p.stop for p in params] == [("x",), ("y", "z"), (), ()]
    assert all(p.top_k == 20 for p in params)


def test_samples_need_a_temperature_from_anywhere(tmp_path):
    engine = FakeEngine()
    engine.sampling_defaults = {"temperature": 0.7}
    run_config = config(tmp_path, [{"prompt": "a"}], n=3, on_error="fail")
    preflight(run_config)
    answers(run_config, engine)
    assert (engine.requests[0].params.n, engine.requests[0].params.temperature) == (3, 0.7)
    with pytest.raises(
        ConfigError, match="own settings and yours do not fit together: n=3: expected 1 at temperature 0"
    ):
        run_job(run_config, FakeEngine())
    for options in ({"temperature": 0}, {"generation_config": "none"}):
        with pytest.raises(ConfigError, match="n=3: expected 1 at temperature 0"):
            config(tmp_path, None, n=3, **options)


@pytest.mark.parametrize("stop", ["", [""], ["", "x"], 5, {"a": 1}, [1]])
def test_odd_stops_cost_only_their_row(tmp_path, stop):
    result, _ = answers(config(tmp_path, [{"prompt": "a", "stop": stop}, {"prompt": "b", "stop": None}]))
    assert [row["error_type"] for row in result] == ["invalid_parameter", None]
    assert "stop=" in result[0]["error"]


@pytest.mark.parametrize(
    ("max_tokens", "outcome"),
    [
        (0, ""),
        (-1, "abcdef"),
        (None, "abcdef"),
        (3, "abc"),
        (-2, "error"),
        ("3", "error"),
        (True, "error"),
        (2.5, "error"),
    ],
)
def test_max_tokens_of_a_row(tmp_path, max_tokens, outcome):
    [row], _ = answers(config(tmp_path, [{"prompt": "abcdef", "max_tokens": max_tokens}]))
    assert (row["error_type"] == "invalid_parameter") if outcome == "error" else (row["text"] == outcome)
    if max_tokens == 0:
        assert (row["finish_reason"], row["token_ids"], row["output_tokens"]) == ("length", [], 0)


def test_empty_prompts_are_error_rows_among_others(tmp_path):
    rows = [{"prompt": ""}, {"prompt": "ok"}, {"prompt_token_ids": []}, {"messages": []}, {"prompt": " "}]
    result, _ = answers(config(tmp_path, rows))
    assert [row["error_type"] for row in result] == ["empty_prompt", None, "empty_prompt", "chat_template", None]


@pytest.mark.parametrize("ids", [[1, 999], [-1], [2**63], ["5"], [5.5], [True], "12", {"a": 1}, 7])
def test_bad_token_ids_cost_only_their_row(tmp_path, ids):
    result, _ = answers(config(tmp_path, [{"prompt_token_ids": ids}, {"prompt_token_ids": [65, 66]}]))
    assert [row["error_type"] for row in result] == ["invalid_parameter", None]
    assert "prompt_token_ids" in result[0]["error"]
    assert result[1]["text"] == "AB"


def test_surrogates_reach_prompt_id_and_stop_as_valid_text(tmp_path):
    lines = rb"""{"prompt": "\ud83d\ude00", "id": "\ud83d", "stop": "\udc00!"}
{"prompt": "a\udc00b", "id": "\ud83d\ude00"}"""
    engine = FakeEngine()
    result, summary = answers(config(tmp_path, lines), engine)
    assert summary.exit_code == 0
    assert [row["id"] for row in result] == ["\ufffd", "\U0001f600"]
    assert [row["text"] for row in result] == ["\U0001f600", "a\ufffdb"]
    assert engine.requests[0].params.stop == ("\ufffd!",)


def test_a_40_mb_row_is_too_long_without_being_tokenised(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "x" * 40_000_000}, {"messages": [{"role": "user", "content": "y" * 10**6}]}]
    engine = FakeEngine()
    result, _ = answers(config(tmp_path, rows), engine)
    assert [row["error_type"] for row in result] == [None, "prompt_too_long", "prompt_too_long"]
    assert max(map(len, engine.tokenizer.encoded)) <= 16 * 1000


def test_noise_belongs_to_the_row(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "a", "seed": 7}, {"prompt": "b", "seed": 7}, {"prompt": "a"}]
    engine = FakeEngine()
    answers(config(tmp_path, rows, seed=3, dedupe=False, temperature=1.0), engine)
    keys = [engine.requests[i].noise_key for i in range(4)]
    assert keys[1] == keys[2] == noise_key(7, 3, 1)
    assert keys[0] == noise_key(None, 3, 0)
    assert len({*keys}) == 3
    again = FakeEngine()
    answers(config(tmp_path, rows, temperature=1.0), again)
    assert again.requests[0].noise_key != keys[0]
    assert again.requests[1].noise_key == keys[1]


def test_the_output_says_how_it_was_made(tmp_path):
    engine = FakeEngine()
    engine.sampling_defaults = {"top_k": 20}
    run_config = config(tmp_path, [{"prompt": "a"}], max_tokens=7)
    summary = run_job(run_config, engine)
    stored = read_settings(read(run_config.output_path).schema)
    assert stored["sampling"]["max_tokens"] == 7
    assert stored["sampling"]["top_k"] == 20
    assert stored["engine"]["seed"] == summary.run_seed
    assert stored["inputs"] == list(run_config.inputs)


def test_schema_is_byte_equal_whether_rows_fail_or_not(tmp_path):
    good, bad = {"prompt": "a", "note": 1}, {"question": "a"}
    schemas = []
    for rows in ([good] * 3, [bad] * 3, [good, bad, good], []):
        run_config = config(tmp_path, rows, seed=1, keep=["note"])
        run_job(run_config, FakeEngine())
        schema = read(run_config.output_path).schema
        assert read_settings(schema)["run_seed"] == 1
        schemas.append(schema.remove_metadata().serialize().to_pybytes())
    assert len({*schemas}) == 1


def test_parquet_rows_with_kept_columns(tmp_path):
    path = tmp_path / "in.parquet"
    table = {"question": ["a", "b", None], "n": [4, 5, 6], "when": pa.array([1, 2, 3], pa.timestamp("ms"))}
    pq.write_table(pa.table(table), path)
    run_config = config(tmp_path, None, "in.parquet", prompt_column="question", id_column="n", keep=["when"])
    run_job(run_config, FakeEngine())
    result = read(run_config.output_path)
    assert result["id"].to_pylist() == ["4", "5", "6"]
    assert result["text"].to_pylist() == ["a", "b", None]
    assert result["when"].equals(pa.chunked_array([table["when"]]))
    assert result["error_type"].to_pylist() == [None, None, "missing_prompt"]


def test_limit_counts_input_rows(tmp_path):
    result, summary = answers(config(tmp_path, [{"prompt": "a"}, "{bad", {"prompt": "c"}, {"prompt": "d"}], limit=3))
    assert [row["row"] for row in result] == [0, 1, 2]
    assert summary.rows == 3


def test_waiting_rows_are_bounded_however_long_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "WINDOW_ROWS", 500)
    engine = FakeEngine(rate=10)
    _, summary = answers(config(tmp_path, [{"prompt": str(i)} for i in range(3000)]), engine)
    assert summary.rows == 3000
    assert 500 <= engine.max_waiting < 500 + job.CHUNK_ROWS


def test_pending_tokens_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "WINDOW_TOKENS", 20_000)
    engine = FakeEngine(rate=1)
    answers(config(tmp_path, [{"prompt": f"{i:900}"} for i in range(700)]), engine)
    assert engine.max_waiting <= 20_000 // 900 + job.CHUNK_ROWS + 1


def test_on_error_fail_stops_and_keeps_what_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "WINDOW_ROWS", 100)
    rows = [{"prompt": f"row {i}"} for i in range(600)] + ["{bad"]
    run_config = config(tmp_path, rows, on_error="fail")
    with pytest.raises(JobError, match=r"in\.jsonl line 601: not JSON"):
        run_job(run_config, FakeEngine(rate=300))
    assert not run_config.output_path.exists()
    assert read(partial_path(run_config.output_path)).num_rows > 0


def test_preflight_finds_bad_rows_before_a_model_is_loaded(tmp_path):
    bad = [{"prompt": "a"}, {"prompt": "b", "top_p": 7}]
    with pytest.raises(JobError, match="line 2: top_p=7"):
        preflight(config(tmp_path, bad, on_error="fail"))
    preflight(config(tmp_path, bad, on_error="fail", limit=1))
    preflight(config(tmp_path, bad))


def test_preflight_names_the_columns_a_table_has(tmp_path):
    pq.write_table(pa.table({"question": ["a"], "label": [1]}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"no column prompt.*question, label.*--prompt-column"):
        preflight(config(tmp_path, None, "in.parquet"))


def test_preflight_will_not_replace_results(tmp_path):
    run_config = config(tmp_path, [{"prompt": "a"}], overwrite=False)
    run_job(run_config, FakeEngine())
    preflight(run_config)
    with pytest.raises(ConfigError, match="exists already, made with other settings"):
        preflight(replace(run_config, system="Be brief."))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_keeps_what_is_done(tmp_path, number, code):
    def stop_in_step_3(engine):
        if engine.steps == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    run_config = config(tmp_path, [{"prompt": f"row {i}"} for i in range(100)])
    summary = run_job(run_config, FakeEngine(rate=4, on_step=stop_in_step_3))
    assert summary.exit_code == code
    assert signal.getsignal(number) == before
    assert not run_config.output_path.exists()
    kept = read(partial_path(run_config.output_path))
    assert sorted(kept["row"].to_pylist()) == list(range(12))


@pytest.mark.parametrize(("raised", "kind"), [(RuntimeError, RuntimeError), (WorkerFailed, JobError)])
def test_an_exception_in_the_engine_keeps_what_is_done(tmp_path, raised, kind):
    def fail_in_step_3(engine):
        if engine.steps == 3:
            raise raised("the engine broke")

    run_config = config(tmp_path, [{"prompt": f"row {i}"} for i in range(100)])
    with pytest.raises(kind, match="the engine broke"):
        run_job(run_config, FakeEngine(rate=4, on_step=fail_in_step_3))
    assert not run_config.output_path.exists()
    assert read(partial_path(run_config.output_path)).num_rows == 8


ROWS = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")),
        st.fixed_dictionaries(
            {},
            optional={
                "prompt": st.none() | st.text(max_size=5) | st.integers(),
                "messages": st.none() | st.lists(st.text(max_size=3), max_size=2) | st.text(max_size=4),
                "prompt_token_ids": st.lists(st.integers(-2, 300) | st.floats() | st.booleans(), max_size=3),
                "max_tokens": st.none() | st.integers(-3, 5) | st.text(max_size=3),
                "stop": st.none() | st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=2),
                "id": st.recursive(st.none() | st.text(max_size=3) | st.integers(), st.lists, max_leaves=3),
                "seed": st.integers() | st.floats(),
            },
        ).map(lambda row: json.dumps(row).encode()),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_any_rows_come_out_once_each_and_never_as_a_traceback(tmp_path_factory, lines):
    run_config = config(tmp_path_factory.mktemp("any"), b"\n".join(lines))
    result, summary = answers(run_config)
    full = sum(1 for i, line in enumerate(lines) if (line.removeprefix(b"\xef\xbb\xbf") if i == 0 else line).strip())
    assert [row["row"] for row in result] == list(range(full))
    assert all((row["error"] is None) == (row["text"] is not None) for row in result)
    assert summary.rows == full
