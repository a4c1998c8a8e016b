"""The backends that model tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_kernels.interface import Backend
from paged_kernels.reference import ReferenceBackend


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are not worth a second thread, least of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return ReferenceBackend(torch.float32)
