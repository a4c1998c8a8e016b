"""Where a rank stands among those that run one model together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One rank: which share of its stage it has, and which stage of the pipeline that is."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out here."""
        return self.pp_rank == self.pp_size - 1

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.pp_rank + 1}/{self.pp_size}, share {self.tp_rank + 1}/{self.tp_size})"


WHOLE = Place()
"""The only rank there is."""


def places(tp_size: int, pp_size: int) -> list[Place]:
    """All ranks, by number."""
    return [Place(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
