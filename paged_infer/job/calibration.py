"""Text for a model that is rounded at load, out of the job's own rows or a file.

It is made before anything else and from then on part of the settings: of their record in the results, and of the
fingerprint, so that rows of one job never come from weights that were rounded by different texts.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from paged_infer.config import ConfigError
from paged_infer.io.readers import STDIN
from paged_infer.io.templates import text_or_file
from paged_infer.job.config import RunConfig
from paged_infer.job.run import open_inputs, prompt_reader
from paged_infer.types import RowError

JOB = "job"
"""The setting that stands for the first rows."""

CHARS = 12_288
"""As much text as the loader looks at."""

ROW_CHARS = 256
"""Of the end of a prompt: beginnings are often the same in all rows."""

MOST_ROWS = 1000


def calibrated(config: RunConfig) -> RunConfig:
    """The job with its `calibration` as text: of the file that `@` names, or of the prompts of its first rows.

    They are the first of the whole input: all shards of a job round alike. Raises `ConfigError` for a file that cannot
    be read, and for `job` where the rows have no text or come from standard input.
    """
    asked = config.engine.calibration
    if asked is None:
        return config
    text = _first_prompts(config) if asked == JOB else text_or_file(asked, "calibration")[:CHARS]
    return replace(config, engine=replace(config.engine, calibration=text))


def _first_prompts(config: RunConfig) -> str:
    if STDIN in config.inputs:
        raise ConfigError("calibration='job': standard input cannot be read twice; name a text with calibration @FILE")
    reader = prompt_reader(config)
    found: dict[str, None] = {}
    for row in itertools.islice(open_inputs(config, reader).rows(), MOST_ROWS):
        with contextlib.suppress(RowError):
            found |= dict.fromkeys(text[-ROW_CHARS:] for text in reader.read(row).texts())
        if sum(map(len, found)) >= CHARS:
            break
    if not any(map(str.strip, found)):
        raise ConfigError("calibration='job': the first rows have no text; name one with calibration @FILE")
    return "\n\n".join(found)[:CHARS]
