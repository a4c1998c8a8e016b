"""The compiled kernels, one library per instruction set, built once and kept in pytest's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from paged_kernels.cpu.build import KernelsUnavailable, load_library

ISAS = ("native", "portable", pytest.param("avx512-simde", marks=pytest.mark.full))
"""For parametrising over libraries; the emulated AVX-512 one takes a minute to compile."""


@pytest.fixture(scope="session")
def load_kernels(request: pytest.FixtureRequest) -> Callable[[str], ctypes.CDLL]:
    """`load_kernels(isa)` is the library for it; the test is skipped where it cannot be built."""
    cache_dir = request.config.cache.mkdir("paged-infer")

    def load(isa: str) -> ctypes.CDLL:
        try:
            return load_library(cache_dir, isa)
        except KernelsUnavailable as error:
            pytest.skip(str(error))

    return load
