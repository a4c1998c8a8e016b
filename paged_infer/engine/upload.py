"""How a step's arrays reach the device: as they are on a host, in one copy out of page-locked memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Upload = Callable[[Sequence[np.ndarray]], list[Tensor]]
"""Arrays -> contiguous tensors on the device. On a host they may share memory."""

_ALIGNMENT = 16
_NUM_STAGES = 2


def host_upload(arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Everything stays where it is."""
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


class StagedUpload:
    """All arrays of a call travel in one copy, which the host waits for only when its staging buffer comes round again.

    On a device that is no GPU the same copies happen at once, so that this can be tested anywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stages = [torch.empty(0, dtype=torch.uint8) for _ in range(_NUM_STAGES)]
        self._sent: list[torch.cuda.Event | None] = [None] * _NUM_STAGES
        self._next = 0

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        stage = self._stage(size)
        staged = stage.numpy()
        for start, array in zip(starts, arrays, strict=True):
            staged[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = torch.empty(size, dtype=torch.uint8, device=self._device)
        there.copy_(stage[:size], non_blocking=True)
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._sent[self._next] = event
        self._next = (self._next + 1) % _NUM_STAGES
        return [
            there[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _stage(self, size: int) -> Tensor:
        """The next staging buffer, free to be written."""
        event = self._sent[self._next]
        if event is not None:
            event.synchronize()
        stage = self._stages[self._next]
        if stage.numel() < size:
            stage = torch.empty(max(size, 2 * stage.numel()), dtype=torch.uint8, pin_memory=self._cuda)
            self._stages[self._next] = stage
        return stage


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
