"""What a job did, counted as it goes."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paged_infer.types import Completion

PREVIEW_ROWS = 5
PREVIEW_CHARS = 400


@dataclass(slots=True)
class Preview:
    """The beginning of a row, for people to look at."""

    row: int
    prompt: str
    text: str
    finish_reason: str


@dataclass(slots=True)
class JobSummary:
    """Counters of a job.

    Attributes:
        rows: rows written, error rows included.
        errors: error rows by type.
        finish_reasons: rows by finish reason.
        first_row_seconds, wall_seconds: since the start of the job, model loading included when the caller said so.
        run_seed: the seed from which the rows' noise was drawn.
        stopped_by: signal that ended the job early.
        previews: the first rows of the input.
    """

    output: Path
    run_seed: int
    rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_row_seconds: float | None = None
    run_seconds: float = 0.0
    wall_seconds: float = 0.0
    stopped_by: signal.Signals | None = None
    previews: list[Preview] = field(default_factory=list)

    def count(self, completion: Completion) -> None:
        """Add one finished row."""
        self.rows += 1
        self.finish_reasons[completion.finish_reason] += 1
        if completion.finish_reason == "error":
            self.errors[completion.error_type or "error"] += 1
        else:
            self.prompt_tokens += completion.prompt_tokens
            self.cached_tokens += completion.cached_tokens
            self.output_tokens += len(completion.token_ids)

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens whose computation the prefix cache saved."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def exit_code(self) -> int:
        """0 every row done; 3 some are error rows; 128 + signal number when stopped."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 3 if self.errors else 0
