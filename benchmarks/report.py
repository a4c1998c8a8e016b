"""Writes results: JSON for programs, markdown for people, side by side under `results/`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def machine() -> dict[str, object]:
    """What the figures depend on: CPU, its relevant instructions, cores, memory, commit and date."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = (line.partition(":") for line in info.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", "").split()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "family": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "instructions": [f for f in ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if f in flags],
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def machine_line() -> str:
    """The machine in one line of markdown."""
    m = machine()
    return (
        f"{m['cores']} cores of {m['cpu']} (family/model {m['family']}; {', '.join(m['instructions'])}), "
        f"{m['memory_gib']} GiB, commit {m['commit']}, {m['date']}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write(name: str, data: object, markdown: str) -> None:
    """Write `results/NAME.json` and `results/NAME.md`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown.rstrip() + "\n")
