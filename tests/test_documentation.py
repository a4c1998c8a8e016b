"""The code in `docs/python.md`, run as a notebook runs it: in an event loop, one block after the other."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documentation import code_blocks


def test_the_code_of_the_python_page_runs_in_a_notebook(
    random_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model("llama")

    async def cell(source: str) -> None:
        code = compile(source.replace("path/to/model", str(model)), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, {})
        if running is not None:
            await running

    async def notebook() -> None:
        for source in code_blocks("python.md", "python"):
            capsys.readouterr()
            await cell(source)
            assert capsys.readouterr().out.strip(), source

    asyncio.run(notebook())
