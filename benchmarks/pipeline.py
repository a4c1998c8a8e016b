"""Which share of the time the stages of a pipeline work, under a steady load.

    python benchmarks/pipeline.py

`sleeping`: three stages, more than a small machine has cores for, that take the same time for each batch by sleeping;
everything else is real: scheduler, processes, links between stages. `layers`: two stages with a thread each run eight
layers each, made up in the shape of the demo model's, with a head that costs next to nothing. `demo model`: that model,
whose head is as dear as eight layers. A rank that waits sleeps, so the CPU time of its process, over the wall time, is
the share in which it works.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import report
import torch

from paged_infer import LLM, SamplingParams
from paged_infer.config import DEMO_MODEL
from paged_infer.engine.batch import StepOutput
from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.executor import RankGroup
from paged_infer.engine.scheduler import Scheduler
from paged_infer.engine.sequence import Sequence
from paged_infer.engine.waiting import WaitingQueue
from paged_infer.models.source import resolve_model
from paged_infer.parallel.groups import StageLink, join
from paged_infer.parallel.place import Place, places
from paged_infer.parallel.process import Worker
from paged_infer.parallel.worker import Channel
from paged_infer.types import Request

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 96
MODEL_ROWS, MODEL_SEQS, STARTING_ROWS, SLEEPING_ROWS = 176, 64, 16, 96
STEP_SECONDS = 0.02
BLOCK_SIZE = 16


LAYERS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 16,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def of_a_model(model: str, stages: int = 2, **given: Any) -> list[float]:
    """The share of each stage while there are rows to take the place of those that end."""
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": MODEL_SEQS, "prefix_caching": False}
    with LLM(model, pipeline_parallel_size=stages, **settings, **given) as llm:
        engine = llm.engine
        for row in range(MODEL_ROWS):
            prompt = [5 + (7 * row + 3 * i * i) % 1000 for i in range(PROMPT_TOKENS)]
            length = OUTPUT_TOKENS // 2 + 37 * row % OUTPUT_TOKENS
            engine.add(Request(row, prompt, SamplingParams(max_tokens=length, ignore_eos=True), 0))
        ranks = [psutil.Process(worker.pid) for worker in engine._runner._workers]
        while engine.num_waiting > MODEL_ROWS - MODEL_SEQS - STARTING_ROWS:
            engine.step()
        before, began = [_cpu_seconds(rank) for rank in ranks], time.perf_counter()
        while engine.num_waiting:
            engine.step()
        seconds = time.perf_counter() - began
        return [(_cpu_seconds(rank) - earlier) / seconds for rank, earlier in zip(ranks, before, strict=True)]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def sleeping_rank(channel: Channel, place: Place, rendezvous: str) -> None:
    """A stage that takes `STEP_SECONDS` for any batch and samples the number of the step."""
    join(rendezvous, place.rank, place.pp_size, 1, "cpu")
    link = StageLink(place.rank - 1, place.rank + 1, place.pp_size)
    channel.send(None)
    channel.receive()
    channel.send(None)
    for step in count():
        batch = channel.receive()
        if not place.is_first:
            link.receive(torch.empty(1))
        time.sleep(STEP_SECONDS)
        if not place.is_last:
            link.send(torch.zeros(1))
            continue
        sampled = [item.seq_id for item in batch.scheduled if item.samples]
        channel.send(StepOutput(step, sampled, [[step]] * len(sampled)))


def of_sleepers(stages: int = 3) -> list[float]:
    """The share of each stage, which is the same for all."""

    def start(place: Place, rendezvous: str) -> Worker:
        return Worker(str(place), sleeping_rank, place, rendezvous, environment={"GLOO_SOCKET_IFNAME": "lo"})

    depth, length = stages + 1, PROMPT_TOKENS + OUTPUT_TOKENS
    scheduler = Scheduler(
        BlockManager(SLEEPING_ROWS * math.ceil(length / BLOCK_SIZE), BLOCK_SIZE, False),
        WaitingQueue("input", 4096, None),
        max_num_seqs=SLEEPING_ROWS,
        max_num_batched_tokens=512,
        max_in_flight=depth,
        num_micro_batches=depth,
    )
    for row in range(SLEEPING_ROWS):
        request = Request(row, [1] * PROMPT_TOKENS, SamplingParams())
        scheduler.add(Sequence(row, request, OUTPUT_TOKENS))
    group = RankGroup(start, places(1, stages), depth, lambda said: None)
    steps = in_flight = 0
    try:
        began = time.perf_counter()
        while scheduler.has_work or in_flight:
            while (batch := scheduler.schedule()) is not None:
                group.submit(batch)
                steps, in_flight = steps + 1, in_flight + 1
            for sequence, _ in scheduler.update(group.collect()):
                if sequence.num_output_tokens >= sequence.max_output_tokens:
                    scheduler.finish(sequence)
            in_flight -= 1
        seconds = time.perf_counter() - began
    finally:
        group.close()
    return [steps * STEP_SECONDS / seconds] * stages


def of_layers() -> list[float]:
    """Of a model that is nothing but equal layers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LAYERS))
        return of_a_model(folder, tokenizer=str(resolve_model(DEMO_MODEL).tokenizer_folder()), load_format="dummy")


def main() -> None:
    found = {"sleeping": of_sleepers(), "layers": of_layers(), "demo model": of_a_model(DEMO_MODEL)}
    rows = [[name, len(shares), ", ".join(f"{share:.1%}" for share in shares)] for name, shares in found.items()]
    table = report.table(["stages", "how many", "share of the time they work"], rows)
    print(table)
    report.write(
        "pipeline",
        {"machine": report.machine(), "shares": found},
        f"# Stages of a pipeline\n\n{report.machine_line()}.\n`python benchmarks/pipeline.py`\n\n{table}",
    )


if __name__ == "__main__":
    import pipeline  # under the name by which ranks find what they run

    pipeline.main()
