"""Uploads through a staging buffer, on a device that is the host."""

from __future__ import annotations

import numpy as np
import torch

from paged_infer.engine.executor import GpuExecutor, HostExecutor, make_executor


def test_arrays_of_every_kind_arrive_whole() -> None:
    arrays = [
        np.arange(7, dtype=np.int32),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
        np.zeros((0, 5), np.int32),
        np.array([True, False, True]),
        np.float32([0.5, -2.0]),
    ]
    for executor in (GpuExecutor(torch.device("cpu")), HostExecutor()):
        tensors = executor.upload(arrays)
        for tensor, array in zip(tensors, arrays, strict=True):
            assert tensor.is_contiguous()
            assert tensor.shape == array.shape
            assert tensor.tolist() == array.tolist()
            assert executor.download(tensor)().tolist() == array.tolist()


def test_later_uploads_leave_earlier_ones_alone() -> None:
    executor = GpuExecutor(torch.device("cpu"))
    uploads = []
    for step in range(8):
        array = np.full(3 * step + 1, step, np.int64)
        uploads.append(executor.upload([array, array])[1])
        array[:] = -1
    assert [upload.tolist() for upload in uploads] == [[step] * (3 * step + 1) for step in range(8)]


def test_a_host_takes_one_step_at_a_time() -> None:
    executor = make_executor(torch.device("cpu"))
    assert executor.depth == 1
    assert executor.device == torch.device("cpu")
