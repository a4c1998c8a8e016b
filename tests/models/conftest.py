"""The backends that model tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_kernels.cpu.build import KernelsUnavailable
from paged_kernels.dispatch import make_backend
from paged_kernels.interface import Backend


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are not worth a second thread, least of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def backend_or_skip(name: str, dtype: torch.dtype) -> Backend:
    try:
        return make_backend("cpu", dtype, name, threads=1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_or_skip(request.param, torch.float32)
