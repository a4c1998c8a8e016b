"""Settings: precedence, names, and what is refused before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paged_infer.config import ConfigError
from paged_infer.job.config import RunConfig, load_settings, parse_bytes


def resolve(*layers):
    return RunConfig.resolve({"inputs": ["in.jsonl"]}, *layers)


def test_later_layers_win_and_none_is_unset():
    config = resolve({"max_tokens": 5, "temperature": 0.5, "block_size": 32}, {"max_tokens": 9, "temperature": None})
    assert config.sampling == {"max_tokens": 9, "temperature": 0.5}
    assert config.engine.block_size == 32


def test_seed_is_the_runs_and_not_every_rows():
    config = resolve({"seed": 5})
    assert config.engine.seed == 5
    assert config.sampling == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_token": 5}, "unknown setting 'max_token'; did you mean 'max_tokens'?"),
        ({"temperature": -1}, "temperature=-1"),
        ({"on_error": "ignore"}, "expected one of row, fail"),
        ({"limit": "ten"}, "limit='ten'"),
        ({"chat": "yes"}, "chat='yes'"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"kv_cache_memory": "lots"}, "'lots' is no size"),
        ({"inputs": ["a.jsonl", "b.jsonl"]}, "-o"),
        ({"inputs": ["-"]}, "-o"),
        ({"inputs": []}, "no input: name a file of prompts, or - for standard input"),
        ({"inputs": ["a.jsonl", ""], "output": "b.arrow"}, "no input: name a file"),
        ({"output": "-"}, "output='-': results are written to a disk"),
        ({"output": ""}, "output='': results are written to a disk"),
        ({"output": "s3://bucket/out"}, "name a file or a folder, and copy it from there"),
        ({"keep": [1]}, "keep=[1]: expected names"),
        ({"prompt_column": 3}, "prompt_column=3: expected text"),
        ({"limit": -1}, "limit=-1: expected a whole number of at least 0"),
        ({"time_limit": "soon"}, "'soon' is no time: expected for example 90, 45m or 1h30m"),
        ({"time_limit": -1}, "time_limit=-1: expected a number from 0"),
        ({"max_error_rate": 2}, "max_error_rate=2: expected a number from 0 to 1"),
        ({"shard": "0/4"}, "shard='0/4': expected I/N with I from 1 to N"),
        ({"retry_errors": True, "overwrite": True}, "retry_errors needs the results of an earlier run"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs='{': not JSON"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs='[1]': expected a JSON object"),
        ({"output_format": "openai"}, "name a .jsonl file with -o"),
        ({"template": "x", "prompt_column": "y"}, "template makes the prompt itself"),
        ({"block_size": 0}, "block_size=0: expected a whole number of at least 1"),
        ({"lora": ["name"]}, "lora=name: expected NAME=PATH"),
        ({"lora": 3}, "lora=3: expected NAME=PATH"),
        ({"speculative": "magic"}, "speculative='magic': expected one of"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: expected a share of at most 1"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9': expected a share of at most 1"),
        ({"trust_remote_code": "off"}, "trust_remote_code='off': expected true or false"),
        ({"prefix_caching": 1}, "prefix_caching=1: expected true or false"),
        ({"model": 5}, "model=5: expected text"),
        ({"tokenizer": ["a"]}, "tokenizer=['a']: expected text"),
        ({"seed": "7"}, "seed='7': expected a whole number"),
        ({"offload": "disk", "quantization": "int8"}, "round them once with `paged-infer quantize`"),
        ({"offload": "disk", "tensor_parallel_size": 2}, "not together with tensor or pipeline parallelism; quantise"),
        ({"speculative": "draft:m", "tensor_parallel_size": 2}, "cannot be had together with tensor_parallel_size"),
        ({"speculative": "ngram", "pipeline_parallel_size": 2}, "cannot be had together with pipeline_parallel_size"),
        ({"lora": "a=b", "pipeline_parallel_size": 2}, "lora cannot be had together with pipeline_parallel_size"),
        ({"ray": "auto", "shard": "1/2"}, "shard cannot be had together with ray"),
        ({"ray": "auto", "output_format": "openai", "output": "x.jsonl"}, "'openai' cannot be had together with ray"),
        ({"template": "@missing.txt"}, "template='@missing.txt' cannot be read: "),
        ({"grammar": "missing.lark"}, "grammar missing.lark cannot be read: "),
        ({"stop": [""]}, "an empty string would stop at once"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(settings)


@pytest.mark.parametrize(
    ("name", "output"),
    [("a/prompts.jsonl", "a/prompts.out.arrow"), ("prompts.jsonl.gz", "prompts.out.arrow"), ("x", "x.out.arrow")],
)
def test_output_is_named_after_the_input(name, output):
    assert str(RunConfig.resolve({"inputs": [name]}).output_path) == output


def test_yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("inputs: a.jsonl\nmax_tokens: 7\nstop: [END]\nkv_cache_memory: 2GiB\nkeep: label\n")
    config = RunConfig.resolve(load_settings(str(path)), {"max_tokens": 8})
    assert (config.inputs, config.keep) == (("a.jsonl",), ("label",))
    assert config.sampling == {"max_tokens": 8, "stop": ["END"]}
    assert config.engine.kv_cache_memory == 2 << 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b", ": expected `setting: value` lines"),
        (b"1: 2", ": expected `setting: value` lines"),
        (b"a: 1\nb: c: 2\n", " line 2, column 5: not YAML: mapping values are not allowed here"),
        (b"a: \x00", ": not YAML: "),
        (b"\xff\xfe", " cannot be read: "),
    ],
)
def test_yaml_that_is_no_mapping_is_refused(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"config {path}{message}")) as refused:
        load_settings(str(path))
    assert "\n" not in str(refused.value)
    assert load_settings_of_empty(tmp_path) == {}


def load_settings_of_empty(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    return load_settings(str(tmp_path / "empty.yaml"))


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("500MB", 500_000_000), ("2 GiB", 2 << 30), ("1.5k", 1500)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_structures_come_from_files_or_as_text(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "grammar.lark").write_text("start: /x/")
    given = {"json_schema": str(tmp_path / "schema.json")}
    assert RunConfig.resolve({"inputs": "a.jsonl"}, given).sampling["json_schema"] == '{"type": "integer"}'
    given = {"grammar": str(tmp_path / "grammar.lark")}
    assert RunConfig.resolve({"inputs": "a.jsonl"}, given).sampling["grammar"] == "start: /x/"
    for text in ('{"type": "integer"}', {"type": "integer"}):
        assert RunConfig.resolve({"inputs": "a.jsonl", "json_schema": text}).sampling["json_schema"] == text
    assert RunConfig.resolve({"inputs": "a.jsonl", "grammar": "start: /y/"}).sampling["grammar"] == "start: /y/"
    with pytest.raises(ConfigError, match=r"json_schema missing\.json cannot be read"):
        RunConfig.resolve({"inputs": "a.jsonl", "json_schema": "missing.json"})


@pytest.mark.parametrize(("given", "value"), [("true", True), ("false", False), ("never", "never"), (True, True)])
def test_early_stopping_may_be_text(given: object, value: object) -> None:
    assert RunConfig.resolve({"inputs": "a.jsonl", "early_stopping": given}).sampling["early_stopping"] == value


def test_what_yaml_makes_of_off(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("inputs: a.jsonl\nspeculative: off\n")
    assert RunConfig.resolve(load_settings(str(tmp_path / "run.yaml"))).engine.speculative == "off"
