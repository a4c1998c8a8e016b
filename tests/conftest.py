"""Checkpoints that several test files share, each built once per session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # what it means is settled when Triton is imported, which transformers may do

from tests.fixtures.checkpoints import random_checkpoint


@pytest.fixture(scope="session", autouse=True)
def float32_by_default() -> Iterator[None]:
    """`dtype="auto"` is float32 in tests, on processors with bf16 dot products too: what is expected is arithmetic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged_infer.engine.build.has_fast_bf16", lambda: False)
        yield


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`random_model(family, **overrides)` is the folder of `random_checkpoint`, made once for equal arguments."""
    made: dict[str, Path] = {}

    def build(family: str, **overrides: object) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = random_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return build
