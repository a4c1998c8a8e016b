"""Uploads through a staging buffer, on a device that is the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged_infer.engine.upload import StagedUpload, Upload, host_upload


@pytest.mark.parametrize("upload", [host_upload, StagedUpload(torch.device("cpu"))])
def test_arrays_of_every_kind_arrive_whole(upload: Upload) -> None:
    arrays = [
        np.arange(7, dtype=np.int32),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
        np.zeros((0, 5), np.int32),
        np.array([True, False, True]),
        np.float32([0.5, -2.0]),
    ]
    for tensor, array in zip(upload(arrays), arrays, strict=True):
        assert tensor.is_contiguous()
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()


def test_later_uploads_leave_earlier_ones_alone() -> None:
    upload = StagedUpload(torch.device("cpu"))
    tensors = []
    for step in range(8):
        array = np.full(3 * step + 1, step, np.int64)
        tensors.append(upload([array, array])[1])
        array[:] = -1
    assert [tensor.tolist() for tensor in tensors] == [[step] * (3 * step + 1) for step in range(8)]
