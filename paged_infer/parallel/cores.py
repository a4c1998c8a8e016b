"""Which CPUs each of several processes on this machine should use."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def core_groups(count: int) -> list[frozenset[int] | None]:
    """The CPUs this process may use, cut into `count` groups of whole neighbouring cores.

    None for each where there are fewer cores than groups, or where the system does not say: nobody is pinned then.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count
    cores: dict[tuple[int, ...], set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_core(cpu), set()).add(cpu)
    if len(cores) < count:
        return [None] * count
    threads = [cores[key] for key in sorted(cores)]
    bounds = [len(threads) * i // count for i in range(count + 1)]
    return [frozenset().union(*threads[bounds[i] : bounds[i + 1]]) for i in range(count)]


def _core(cpu: int) -> tuple[int, ...]:
    """Sorts cores of a socket next to each other; CPUs of one core are equal."""
    try:
        topology = _TOPOLOGY / f"cpu{cpu}/topology"
        return tuple(int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return (-1, cpu)
