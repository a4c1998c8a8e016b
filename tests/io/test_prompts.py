"""Prompts: exactly one source, the row's own options, ids as text."""

from __future__ import annotations

import logging

import pytest

from paged_infer.io.prompts import PromptColumns, PromptReader
from paged_infer.io.readers import Row, parse_json_line
from paged_infer.types import RowError, SamplingParams


def row(data, *, is_table=False):
    return Row(0, "in.jsonl", 7, is_table, data)


def read(data, *, is_table=False, prompt=None, messages=None, **options):
    return PromptReader(PromptColumns(prompt, messages), **options).read(row(data, is_table=is_table))


MESSAGES = [{"role": "user", "content": "hi"}]


def test_each_source():
    assert read({"prompt": "hi", "messages": None}).text == "hi"
    assert read({"prompt_token_ids": [1, 2]}).token_ids == [1, 2]
    assert read({"messages": MESSAGES}).messages == MESSAGES
    assert read({"messages": '[{"role": "user", "content": "hi"}]'}).messages == MESSAGES
    assert read({"prompt": ""}).text == ""


@pytest.mark.parametrize(
    ("data", "error_type", "field"),
    [
        ({"prompt": "a", "messages": MESSAGES}, "ambiguous_prompt", "messages"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "ambiguous_prompt", "prompt_token_ids"),
        ({"question": "a"}, "missing_prompt", "prompt"),
        ({"prompt": None}, "missing_prompt", "prompt"),
        ({}, "missing_prompt", "prompt"),
        ({"prompt": 5}, "invalid_prompt", "prompt"),
        ({"prompt": ["a"]}, "invalid_prompt", "prompt"),
        ({"messages": "not json"}, "invalid_prompt", "messages"),
    ],
)
def test_rows_without_exactly_one_prompt_are_refused(data, error_type, field):
    with pytest.raises(RowError) as caught:
        read(data)
    assert (caught.value.error_type, caught.value.field) == (error_type, field)


def test_naming_a_column_settles_an_ambiguous_row():
    data = {"prompt": "p", "messages": MESSAGES, "question": "q", "turns": MESSAGES}
    assert read(data, prompt="question").text == "q"
    assert read(data, prompt="prompt").text == "p"
    assert read(data, messages="turns").messages == MESSAGES
    with pytest.raises(RowError, match="turns"):
        read(data, prompt="question", messages="turns")


def test_chat_and_system():
    assert read({"prompt": "q"}, chat=True).messages == [{"role": "user", "content": "q"}]
    both = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    assert read({"prompt": "q"}, system="be brief").messages == both
    assert read({"messages": [{"role": "user", "content": "q"}]}, system="be brief").messages == both
    assert read({"messages": both}, system="other").messages == both


def test_row_options_are_honoured_by_name_and_null_is_unset():
    prompt = read({"prompt": "q", "max_tokens": 5, "temperature": None, "stop": "x", "note": 1})
    assert prompt.options == {"max_tokens": 5, "stop": "x"}
    assert SamplingParams.resolve({"temperature": 0.5}, prompt.options).temperature == 0.5


def test_in_tables_options_are_data_unless_asked_for():
    data = {"prompt": "q", "max_tokens": 5, "n": 3}
    assert read(data, is_table=True).options == {}
    assert read({"prompt": "q", "max_tokens": 5}, is_table=True, row_options=True).options == {"max_tokens": 5}
    assert read(data, row_options=False).options == {}


@pytest.mark.parametrize("option", [{"n": 4}, {"logprobs": 0}, {"json_schema": {}}, {"presence_penalty": 0.5}])
def test_options_that_are_not_supported_are_refused_not_ignored(option):
    with pytest.raises(RowError, match=f"{next(iter(option))}.*not supported"):
        read({"prompt": "q", **option})


def test_options_that_change_nothing_are_fine():
    assert read({"prompt": "q", "n": 1, "logprobs": None, "repetition_penalty": 1.0}).options == {}


def test_near_misses_are_named_once(caplog):
    reader = PromptReader(PromptColumns())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader.read(row({"prompt": "q", "max_token": 3, "max_new_tokens": 4, "prompt_tokens": 5, "notes": 1}))
    assert len(caplog.records) == 2
    assert "in.jsonl line 7: 'max_token'" in caplog.text
    assert caplog.text.count("did you mean 'max_tokens'?") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'"a\\nb"', "a\nb"),
        (b"7", "7"),
        (b"7.50", "7.5"),
        (b"true", "true"),
        (b"null", None),
        (b"123456789012345678901234567890", "123456789012345678901234567890"),
        (b'"\\ud83d"', "\ufffd"),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'{"a":[1]}', '{"a":[1]}'),
    ],
)
def test_id_is_echoed_as_text(value, text):
    reader = PromptReader(PromptColumns())
    assert reader.id_text(row(parse_json_line(b'{"id": %s}' % value))) == text


def test_used_columns_leave_the_rest_of_a_table_unread():
    assert PromptColumns("q", id="key").used(row_options=False) == {"q", "key"}
    assert "max_tokens" in PromptColumns().used(row_options=True)
