"""Prompts: exactly one source, the row's own options, ids as text."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_infer.config import ConfigError
from paged_infer.io.openai_requests import read_batch_line
from paged_infer.io.prompts import PromptColumns, PromptReader
from paged_infer.io.readers import Row, parse_json_line
from paged_infer.io.templates import RowTemplate
from paged_infer.types import RowError, SamplingParams


def row(data, *, is_table=False):
    return Row(0, "in.jsonl", 7, is_table, data)


def read(data, *, is_table=False, prompt=None, messages=None, template=None, system=None, **options):
    if template is not None:
        options["template"] = RowTemplate(template, "template")
    if system is not None:
        options["system"] = RowTemplate(system, "system")
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


@pytest.mark.parametrize("option", [{"n": 4}, {"logprobs": 0}, {"json_schema": {}}, {"logit_bias": {"5": 1}}])
def test_every_sampling_option_is_one_of_the_row_s(option):
    assert read({"prompt": "q", **option}).options == option


def test_options_that_are_unset_are_fine():
    assert read({"prompt": "q", "n": None, "logprobs": None, "adapter": None}).options == {}


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


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, {"prompt", "prompt_token_ids", "messages", "id"}),
        ({"prompt": "q", "id": "key"}, {"q", "key"}),
        ({"template": "{% for t in tags %}{{ t }}{% endfor %}{{ body }}"}, {"tags", "body", "id"}),
        ({"template": "{{ body }}", "system": "{{ tone }}"}, {"body", "tone", "id"}),
        ({"template": "{{ row['a b'] }}"}, None),
        ({"system": "{{ row }}"}, None),
        ({"template": "{{ body }}", "system": "plain"}, {"body", "id"}),
    ],
)
def test_used_columns_leave_the_rest_of_a_table_unread(options, used):
    columns = PromptColumns(options.pop("prompt", None), id=options.pop("id", "id"))
    templates = {name: RowTemplate(source, name) for name, source in options.items()}
    assert PromptReader(columns, **templates).used_columns() == used
    with_options = PromptReader(columns, row_options=True, **templates).used_columns()
    assert with_options is None if used is None else with_options > used | {"max_tokens", "tools"}


def test_a_template_makes_the_prompt_of_the_columns():
    data = {"title": "T", "tags": ["a", "b"], "count": 3, "prompt": "unused", "messages": MESSAGES}
    assert read(data, template="{{ title }}: {{ tags | join(', ') }} ({{ count }})\n").text == "T: a, b (3)"
    assert read(data, template="{{ title }}", chat=True).messages == [{"role": "user", "content": "T"}]
    assert read(data, template="{{ {'x': '<é>'} | tojson }}").text == '{"x": "<é>"}'
    assert read({"a b": 1, "row": 2}, template="{{ row }}").text == "2"
    assert read({"a b": 1}, template="{{ row['a b'] }}").text == "1"


def test_columns_of_a_template_are_data_and_others_still_options():
    prompt = read({"stop": "word", "seed": 7, "max_tokens": 3}, template="{{ stop }}{{ seed }}")
    assert (prompt.text, prompt.options) == ("word7", {"max_tokens": 3})


@pytest.mark.parametrize(
    ("template", "data", "message"),
    [
        ("{{ missing }}", {"body": 1}, "template: 'missing' is undefined; the row has body"),
        ("{{ body.missing }}", {"body": {"a": 1}}, "has no attribute 'missing'"),
        ("{{ body }}", {"body": None}, "prints a null; write {{ name or '' }}"),
        ("{{ 1 // body }}", {"body": 0}, "the template fails on this row"),
        ("{{ body.__class__.__mro__ }}", {"body": "x"}, "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", {}, "the template fails on this row"),
    ],
)
def test_a_template_that_fails_costs_the_row(template, data, message):
    with pytest.raises(RowError) as caught:
        read(data, template=template)
    assert caught.value.error_type == "template"
    assert message in str(caught.value)


def test_null_or_missing_columns_can_be_provided_for():
    template = "{{ a or 'none' }} {{ b | default('none') }}"
    assert read({"a": None}, template=template).text == "none none"


def test_templates_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"template: not a valid template: .* \(line 2\)"):
        RowTemplate("a\n{{ b", "template")


def test_system_is_a_template_too():
    assert read({"prompt": "q", "tone": "kind"}, system="Be {{ tone }}.").messages[0]["content"] == "Be kind."
    assert (
        read({"prompt": "q"}, system="text }} with { braces }\n").messages[0]["content"] == "text }} with { braces }\n"
    )
    with pytest.raises(RowError, match="system: 'tone' is undefined"):
        read({"prompt": "q"}, system="Be {{ tone }}.")


def shots(tmp_path, *rows):
    path = tmp_path / "shots.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_examples_go_before_the_prompt_as_text(tmp_path):
    path = shots(tmp_path, {"q": "1+1", "answer": "2"}, {"q": "2+2", "completion": "4"})
    text = read({"q": "3+3"}, template="Q: {{ q }}\nA:", few_shot=path).text
    assert text == "Q: 1+1\nA: 2\n\nQ: 2+2\nA: 4\n\nQ: 3+3\nA:"
    plain = shots(tmp_path, {"prompt": "1+1=\n", "response": "2"})
    assert read({"prompt": "2+2=\n"}, few_shot=plain).text == "1+1=\n2\n\n2+2=\n"


def test_examples_go_between_system_and_conversation(tmp_path):
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    system, question = {"role": "system", "content": "S"}, {"role": "user", "content": "q"}
    pair, conversation = shots(tmp_path, {"prompt": "1+1", "answer": "2"}), [*turns, question]
    assert read({"prompt": "q"}, chat=True, few_shot=pair).messages == conversation
    assert read({"prompt": "q"}, system="S", few_shot=pair).messages == [system, *conversation]
    assert read({"messages": [question]}, few_shot=pair).messages == conversation
    assert read({"messages": [system, question]}, few_shot=pair).messages == [system, *conversation]
    path = shots(tmp_path, {"messages": turns})
    assert read({"messages": [question]}, few_shot=path).messages == conversation
    with pytest.raises(RowError, match="need --chat"):
        read({"prompt": "q"}, few_shot=path)
    with pytest.raises(RowError, match="before token ids"):
        read({"prompt_token_ids": [1]}, few_shot=path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q"}, "line 1: expected messages, or a prompt with answer or completion or response"),
        ({"answer": "a"}, "line 1: expected the text column 'prompt'"),
        ({"prompt": 1, "answer": "a"}, "expected the text column 'prompt'"),
        ([1], "line 1: expected a JSON object"),
        ({"messages": [{"role": "system", "content": "S"}]}, "give the system message with --system"),
        (None, "has no examples"),
    ],
)
def test_examples_that_are_none_are_refused(tmp_path, row, message):
    path = shots(tmp_path, *([] if row is None else [row]))
    with pytest.raises(ConfigError, match=message):
        read({"prompt": "q"}, few_shot=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read({"prompt": "q"}, few_shot=str(tmp_path / "missing"))


def test_tools_and_template_names_of_a_row_go_to_the_chat_template():
    tools = [{"type": "function", "function": {"name": "f"}}]
    data = {"messages": MESSAGES, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    assert read(data).variables == {"tools": tools, "enable_thinking": False}
    assert read({**data, "tools": json.dumps(tools)}).variables["tools"] == tools
    assert read(data, is_table=True).variables == {}
    assert read(data, row_options=False).variables == {}
    for name, value in (("tools", {"a": 1}), ("tools", "none"), ("chat_template_kwargs", [1])):
        with pytest.raises(RowError, match=f"{name}=.*expected"):
            read({"messages": MESSAGES, name: value})


def test_a_null_prompt_is_called_so():
    for data in ({"messages": None}, {"prompt": None, "note": 1}):
        with pytest.raises(RowError, match=f"the row has no prompt: {next(iter(data))} is null$"):
            read(data)
    with pytest.raises(RowError, match="it has Prompt, note; to take Prompt, give --prompt-column Prompt"):
        read({"Prompt": "q", "note": 1})


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("Seed", "seed"),
        ("topP", "top_p"),
        ("max-tokens", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("Top K", "top_k"),
    ],
)
def test_names_that_differ_by_case_or_dashes_are_near_misses(caplog, name, option):
    read({"prompt": "q", name: 1})
    assert f"{name!r} is no option and is ignored; did you mean {option!r}?" in caplog.text


def batch(body, url="/v1/chat/completions", **fields):
    return {"custom_id": "r-1", "method": "POST", "url": url, "body": body, **fields}


def test_lines_of_a_batch_file():
    reader = PromptReader(PromptColumns())
    line = row(batch({"model": "m", "messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 5, "top_p": 0.5}))
    prompt = reader.read(line)
    assert (prompt.messages, prompt.options) == (MESSAGES, {"max_tokens": 5, "top_p": 0.5})
    assert reader.id_text(line) == "r-1"
    text = "https://api.example.com/v1/completions"
    assert reader.read(row(batch({"prompt": "hi", "echo": False, "n": 1}, text))).text == "hi"
    assert reader.read(row(batch({"prompt": ["hi"]}, text))).text == "hi"
    assert reader.read(row(batch({"prompt": [1, 2]}, text))).token_ids == [1, 2]
    assert reader.read(row(batch({"prompt": [[1, 2]], "seed": 3, "stop": None}, text))).options == {"seed": 3}
    tools = [{"type": "function"}]
    body = {"messages": MESSAGES, "tools": tools, "chat_template_kwargs": {"a": 1}}
    assert reader.read(row(batch(body))).variables == {"tools": tools, "a": 1}
    assert reader.read(row(batch({**body, "tool_choice": "none"}))).variables == {"a": 1}


def test_what_looks_like_a_batch_line_is_data_where_columns_are_named():
    data = {**batch({"messages": MESSAGES}), "prompt": "p"}
    assert read(data, prompt="prompt").text == "p"
    assert read(data, template="{{ body.messages[0].content }}").text == "hi"
    assert read(data, is_table=True).text == "p"
    assert read(batch({"messages": MESSAGES, "top_p": 0.5}), row_options=False).options == {}
    assert read(batch({"messages": MESSAGES}), system="S").messages == [{"role": "system", "content": "S"}, *MESSAGES]


def test_logprobs_and_formats_of_a_batch_line_are_translated():
    def options(url="/v1/chat/completions", **body):
        source = {"messages": MESSAGES} if "chat" in url else {"prompt": "q"}
        return read_batch_line(batch({**source, **body}, url)).options

    assert options(logprobs=True, top_logprobs=3) == {"logprobs": 3}
    assert options(logprobs=True) == {"logprobs": 0}
    assert options(logprobs=False, top_logprobs=0) == {}
    assert options("/v1/completions", logprobs=2) == {"logprobs": 2}
    assert options(response_format={"type": "text"}) == {}
    assert options(response_format={"type": "json_object"}) == {"json_schema": {"type": "object"}}
    schema = {"type": "object", "properties": {}}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert options(response_format=named) == {"json_schema": schema}


@pytest.mark.parametrize(
    ("line", "error_type", "field"),
    [
        (batch({}, "/v1/embeddings"), "unsupported_request", "url"),
        (batch({"messages": MESSAGES}, method="GET"), "unsupported_request", "method"),
        (batch({}), "missing_prompt", "body.messages"),
        (batch({"messages": None}), "missing_prompt", "body.messages"),
        (batch({"messages": MESSAGES}, "/v1/completions"), "missing_prompt", "body.prompt"),
        (batch({"prompt": ["a", "b"]}, "/v1/completions"), "unsupported_option", "body.prompt"),
        (batch({"messages": MESSAGES, "stream": True}), "unsupported_option", "body.stream"),
        (batch({"messages": MESSAGES, "audio": {}}), "unsupported_option", "body.audio"),
        (batch({"messages": MESSAGES, "logprobs": 5}), "invalid_parameter", "body.logprobs"),
        (batch({"messages": MESSAGES, "top_logprobs": 5}), "invalid_parameter", "body.top_logprobs"),
        (batch({"messages": MESSAGES, "tool_choice": "required"}), "unsupported_option", "body.tool_choice"),
        (batch({"messages": MESSAGES, "response_format": "json"}), "unsupported_option", "body.response_format"),
        (batch({"messages": MESSAGES, "chat_template_kwargs": 1}), "invalid_parameter", "body.chat_template_kwargs"),
        (batch({"prompt": "q", "suffix": "s"}, "/v1/completions"), "unsupported_option", "body.suffix"),
    ],
)
def test_what_a_batch_line_asks_for_in_vain_is_its_error(line, error_type, field):
    with pytest.raises(RowError) as caught:
        read(line)
    assert (caught.value.error_type, caught.value.field) == (error_type, field)


NAMES = [
    "prompt",
    "messages",
    "prompt_token_ids",
    "id",
    "custom_id",
    "url",
    "method",
    "body",
    "q",
    "tools",
    "n",
    "logprobs",
]
NAMES += [
    "chat_template_kwargs",
    "response_format",
    "max_completion_tokens",
    "tool_choice",
    "top_logprobs",
    "seed",
    "echo",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("/v1/chat/completions"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
READERS = [
    PromptReader(PromptColumns()),
    PromptReader(PromptColumns(), system=RowTemplate("{{ q }}", "system"), row_options=True),
    PromptReader(PromptColumns("q", "messages", id="body"), chat=True),
    PromptReader(
        PromptColumns(), template=RowTemplate("{{ q.a[0] }}{% for m in messages %}{{ m }}{% endfor %}", "template")
    ),
]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
    | st.fixed_dictionaries(
        {
            "custom_id": st.text(max_size=3),
            "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
            "body": st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
        }
    ),
    st.booleans(),
)
def test_any_row_is_a_prompt_or_an_error_of_its_own(data, is_table):
    for reader in READERS:
        line = row(data, is_table=is_table)
        assert isinstance(reader.id_text(line), str | None)
        try:
            prompt = reader.read(line)
        except RowError:
            continue
        assert [prompt.text, prompt.token_ids, prompt.messages].count(None) == 2
        assert all(isinstance(text, str) for text in prompt.texts())
        assert prompt.options.keys() <= SamplingParams.names()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ({"n": "3"}, {"n": 3}),
        ({"temperature": "0.5", "ignore_eos": "True"}, {"temperature": 0.5, "ignore_eos": True}),
        ({"stop": "7"}, {"stop": "7"}),
        ({"stop": '["a", "b"]'}, {"stop": ["a", "b"]}),
        ({"regex": "[0-9]"}, {"regex": "[0-9]"}),
        ({"max_tokens": ""}, {}),
        ({"max_tokens": "many"}, {"max_tokens": "many"}),
    ],
)
def test_tables_of_text_hold_options_as_json_writes_them(text, value):
    assert read({"prompt": "q", **text}, is_table=True, row_options=True).options == value


@pytest.mark.parametrize("body", [None, "text", [1]])
def test_a_batch_line_whose_body_is_no_object_keeps_its_id(body):
    row = Row(0, "f", 1, False, {"custom_id": "r-1", "url": "/v1/completions", "body": body})
    reader = PromptReader(PromptColumns())
    assert reader.id_text(row) == "r-1"
    with pytest.raises(RowError, match=r"body=.*expected an object"):
        reader.read(row)
