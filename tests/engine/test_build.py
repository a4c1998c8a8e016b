"""Putting an engine together: the tokenizer and the chat template that were asked for."""

from __future__ import annotations

import pytest
import torch

from paged_infer.config import ConfigError, EngineConfig
from paged_infer.engine.build import load_tokenizer, resolve_dtype
from paged_infer.models.source import resolve_model

CHAT = [{"role": "user", "content": "hi"}]


def tokenizer(folder, **options):
    return load_tokenizer(EngineConfig(model=str(folder), **options), resolve_model(str(folder)))


def test_a_chat_template_of_ones_own_takes_the_place_of_the_models(random_model, tmp_path):
    folder, file = random_model("llama"), tmp_path / "own.jinja"
    file.write_text("[{{ messages[0].content }}]")
    assert tokenizer(folder, chat_template=str(file)).render_chat(CHAT) == "[hi]"
    assert "<|im_start|>" in tokenizer(folder).render_chat(CHAT)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "own.jinja' cannot be read"), (b"\xff", "cannot be read"), (b"{% if %}", "the chat template is not valid")],
)
def test_a_chat_template_that_is_none_is_refused_before_weights_are_read(random_model, tmp_path, content, message):
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        tokenizer(random_model("llama"), chat_template=str(file))


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_dtype_of_a_run_on_a_cpu_is_what_it_multiplies_fast(monkeypatch, fast, dtype):
    monkeypatch.setattr("paged_infer.engine.build.has_fast_bf16", lambda: fast)
    assert resolve_dtype(EngineConfig(model="any", device="cpu")) == dtype
    assert resolve_dtype(EngineConfig(model="any", device="cpu", dtype="float32")) == torch.float32
