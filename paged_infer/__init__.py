"""From a file of prompts to a file of answers: offline LLM inference with a paged KV cache.

`LLM` and `AsyncLLM` are the Python API; `paged-infer run` the command. Importing this package is cheap: torch is loaded
by those two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_infer.types import Completion, Request, RowError, SamplingParams, Score

if TYPE_CHECKING:
    from paged_infer.async_llm import AsyncLLM
    from paged_infer.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "Request", "RowError", "SamplingParams", "Score", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from paged_infer.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from paged_infer.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
