"""What an engine's adapter says to the harness. Standard library only: it runs in the engine's own environment.

An adapter is a script that loads its engine, warms it up and prints `ready`; waits for a line on stdin; runs the whole
workload (tokenise, generate, detokenise) and prints `done` with what it generated. The harness watches the process tree
from outside, so time, memory and CPU are measured in one way for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "@bench "
"""Starts each line of the protocol; engines may print whatever else they like."""


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the workload: the prompt's text as it is, and the exact number of tokens to generate."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens the engine read (shared ones included) and tokens it generated."""

    prompt_tokens: int
    generated_tokens: int


Generate = Callable[[list[Job]], Outcome]


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine: its version, the settings worth quoting, and the timed call."""

    version: str
    settings: dict[str, object]
    generate: Generate


WARM_UP = [Job("Hello world, this is", 8), Job("The quick brown fox", 8)]


def parser() -> argparse.ArgumentParser:
    """The arguments the harness passes to every adapter."""
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--workload", required=True, type=Path)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    p.add_argument("--threads", type=int, required=True)
    p.add_argument("--kv-gib", type=int, default=4, help="memory for keys and values, where the engine can be told")
    return p


def read_jobs(path: Path) -> list[Job]:
    """The rows of a workload file."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Job(row["prompt"], row["max_tokens"]) for row in rows]


def say(event: str, **values: object) -> None:
    """Print one line of the protocol."""
    print(MARK + json.dumps({"event": event, **values}), flush=True)


def serve(args: argparse.Namespace, load: Callable[[argparse.Namespace], Engine]) -> None:
    """Load, warm up, wait for the word, run the workload once."""
    jobs = read_jobs(args.workload)
    engine = load(args)
    engine.generate(WARM_UP)
    say("ready", version=engine.version, settings=engine.settings)
    sys.stdin.readline()
    start = time.perf_counter()
    outcome = engine.generate(jobs)
    wall = time.perf_counter() - start
    say(
        "done",
        wall_s=wall,
        prompt_tokens=outcome.prompt_tokens,
        generated_tokens=outcome.generated_tokens,
    )
