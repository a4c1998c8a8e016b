"""Who gets the Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged_kernels.dispatch import make_backend
from paged_kernels.triton.backend import TritonBackend

ROOT = Path(__file__).parents[3]

WITHOUT_INTERPRETER = """
import sys, torch
from paged_kernels.dispatch import make_backend
assert make_backend("cpu", torch.float32).name != "triton"
assert not any(name.startswith(("triton", "paged_kernels.triton")) for name in sys.modules), "auto imported Triton"
try:
    make_backend("cpu", torch.float32, "triton")
except ValueError as error:
    assert "TRITON_INTERPRET=1" in str(error), error
else:
    raise AssertionError("compiled kernels cannot run on a CPU")
"""


def test_by_name_where_kernels_are_interpreted() -> None:
    backend = make_backend("cpu", torch.float16, "triton")
    assert isinstance(backend, TritonBackend)
    assert backend.device == torch.device("cpu")
    with pytest.raises(ValueError, match="float64"):
        make_backend("cpu", torch.float64, "triton")


def test_a_cpu_run_leaves_triton_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTERPRETER], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
