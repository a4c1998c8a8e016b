"""The compiled kernels, one library per instruction set, built once and kept in pytest's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from paged_kernels.cpu.build import KernelsUnavailable, load_library

ISAS = ("native", "portable", *(pytest.param(isa, marks=pytest.mark.full) for isa in ("avx2", "avx512-simde")))
"""For parametrising over libraries; the emulated AVX-512 one takes a minute to compile, AVX2 is most often native."""


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests keep compiled kernels: pytest's cache, or for this session only where that is switched off."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("paged-infer") if cache is None else cache.mkdir("paged-infer")


@pytest.fixture(scope="session")
def load_kernels(kernel_cache: Path) -> Callable[[str], ctypes.CDLL]:
    """`load_kernels(isa)` is the library for it; the test is skipped where it cannot be built."""

    def load(isa: str) -> ctypes.CDLL:
        try:
            return load_library(kernel_cache, isa)
        except KernelsUnavailable as error:
            pytest.skip(str(error))

    return load
