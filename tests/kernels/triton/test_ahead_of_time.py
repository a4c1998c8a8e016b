"""Every variant that the launchers pick is compiled for chips that are not here, and fits them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def compile_for(targets: list[str], cache: Path, *options: str) -> None:
    """In a process of its own: in this one the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, str(ROOT / "benchmarks" / "triton_resources.py"), *options]
    for target in targets:
        command += ["--target", target]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_hot_kernels_fit(tmp_path, target):
    compile_for([target], tmp_path, "--sample")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_fits(tmp_path, target):
    compile_for([target], tmp_path)
