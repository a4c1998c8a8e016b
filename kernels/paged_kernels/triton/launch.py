"""A kernel call as data: launchers build it, `run` executes it, and a compiler can take it apart without a GPU.

Whether kernels are interpreted is settled when Triton is imported (`TRITON_INTERPRET=1` in the environment).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton


@triton.jit
def _probe() -> None:
    pass


INTERPRETED = not isinstance(_probe, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels of this process, on CPU tensors."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: a `triton.jit` function.
        grid: programs along each axis; no program runs where one of them is 0.
        arguments: tensors and numbers by parameter name.
        constants: compile-time values by parameter name.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Enqueue the kernel on the current stream."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
