"""The arithmetic and the plumbing that the benchmarks' figures stand on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def tiny_shape():
    from workload import ModelShape

    return ModelShape(
        num_layers=2, hidden_size=4, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=10
    )


def test_work_of_one_row_by_hand() -> None:
    """5 prompt tokens and 3 outputs run 7 tokens; they attend to 1 + 2 + ... + 7 = 28 keys; 3 rows of logits."""
    from workload import count_work

    work = count_work(tiny_shape(), [[1, 2, 3, 4, 5]], [3], block_size=None)
    qkv, o, gate_up, down = 4 * 8, 4 * 4, 4 * 16, 8 * 4
    assert work.computed_tokens == 7
    assert work.linear == 7 * 2 * 2 * (qkv + o + gate_up + down)
    assert work.attention == 2 * 28 * (2 * 2 * 2 + 2 * 2 * 2)
    assert work.head == 3 * 2 * 4 * 10
    assert work.total == 4032 + 896 + 240


def test_shared_prefixes_are_whole_blocks_and_leave_the_last_token() -> None:
    from workload import shared_lengths

    prompts = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [2, 3, 4, 5], [1, 2, 9, 4, 7]]
    assert shared_lengths(prompts, 2) == [0, 2, 4, 2, 0, 4]


def test_sharing_saves_the_tokens_and_their_attention() -> None:
    from workload import count_work

    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    alone = count_work(tiny_shape(), prompts, [1, 1], block_size=None)
    shared = count_work(tiny_shape(), prompts, [1, 1], block_size=4)
    assert (shared.shared_tokens, shared.computed_tokens) == (4, 6)
    assert alone.linear - shared.linear == 4 * 576
    assert alone.attention - shared.attention == (1 + 2 + 3 + 4) * 32
    assert alone.head == shared.head


def test_rows_are_spread_and_whole() -> None:
    from workload import read_rows

    rows = read_rows()
    assert (len(rows), sum(r["prompt_tokens"] for r in rows), sum(r["max_tokens"] for r in rows)) == (256, 67958, 29541)
    assert [row["id"] for row in read_rows(num_rows=64)] == [f"r{i:04d}" for i in range(0, 256, 4)]


ADAPTER = """
import sys; sys.path.insert(0, {peers!r})
import protocol
def load(args):
    print("engines are chatty")
    return protocol.Engine("9", {{"k": 1}}, lambda jobs: protocol.Outcome(len(jobs), sum(j.max_tokens for j in jobs)))
protocol.serve(protocol.parser().parse_args(), load)
"""


def adapter(tmp_path: Path, source: str) -> list[str]:
    script, rows = tmp_path / "adapter.py", tmp_path / "rows.jsonl"
    script.write_text(source)
    rows.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b", "max_tokens": 4}\n')
    options = ["--model", "m", "--workload", str(rows), "--dtype", "float32", "--threads", "1"]
    return [sys.executable, str(script), *options]


def test_an_adapter_is_measured_from_outside(tmp_path: Path) -> None:
    from subject import Subject

    measured = Subject("fake", adapter(tmp_path, ADAPTER.format(peers=str(BENCHMARKS / "peers")))).measure(30)
    assert (measured.version, measured.settings, measured.prompt_tokens, measured.generated_tokens) == (
        "9",
        {"k": 1},
        2,
        7,
    )
    assert measured.ready_s > 0
    assert measured.peak_rss > 2**20


def test_an_adapter_that_dies_or_hangs_is_reported(tmp_path: Path) -> None:
    from subject import Subject, SubjectFailed

    with pytest.raises(SubjectFailed, match="no such engine"):
        Subject("dead", adapter(tmp_path, "raise SystemExit('no such engine')")).measure(30)
    with pytest.raises(SubjectFailed, match="slow"):
        Subject("slow", adapter(tmp_path, "import time; time.sleep(60)")).measure(0.5)


def test_ratios_compare_turns_of_one_round() -> None:
    from subject import Measurement
    from throughput import OWN, Run, ratios_to

    def run(number: int, engine: str, wall: float, quiet: bool = True) -> Run:
        return Run(number, "peer", quiet, Measurement(engine, "1", {}, wall, 1.0, 1, 100, 1, 1.0, 0.0))

    runs = [
        run(1, OWN, 10),
        run(1, "peer", 20),
        run(2, OWN, 10),
        run(2, "peer", 30),
        run(3, OWN, 1),
        run(3, "peer", 90, False),
    ]
    assert ratios_to("peer", runs) == [2.0, 3.0]


@pytest.mark.parametrize("engine", ["echo", "scheduler"])
def test_the_job_is_measured_without_a_model(engine: str, tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "job_throughput.py"), "--rows", "300", "--engine", engine]
    done = subprocess.run([*script, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{engine}: 300 rows in "), done.stderr
