"""What a job did, counted as it goes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from paged_infer.io.counts import ResultCounts

PREVIEW_ROWS = 5
PREVIEW_CHARS = 400


@dataclass(slots=True)
class Preview:
    """The beginning of a row, for people to look at."""

    row: int
    prompt: str
    text: str
    finish_reason: str


@dataclass(slots=True, kw_only=True)
class JobSummary(ResultCounts):
    """Counters of a job: those of all its results, and what this run of it did.

    Attributes:
        run_seed: the seed from which the rows' noise was drawn.
        resumed_rows: rows that were there before this run.
        copied_rows: rows of this run that got the answer of an identical one.
        computed_prompt_tokens, computed_output_tokens: by this run; those found in the prefix cache count as computed.
        first_row_seconds, wall_seconds: since the start of the job, model loading included when the caller said so.
        run_seconds: from the first row read to the results presented.
        input_seconds, output_seconds: of those, reading and tokenising, and writing.
        stopped_by: signal that ended the run early; SIGTERM for the time limit, too.
        previews: the first rows of the input, as far as this run answered them.
    """

    output: Path
    run_seed: int
    resumed_rows: int = 0
    copied_rows: int = 0
    computed_prompt_tokens: int = 0
    computed_output_tokens: int = 0
    first_row_seconds: float | None = None
    run_seconds: float = 0.0
    wall_seconds: float = 0.0
    input_seconds: float = 0.0
    output_seconds: float = 0.0
    stopped_by: signal.Signals | None = None
    previews: list[Preview] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 every row done; 3 some are error rows; 128 + signal number when stopped."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 3 if self.errors else 0
