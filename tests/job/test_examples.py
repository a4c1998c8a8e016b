"""The run files in `configs/`: each is a job that runs as it stands, and asks the model what it says it asks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from paged_infer.job.config import RunConfig, load_settings
from paged_infer.job.run import preflight, run_job
from tests.job.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]

JOBS = {
    "summarise": ("<user>Summarise this article in at most 30 words.\n\nCity hives\n\nSince 2015", ["title"]),
    "classify": ('"topic": "quality"}<user>The kettle boils fast', ["review"]),
    "translate": ("<user>Translate into French:\nWhere is the nearest pharmacy?", ["text", "language"]),
    "rewrite": ("sound friendly and brief. You keep every fact and add none.<user>Rewrite this message:", ["draft"]),
    "judge": ("<user>Question: Why is the sky blue?\n\nAnswer A: Because air scatters", ["question"]),
}
STRUCTURED = {"classify", "judge"}


def test_every_run_file_is_tested():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {*JOBS}


@pytest.mark.parametrize("name", JOBS)
def test_run_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = {"output": str(tmp_path / "out.arrow"), "progress": "none"}
    config = RunConfig.resolve(load_settings(f"configs/{name}.yaml"), given)
    preflight(config)
    engine = FakeEngine(max_model_len=4000)
    summary = run_job(config, engine)
    asked, kept = JOBS[name]
    prompts = [bytes(engine.requests[i].prompt_token_ids).decode() for i in sorted(engine.requests)]
    assert summary.exit_code == 0
    assert summary.rows == len(prompts) >= 3
    assert prompts[0].startswith("<system>You ")
    assert asked in prompts[0]
    assert len({*prompts}) == len(prompts)
    assert not any(tag in prompt for prompt in prompts for tag in ("{{", "{%", "None"))
    with pa.memory_map(str(config.output_path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert all(request.params.max_tokens == config.sampling["max_tokens"] for request in engine.requests.values())
    assert all(table[column].null_count == 0 for column in kept)
    params = engine.requests[0].params
    assert params.is_structured == (name in STRUCTURED)
