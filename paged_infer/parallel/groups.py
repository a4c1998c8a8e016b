"""Ranks that compute together, as objects that are passed to whoever needs them.

A rank is a process with a device. `torch.distributed` carries what they exchange: NCCL between GPUs, gloo between
processes on CPUs.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_SECONDS = 1800
"""How long a rank waits for another; that one has died is noticed sooner, by whoever started both."""


class TensorGroup:
    """The ranks of one stage, each with a share of every layer."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks; x is overwritten with it."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """[R, N] of each rank -> [R, size * N], by rank; the same bits on all."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)


class StageLink:
    """The way from the stage before and to the stage after, one rank to one rank."""

    def __init__(self, before: int | None, after: int | None, most_in_flight: int) -> None:
        self._before = before
        self._after = after
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._most = most_in_flight

    def receive(self, like: Tensor) -> Tensor:
        """Fill `like` with what the stage before sends next."""
        dist.recv(like, src=self._before)
        return like

    def send(self, x: Tensor) -> None:
        """Send on without waiting for it to arrive; x must not be changed any more."""
        assert self._after is not None
        self._sent.append((dist.isend(x, dst=self._after), x))
        while len(self._sent) > self._most:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()


def join(rendezvous: str, rank: int, world: int, tp_size: int, device: str) -> TensorGroup | None:
    """Meet the other ranks; the group of this rank's stage, None where it is alone in it.

    Args:
        rendezvous: file that all ranks can write to, and that did not exist before.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=_SECONDS)
    )
    if tp_size == 1:
        return None
    own: dist.ProcessGroup | None = None
    for first in range(0, world, tp_size):
        group = dist.new_group(list(range(first, first + tp_size)), timeout=timedelta(seconds=_SECONDS))
        if first <= rank < first + tp_size:
            own = group
    return TensorGroup(own, rank % tp_size, tp_size)
