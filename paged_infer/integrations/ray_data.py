"""`PagedInfer`: answers as a step of your own Ray Data pipeline.

```python
import ray
from paged_infer.integrations.ray_data import PagedInfer

rows = ray.data.read_parquet("questions/")
answers = rows.map_batches(
    PagedInfer,
    fn_constructor_kwargs={"model": "path/to/model", "template": "{{ question }}", "max_tokens": 64},
    **PagedInfer.pool(engines=2, num_gpus=1),
)
answers.write_parquet("answers/")
```
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from paged_infer.engine.interface import AnyEngine
from paged_infer.engine.shared_engine import SharedEngine
from paged_infer.io.readers import Row
from paged_infer.job.config import RunConfig
from paged_infer.job.encode import PromptEncoder
from paged_infer.job.ray_job import actor_pool
from paged_infer.job.run import prompt_reader
from paged_infer.types import Completion, Request, RowError, SamplingParams, noise_key

BATCH_ROWS = 64

_IN_FLIGHT = 4
"""Rows given to an engine at once, as a multiple of those it runs: Ray hands rows out in batches, and an engine that
has to wait for the slowest row of one runs empty meanwhile."""

_COLUMNS = (
    "sample",
    "text",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "prompt_tokens",
    "cached_tokens",
    "error",
    "error_type",
    "cumulative_logprob",
)


class PagedInfer:
    """An actor with an engine, for `ray.data.Dataset.map_batches`; give it `**PagedInfer.pool(...)` too.

    A batch comes back with its own columns and those of the answers: sample, text, token_ids, finish_reason,
    stop_reason, prompt_tokens, cached_tokens, error, error_type, cumulative_logprob; n times as many rows where n
    samples are asked for. A row that cannot be answered says why in `error` and never fails the dataset.

    Args:
        row_column: a column that numbers the rows: then a `seed` gives the same samples however Ray cuts the data.
        **settings: those of `paged-infer run`, by name: `model`, `prompt_column`, `messages_column`, `template`,
            `system`, `max_tokens`, `temperature`, `row_options`, `max_num_seqs`, ...

    Raises:
        ConfigError: unknown or impossible settings, or the model cannot be loaded.
    """

    def __init__(self, *, row_column: str | None = None, **settings: Any) -> None:
        config = RunConfig.resolve({"inputs": ("-",), "output": "unused.arrow"}, settings)
        engine = self._build(config)
        self._row_column = row_column
        self._shared = SharedEngine(engine)
        self._reader = prompt_reader(config)
        self._encoder = PromptEncoder.of_job(config, engine.tokenizer, engine.memory.max_model_len)
        self._defaults = {**engine.sampling_defaults, **config.sampling}
        self._seed = secrets.randbits(63) if config.engine.seed is None else config.engine.seed
        self._numbers = itertools.count()
        self._encoding = threading.Lock()
        self._threads = ThreadPoolExecutor(max(1, _concurrency(config.engine.max_num_seqs, 1)))

    @staticmethod
    def _build(config: RunConfig) -> AnyEngine:
        from paged_infer.engine.build import build_engine

        return build_engine(config.engine)

    @staticmethod
    def pool(
        engines: int, *, max_num_seqs: int = 256, batch_rows: int = BATCH_ROWS, **resources: Any
    ) -> dict[str, Any]:
        """Arguments of `map_batches` that keep that many engines busy.

        Args:
            max_num_seqs: the engines' own setting.
            batch_rows: rows that Ray hands out together.
            **resources: of each engine, as `num_gpus=1` or `num_cpus=4`.
        """
        at_once = _concurrency(max_num_seqs, batch_rows)
        return {"batch_size": batch_rows, **actor_pool(engines, at_once, in_flight=2 * at_once), **resources}

    async def __call__(self, batch: Mapping[str, np.ndarray]) -> AsyncIterator[dict[str, Any]]:
        yield await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, batch)

    def _answer(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*map(_plain, batch.values()), strict=True)]
        view = self._shared.view()
        place: dict[int, int] = {}
        answers: list[list[Completion]] = [[] for _ in rows]
        for i, request in self._requests(rows):
            if isinstance(request, Completion):
                answers[i] = [request]
            else:
                place[request.request_id] = i
                view.add(request)
        while view.has_unfinished():
            for completion in view.step():
                answers[place[completion.request_id]].append(completion)
        where = np.array([i for i, samples in enumerate(answers) for _ in samples], np.int64)
        flat = [completion for samples in answers for completion in samples]
        columns: dict[str, Any] = {name: np.asarray(values)[where] for name, values in batch.items()}
        for name in _COLUMNS:
            values = [getattr(completion, name) for completion in flat]
            columns[name] = _ragged(values) if name == "token_ids" else _column(name, values)
        return columns

    def _requests(self, rows: list[dict[str, Any]]) -> Iterator[tuple[int, Request | Completion]]:
        """A request, or why there is none, for each row."""
        prompts, where = [], []
        for i, data in enumerate(rows):
            number = next(self._numbers)
            try:
                prompts.append(self._reader.read(Row(number, "dataset", number + 1, True, data, unit="row")))
                where.append((i, number))
            except RowError as error:
                yield i, Completion.failed(number, error)
        with self._encoding:
            encoded = self._encoder.encode(prompts)
        for (i, number), prompt, ids in zip(where, prompts, encoded, strict=True):
            try:
                if isinstance(ids, RowError):
                    raise ids
                params = SamplingParams.resolve(self._defaults, prompt.options)
                row = number if self._row_column is None else int(rows[i][self._row_column])
                key = noise_key(params.seed, self._seed, row)
                yield i, Request(number, self._encoder.fit(ids, params), params, key)
            except RowError as error:
                yield i, Completion.failed(number, error)


def _concurrency(max_num_seqs: int, batch_rows: int) -> int:
    """Batches that an engine works on at once."""
    return max(2, -(-_IN_FLIGHT * max_num_seqs // batch_rows))


def _plain(values: np.ndarray) -> list[Any]:
    """Python values of a column, arrays in it as lists."""
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in np.asarray(values).tolist()]


def _column(name: str, values: list[Any]) -> np.ndarray:
    if name in ("sample", "prompt_tokens", "cached_tokens"):
        return np.array(values, np.int32)
    if name == "cumulative_logprob":
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return np.array(values, object)


def _ragged(values: list[list[int]]) -> np.ndarray:
    column = np.empty(len(values), object)
    for i, ids in enumerate(values):
        column[i] = np.array(ids, np.int32)
    return column
