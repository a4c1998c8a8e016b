"""The code of the documentation's pages, for the tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code_blocks(page: str, language: str) -> list[str]:
    """What stands between the fences of `docs/PAGE` that name `language`, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert all(named for named, _ in blocks), f"{page}: a block of code names no language, so that nothing runs it"
    return [code for named, code in blocks if named == language]
