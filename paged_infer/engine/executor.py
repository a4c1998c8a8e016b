"""Where a step's arrays go and when its results come back: on the host at once, on a GPU with work in flight.

The runner packs numpy arrays and reads numpy arrays; what lies between is chosen once, when the runner is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


class Executor(Protocol):
    """Moves arrays. `depth` is how many steps may be under way at once."""

    depth: int
    device: torch.device

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays as tensors on the device; the caller may change the arrays afterwards, not the tensors."""
        ...

    def download(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """Begin to bring a tensor back; the function returned waits for it."""
        ...


class HostExecutor:
    """Everything stays where it is."""

    depth = 1
    device = torch.device("cpu")

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def download(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        return tensor.numpy


class GpuExecutor:
    """All arrays of an upload travel in one copy out of page-locked memory, results come back behind the kernels.

    Nothing here waits for the GPU but the functions that `download` returns, and an upload whose staging buffer, one of
    `depth` + 1, is still being read.

    On a device that is no GPU, for tests, the same copies happen at once.
    """

    def __init__(self, device: torch.device, depth: int = 2) -> None:
        self.depth = depth
        self.device = device
        self._cuda = device.type == "cuda"
        self._stages: list[Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(depth + 1)]
        self._read: list[torch.cuda.Event | None] = [None] * (depth + 1)
        self._next = 0

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        stage = self._stage(size)
        staged = stage.numpy()
        for start, array in zip(starts, arrays, strict=True):
            staged[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = torch.empty(size, dtype=torch.uint8, device=self.device)
        there.copy_(stage[:size], non_blocking=True)
        self._sent()
        return [
            there[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def download(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        if not self._cuda:
            copied = tensor.clone()
            return copied.numpy
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        here.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> np.ndarray:
            arrived.synchronize()
            return here.numpy()

        return wait

    def _stage(self, size: int) -> Tensor:
        """The next staging buffer, free to be written."""
        event = self._read[self._next]
        if event is not None:
            event.synchronize()
        if self._stages[self._next].numel() < size:
            room = max(size, 2 * self._stages[self._next].numel())
            self._stages[self._next] = torch.empty(room, dtype=torch.uint8, pin_memory=self._cuda)
        return self._stages[self._next]

    def _sent(self) -> None:
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._read[self._next] = event
        self._next = (self._next + 1) % len(self._stages)


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def make_executor(device: torch.device) -> Executor:
    """The executor for a device."""
    return GpuExecutor(device) if device.type == "cuda" else HostExecutor()
