"""From prompts to token ids: what a job's settings ask of the tokenizer, and over-long prompts."""

from __future__ import annotations

import io
import json
import logging

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from paged_infer.config import ConfigError
from paged_infer.io.prompts import Prompt
from paged_infer.io.readers.files import InputFile
from paged_infer.job.config import RunConfig
from paged_infer.job.encode import PromptEncoder
from paged_infer.job.run import JobError, preflight, run_job
from paged_infer.types import SamplingParams
from tests.job.fake_engine import FakeEngine, FakeTokenizer

CHAT = [{"role": "user", "content": "hi"}]


def job(tmp_path, rows, **options):
    path = tmp_path / "in.jsonl"
    if rows is not None:
        path.write_text("\n".join(map(json.dumps, rows)))
    given = {"inputs": str(path), "output": str(tmp_path / "out.arrow"), "progress": "none", "overwrite": True}
    return RunConfig.resolve({**given, **options})


def answers(config, engine=None):
    run_job(config, engine or FakeEngine())
    with pa.memory_map(str(config.output_path)) as source:
        return pa.ipc.open_stream(source).read_all().to_pylist()


def asked(engine):
    return [bytes(engine.requests[i].prompt_token_ids).decode() for i in sorted(engine.requests)]


def test_template_system_and_examples_reach_the_model(tmp_path):
    (tmp_path / "shots.jsonl").write_text('{"q": "1+1", "answer": "2"}')
    (tmp_path / "template.txt").write_text("Q: {{ q }}\n")
    engine = FakeEngine()
    options = {"template": f"@{tmp_path}/template.txt", "few_shot": str(tmp_path / "shots.jsonl"), "system": "S"}
    rows = answers(job(tmp_path, [{"q": "2+2"}, {"p": 1}, {"q": None}], **options), engine)
    assert asked(engine) == ["<system>S<user>Q: 1+1<assistant>2<user>Q: 2+2"]
    assert [row["error_type"] for row in rows] == [None, "template", "template"]
    assert rows[1]["error"].startswith(f"{tmp_path}/in.jsonl line 2: template: 'q' is undefined; the row has p")


def test_messages_out_of_a_table_with_null_keys_are_those_of_clean_json(tmp_path):
    clean = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    nulls = [{**message, "name": None, "tool_calls": None} for message in clean]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}]}]
    kind = pa.list_(
        pa.struct(
            [(name, pa.string()) for name in ("role", "content", "name")] + [("tool_calls", pa.list_(pa.string()))]
        )
    )
    pq.write_table(pa.table({"messages": pa.array([nulls, None, []], kind)}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"messages": [parts]}), tmp_path / "parts.parquet")
    engine, of_table, of_parts = FakeEngine(), FakeEngine(), FakeEngine()
    answers(job(tmp_path, [{"messages": clean}]), engine)
    rows = answers(job(tmp_path, None, inputs=str(tmp_path / "in.parquet")), of_table)
    answers(job(tmp_path, None, inputs=str(tmp_path / "parts.parquet")), of_parts)
    assert asked(of_table) == asked(engine) == ["<user>a<assistant>b"]
    assert asked(of_parts) == ["<user>a"]
    assert [row["error"] for row in rows[1:]] == [
        f"{tmp_path}/in.parquet row 2: the row has no prompt: messages is null",
        f"{tmp_path}/in.parquet row 3: messages is empty",
    ]


def test_the_chat_template_gets_what_was_asked_for(tmp_path):
    engine = FakeEngine()
    options = {"chat_template_kwargs": '{"thinking": false, "a": 1}', "split_special_tokens": True}
    rows = [{"messages": CHAT, "chat_template_kwargs": {"a": 2}, "tools": [{"type": "function"}]}]
    answers(job(tmp_path, rows, **options), engine)
    assert engine.tokenizer.variables == {
        "split_special_tokens": True,
        "thinking": False,
        "a": 2,
        "tools": [{"type": "function"}],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "@missing.txt"}, r"template='@missing.txt' cannot be read"),
        ({"template": "{% if %}"}, r"template: not a valid template"),
        ({"template": "{{ a }}", "prompt_column": "a"}, "leave prompt_column and messages_column out"),
        ({"few_shot": "missing.jsonl"}, "few_shot='missing.jsonl' cannot be read: No such file"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs='{': not JSON"),
        ({"chat_template_kwargs": "[1]"}, "expected a JSON object"),
        ({"too_long": "cut"}, "too_long='cut': expected one of error, truncate-left"),
        ({"split_special_tokens": 1}, "split_special_tokens=1: expected true or false"),
        ({"system": 5}, "system=5: expected text"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_beforehand(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        preflight(job(tmp_path, [{"prompt": "x"}], **options))


def test_a_template_must_fit_the_table(tmp_path):
    pq.write_table(pa.table({"question": ["a"], "label": [1]}), tmp_path / "in.parquet")
    inputs = str(tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="has no column body or title; choose one of question, label in the template"):
        preflight(job(tmp_path, None, inputs=inputs, template="{{ title }} {{ body }}"))
    (tmp_path / "in.csv").write_text("question,label\na,1")
    (tmp_path / "in.txt").write_text("a")
    for name, columns in (("in.csv", "question, label with --prompt-column"), ("in.txt", "prompt in the template")):
        template = None if name == "in.csv" else "{{ title }}"
        with pytest.raises(ConfigError, match=f"choose one of {columns}"):
            preflight(job(tmp_path, None, inputs=str(tmp_path / name), template=template))
    engine = FakeEngine()
    answers(job(tmp_path, None, inputs=inputs, template="{{ row.question }}?"), engine)
    assert asked(engine) == ["a?"]


@pytest.mark.parametrize(
    ("max_tokens", "kept"), [(2, "cdefghij"), (0, "abcdefghij"), (9, "j"), (10, "bcdefghij"), (-1, "bcdefghij")]
)
def test_a_prompt_that_is_cut_leaves_room_for_the_answer(tmp_path, max_tokens, kept):
    engine = FakeEngine(max_model_len=10)
    rows = answers(job(tmp_path, [{"prompt": "abcdefghij"}], too_long="truncate-left", max_tokens=max_tokens), engine)
    assert asked(engine) == [kept]
    assert rows[0]["error"] is None
    rows = answers(job(tmp_path, [{"prompt": "abcdefghij"}], max_tokens=2), FakeEngine(max_model_len=10))
    assert rows[0]["error_type"] == "prompt_too_long"


def test_only_what_is_too_long_is_cut_and_bos_stays(tmp_path):
    engine = FakeEngine(max_model_len=10)
    engine.tokenizer.bos_token_id = ord("a")
    rows = [{"prompt": "abcdefghi"}, {"prompt": "abcdefghij"}, {"prompt_token_ids": list(b"0123456789")}]
    answers(job(tmp_path, rows, too_long="truncate-left", max_tokens=4), engine)
    assert asked(engine) == ["abcdefghi", "afghij", "456789"]


def test_the_end_of_a_huge_text_is_found_without_reading_all_of_it():
    tokenizer = FakeTokenizer()
    encoder = PromptEncoder(tokenizer, 100, truncate=True)
    [ids] = encoder.encode([Prompt(text="x" * 10_000_000 + "end")])
    assert bytes(encoder.fit(ids, SamplingParams(max_tokens=10))) == b"x" * 87 + b"end"
    assert sum(map(len, tokenizer.encoded)) <= 2 * 16 * 100


def test_plain_prompts_to_a_model_with_a_chat_template_are_remarked_on_once(tmp_path, caplog):
    engine = FakeEngine()
    engine.tokenizer.has_chat_template = True
    with caplog.at_level(logging.WARNING):
        answers(job(tmp_path, [{"prompt": "a"}] * 600), engine)
        assert len([record for record in caplog.records if "--chat sends them" in record.message]) == 1
        caplog.clear()
        for options, row in (
            ({"chat": False}, {"prompt": "a"}),
            ({"chat": True}, {"prompt": "a"}),
            ({}, {"messages": CHAT}),
        ):
            answers(job(tmp_path, [row], **options), engine)
        engine.tokenizer.has_chat_template = False
        answers(job(tmp_path, [{"prompt": "a"}]), engine)
    assert not caplog.records


def test_a_batch_file_is_answered_under_its_own_ids(tmp_path):
    def line(name, body):
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    rows = [
        line("a", {"model": "m", "messages": CHAT, "max_completion_tokens": 3}),
        line("b", {"messages": CHAT, "n": 0.5}),
    ]
    results = answers(job(tmp_path, [*rows, line("c", {"messages": CHAT, "seed": 1, "audio": 1})]))
    assert [(row["id"], row["text"]) for row in results[:1]] == [("a", "<us")]
    assert [row["id"] for row in results] == ["a", "b", "c"]
    assert results[2]["error"].endswith("line 3: body.audio=1: this is not supported")


def test_no_rows_at_all(tmp_path):
    for options in ({"limit": 0}, {}):
        rows = [{"prompt": "a"}] if options else []
        assert answers(job(tmp_path, rows, **options)) == []


@pytest.mark.parametrize(
    ("inputs", "output"),
    [
        ("s3://bucket/a/in.jsonl.gz", "in.out.arrow"),
        ("https://host/x/in.csv?token=1", "in.out.arrow"),
        ("hf://datasets/org/name:train", "name-train.out.arrow"),
        ("some/folder/", "some/folder.out.arrow"),
        (".", "out.arrow"),
    ],
)
def test_results_of_what_is_no_local_file_have_a_name_too(inputs, output):
    assert str(RunConfig.resolve({"inputs": inputs}).output_path) == output


def test_results_of_a_pattern_need_a_name():
    with pytest.raises(ConfigError, match="name the results file with -o"):
        RunConfig.resolve({"inputs": "data/*.jsonl"})


class Breaking(io.BytesIO):
    """A connection that breaks after a few kilobytes."""

    def read1(self, size=-1):
        if self.tell() > 4000:
            raise ConnectionError("connection reset")
        return super().read1(1000)


def test_a_connection_that_breaks_stops_the_job_which_goes_on_later(tmp_path, monkeypatch):
    rows = [{"prompt": f"row {i}"} for i in range(1000)]
    config = job(tmp_path, rows, overwrite=False)
    content = (tmp_path / "in.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(InputFile, "open", lambda file, offset=0: file._buffered(Breaking(content)))
        with pytest.raises(JobError, match=r"reading .*in\.jsonl failed: connection reset"):
            run_job(config, FakeEngine())
    assert [row["text"] for row in answers(config)] == [row["prompt"] for row in rows]
