"""Several engines in processes of their own behind the face of one: data parallelism on one machine.

Rows wait here and are handed out as engines get through what they have, so that all of them end together; each brings
its noise key along, so where it is answered does not matter. When an engine dies its rows go back to the others. It is
started again a few times, and the job goes on with those that are left after that; when none is, it ends with the
name of the last one and the end of its log.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paged_infer.config import ConfigError
from paged_infer.engine.interface import AnyEngine
from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.row_pool import RowPool
from paged_infer.engine.speculative import SpeculationStats
from paged_infer.engine.stats import EngineLoad, EngineStats
from paged_infer.parallel.process import Worker, WorkerFailed, stop_all
from paged_infer.parallel.worker import Channel
from paged_infer.types import Completion, Request

if TYPE_CHECKING:
    from paged_infer.text.tokenizer import Tokenizer

MAX_RESTARTS = 2
"""How often an engine that died at work is started again."""

RESERVE = 0.5
"""Rows an engine has at most beyond those it can run at once, as a share of these."""

REPORT_SECONDS = 0.2
WAIT_SECONDS = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """What an engine says of itself once it is loaded."""

    memory: MemoryPlan
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any]
    description: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine has done since its last report, and how it is now."""

    completions: list[Completion]
    stats: EngineStats
    load: EngineLoad
    speculation: SpeculationStats | None


@dataclass(frozen=True, slots=True)
class Refused:
    """Why an engine cannot be made; the others could not be either."""

    error: ConfigError


def serve_engine(channel: Channel, build: Callable[[], AnyEngine], max_num_seqs: int) -> None:
    """What a worker does: make an engine, then answer lists of requests with reports until the other side is gone.

    An id in such a list is that of a request to forget.
    """
    try:
        engine = build()
    except ConfigError as error:
        channel.send(Refused(error))
        raise
    channel.send(Ready(engine.memory, max_num_seqs, engine.eos_token_ids, engine.sampling_defaults, engine.description))
    reported = perf_counter()
    while True:
        for orders in channel.pending() if engine.has_unfinished() else [channel.receive()]:
            for order in orders:
                if isinstance(order, Request):
                    engine.add(order)
                else:
                    engine.abort(order)
        completions = engine.step()
        if completions or perf_counter() - reported > REPORT_SECONDS:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            load = replace(
                engine.load,
                core_seconds=engine.load.core_seconds + usage.ru_utime + usage.ru_stime,
                memory_bytes=engine.load.memory_bytes + usage.ru_maxrss * 1024,
            )
            channel.send(Report(completions, engine.stats, load, engine.speculation))
            reported = perf_counter()


@dataclass(slots=True)
class _Taken:
    """A row that an engine has, and the tokens it is expected to cost."""

    request: Request
    work: float


@dataclass(slots=True)
class _Slot:
    """The place of an engine: its process, if it has one, what it has to do, and what all that lived here have done."""

    number: int
    worker: Worker | None
    ready: Ready | None = None
    taken: dict[int, _Taken] = field(default_factory=dict)
    work: float = 0.0
    restarts: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    load: EngineLoad = field(default_factory=EngineLoad)
    speculation: SpeculationStats | None = None


class Replicas:
    """Engines that share out one stream of requests.

    Args:
        start: starts the process of the engine with this number, which runs `serve_engine`.
        count: how many.
        tokenizer: theirs; called while they load.
        prefix_tokens: rows that share so many first tokens go to the same engine; None = rows share nothing.

    Raises:
        ConfigError: the engines say that they cannot be made.
        WorkerFailed: none of them has lived to the end of loading.
    """

    def __init__(
        self,
        start: Callable[[int], Worker],
        count: int,
        tokenizer: Callable[[], Tokenizer],
        prefix_tokens: int | None,
    ) -> None:
        self._start = start
        self._pool = RowPool(prefix_tokens)
        self._slots: list[_Slot] = []
        self._lost_stats = EngineStats()
        self._finished: list[Completion] = []
        self._outputs = 0
        self._answered = 0
        self._failure: WorkerFailed | None = None
        try:
            for number in range(count):
                self._slots.append(_Slot(number, start(number)))
            self.tokenizer = tokenizer()
            while any(slot.worker is not None and slot.ready is None for slot in self._slots):
                self._listen()
        except BaseException:
            self.close()
            raise
        made = [slot.ready for slot in self._slots if slot.ready is not None]
        first = made[0]
        self.memory = replace(first.memory, max_model_len=min(ready.memory.max_model_len for ready in made))
        self.eos_token_ids = first.eos_token_ids
        self.sampling_defaults = dict(first.sampling_defaults)
        self.description = dict(first.description)
        self._num_seqs = max(ready.max_num_seqs for ready in made)

    @property
    def num_running(self) -> int:
        return self.load.num_running

    @property
    def num_waiting(self) -> int:
        """Rows that no engine runs."""
        taken = sum(len(slot.taken) for slot in self._slots)
        return len(self._pool) + max(0, taken - self.load.num_running)

    @property
    def load(self) -> EngineLoad:
        """Of all engines together."""
        total = EngineLoad()
        for slot in self._slots:
            total += slot.load
        return total

    @property
    def stats(self) -> EngineStats:
        """Of all engines together, those that have died included."""
        total = EngineStats()
        for stats in (self._lost_stats, *(slot.stats for slot in self._slots)):
            total.prompt_tokens += stats.prompt_tokens
            total.cached_tokens += stats.cached_tokens
            total.output_tokens += stats.output_tokens
        return total

    @property
    def speculation(self) -> SpeculationStats | None:
        """What guessing at tokens has brought the engines together; None where it is off."""
        known = [slot.speculation for slot in self._slots if slot.speculation is not None]
        if not known:
            return None
        return SpeculationStats(
            sum(stats.num_rounds for stats in known),
            sum(stats.num_draft_tokens for stats in known),
            sum(stats.num_accepted_tokens for stats in known),
        )

    def has_unfinished(self) -> bool:
        """Whether `step` still has something to return."""
        return bool(self._pool or self._finished) or any(slot.taken for slot in self._slots)

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot be run comes out of a later `step` as a failed completion."""
        self._pool.add(request)

    def abort(self, request_id: int) -> None:
        """Forget a request wherever it is; nothing of it comes out any more. Unknown and finished ones are ignored."""
        self._pool.remove(request_id)
        self._finished = [completion for completion in self._finished if completion.request_id != request_id]
        for slot in self._slots:
            taken = slot.taken.pop(request_id, None)
            if taken is not None and slot.worker is not None:
                slot.work -= taken.work
                slot.worker.send([request_id])

    def step(self) -> list[Completion]:
        """Hand out rows, wait a moment for answers, and return those that came.

        Raises `WorkerFailed` when no engine is left.
        """
        self._hand_out()
        self._listen()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """End the engines."""
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for slot in self._slots:
            slot.worker = None
        stop_all(workers)

    def _hand_out(self) -> None:
        """Give rows to the engine with the least to do, a few more than it can run at once."""
        able = [slot for slot in self._slots if slot.worker is not None and slot.ready is not None]
        parcels: dict[int, list[Request]] = {slot.number: [] for slot in able}
        expected = self._outputs / self._answered if self._answered else None
        while self._pool:
            # towards the end rows stay here, for those that are done earlier
            most = self._num_seqs + min(RESERVE * self._num_seqs, len(self._pool) / (2 * len(able) or 1))
            wanting = [slot for slot in able if len(slot.taken) < most]
            if not wanting:
                break
            slot = min(wanting, key=lambda slot: slot.work)
            request = self._pool.take(slot.number)
            if request is None:
                break
            work = _work(request, expected)
            slot.taken[request.request_id] = _Taken(request, work)
            slot.work += work
            parcels[slot.number].append(request)
        for slot in able:
            if parcels[slot.number] and slot.worker is not None:
                slot.worker.send(parcels[slot.number])

    def _listen(self) -> None:
        """Take what has come from the engines, or wait a moment for it."""
        slots = {slot.worker.connection: slot for slot in self._slots if slot.worker is not None}
        if not slots:
            raise self._failure or WorkerFailed("no engine is left")
        heard = wait([*slots], WAIT_SECONDS)
        for connection, slot in slots.items():
            if connection not in heard:
                if slot.worker is not None and slot.worker.is_hung():
                    self._lost(slot)
                continue
            while slot.worker is not None:
                try:
                    if not connection.poll():
                        break
                    message = connection.recv()
                except (EOFError, OSError):
                    self._lost(slot)
                    break
                self._take(slot, message)

    def _take(self, slot: _Slot, message: Ready | Report | Refused) -> None:
        if isinstance(message, Refused):
            raise message.error
        if isinstance(message, Ready):
            slot.ready = message
            if slot.number == 0 and slot.worker is not None and (said := slot.worker.new_output().strip()):
                logger.warning("%s: %s", slot.worker.name, said)
            return
        slot.stats, slot.load, slot.speculation = message.stats, message.load, message.speculation
        wanted = [completion for completion in message.completions if completion.request_id in slot.taken]
        for completion in wanted:
            taken = slot.taken.pop(completion.request_id, None)
            if taken is not None:
                slot.work -= taken.work
                self._answered += 1
            self._outputs += len(completion.token_ids)
        self._finished += wanted

    def _lost(self, slot: _Slot) -> None:
        """An engine has died: what it had is for others, and it is started again where that may help."""
        assert slot.worker is not None
        self._failure = failure = slot.worker.failure()
        was_ready = slot.ready is not None
        self._pool.disown(slot.number)
        self._pool.put_back([taken.request for taken in slot.taken.values()])
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            setattr(self._lost_stats, name, getattr(self._lost_stats, name) + getattr(slot.stats, name))
        slot.taken, slot.work, slot.ready, slot.worker = {}, 0.0, None, None
        slot.stats, slot.load = EngineStats(), EngineLoad()
        if was_ready and slot.restarts < MAX_RESTARTS:
            slot.restarts += 1
            logger.warning("%s\nIts rows are answered by others; it is started again.", failure)
            slot.worker = self._start(slot.number)
            return
        left = sum(other.worker is not None for other in self._slots)
        if not left:
            raise failure
        logger.warning("%s\nThe job goes on without it.", failure)


def _work(request: Request, expected_output: float | None) -> float:
    """Tokens a row is expected to cost; as long as nothing has finished, all that it may generate."""
    params = request.params
    limit = params.max_tokens if params.max_tokens >= 0 else (expected_output or 1024.0)
    output = limit if expected_output is None else min(limit, expected_output)
    return len(request.prompt_token_ids) + output * max(params.n, params.beam_width)
