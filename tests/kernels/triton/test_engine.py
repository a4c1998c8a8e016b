"""The whole engine on the Triton backend under the interpreter: Hugging Face says what must come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.dispatch import make_backend
from paged_kernels.interface import AttentionMeta, KVCache
from paged_kernels.triton.backend import TritonBackend
from torch import Tensor

from paged_infer.engine import build, shared_prefix
from paged_infer.engine.cuda_graph import GraphedForward
from paged_infer.engine.pipelined_runner import PipelinedRunner
from paged_infer.engine.runner import Execution, ModelRunner
from paged_infer.engine.upload import StagedUpload
from paged_infer.llm import LLM
from paged_infer.models.decoder import Decoder
from tests.engine.test_cuda_graph import record_by_repeating
from tests.engine.test_engine import assert_greedy_equal, greedy, prompts_of
from tests.fixtures.checkpoints import hf_logits
from tests.models.stepper import Stepper
from tests.models.test_decoder import load, tokens


def prompts_with_a_shared_prefix() -> list[list[int]]:
    shared = prompts_of([18], seed=3)[0]
    return [*prompts_of([1, 32, 33]), shared, [*shared, 7, 8], [*shared[:16], 9]]


@pytest.mark.parametrize(
    ("family", "config"), [("qwen3", {}), ("mistral", {"sliding_window": 12, "num_key_value_heads": 1})]
)
def test_greedy_equals_hugging_face(random_model: Callable[..., Path], family: str, config: dict[str, int]) -> None:
    """Chunks beside decodes, block borders, a prefix that rows share, fewer blocks than all rows together need."""
    folder = random_model(family, **config)
    prompts = prompts_with_a_shared_prefix()
    with LLM(
        str(folder), attention_backend="triton", max_num_batched_tokens=24, num_kv_blocks=9, dtype="float32"
    ) as llm:
        answers = llm.generate(prompts, greedy(5))
        llm.engine.scheduler.check_invariants()
    assert_greedy_equal(folder, prompts, [answer.token_ids for answer in answers], 5)
    assert sum(answer.cached_tokens for answer in answers) > 0


def test_the_way_of_a_gpu_run(random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged uploads, padded recordings, prefixes read once, two steps under way: the same tokens."""
    monkeypatch.setattr(shared_prefix, "MIN_SEQUENCES", 2)
    monkeypatch.setattr(shared_prefix, "MIN_TOKENS", 16)
    batches: list[tuple[bool, int]] = []
    sizes = [2, 4, 8]

    def gpu_runner(model: Decoder, backend: TritonBackend, kv: KVCache, **options: Any) -> PipelinedRunner:
        def hidden(input_ids: Tensor, meta: AttentionMeta, *rest: Any) -> Tensor:
            batches.append((meta.shared_prefixes is not None, len(input_ids)))
            return model.hidden(input_ids, meta, *rest)

        forward = GraphedForward(
            hidden, sizes=sizes, max_num_seqs=8, max_blocks=8, max_seq_len=128, record=record_by_repeating
        )
        options["execution"] = Execution(StagedUpload(backend.device), forward, share_prefixes=True)
        return PipelinedRunner(ModelRunner(model, backend, kv, **options))

    monkeypatch.setattr(build, "ModelRunner", gpu_runner)
    folder = random_model("llama")
    prompts = prompts_with_a_shared_prefix()
    with LLM(str(folder), attention_backend="triton", max_num_batched_tokens=24, dtype="float32", order="input") as llm:
        answers = llm.generate(prompts, greedy(5))
        answers += llm.generate(prompts[1:2], greedy(5))  # all of it is in the cache, to the end of a block
    assert_greedy_equal(folder, [*prompts, prompts[1]], [answer.token_ids for answer in answers], 5)
    assert any(shared for shared, _ in batches)
    assert {size for shared, size in batches if not shared} & set(sizes)


def test_sampled_tokens_are_those_of_the_reference(random_model: Callable[..., Path]) -> None:
    prompts = prompts_of([5, 9, 14])
    outputs = []
    for backend in ("triton", "reference"):
        with LLM(str(random_model("llama")), attention_backend=backend, dtype="float32", seed=3) as llm:
            answers = llm.generate(prompts, greedy(6, temperature=0.8, top_p=0.9, top_k=40))
        outputs.append([answer.token_ids for answer in answers])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("family", "config"), [pytest.param("llama", {}, marks=pytest.mark.full), ("mistral", {"sliding_window": 40})]
)
def test_no_bit_depends_on_the_batch(random_model: Callable[..., Path], family: str, config: dict[str, int]) -> None:
    """Chunks, decodes, cached prefixes and what else is in the step, with windows that start anywhere in a tile."""
    folder = str(random_model(family, **config))
    prompts = [*prompts_of([70, 5]), [*prompts_of([70])[0][:50], 7, 8]]
    found = []
    for budget in (512, 22):
        with LLM(
            folder, attention_backend="triton", dtype="float32", deterministic=True, max_num_batched_tokens=budget
        ) as llm:
            answers = llm.generate(prompts, greedy(3, logprobs=1))
            answers += llm.generate(prompts[-1:], greedy(3, logprobs=1))
        found.append([answer.logprobs for answer in answers])
    assert found[0] == found[1]
    assert found[0][-1] == found[0][-2]


def test_logits_in_half_precision(random_model: Callable[..., Path]) -> None:
    """The logits come out of the tied head in float32."""
    folder = random_model("llama", tie_word_embeddings=True)
    ids = tokens(20)
    expected = hf_logits(folder, ids)
    backend = make_backend("cpu", torch.float16, "triton")
    [found] = Stepper(load(folder, backend), backend, [ids]).run([[(0, 13)], [(0, 6)], [(0, 1)]])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
