"""Ranks in processes of their own that run one model together, as one runner.

The scheduler stays here and sends each batch to every rank; ranks decide nothing. Each keeps the sequences' tokens and
block tables, and those of the last stage sample from the same logits, so all of them stay in step without a word. The
first of these sends back what it sampled. Stages before the last neither sample nor score: they learn of tokens with
the batch that runs them.

A rank that dies takes the others with it: what they have is of no use without it.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import torch
from paged_kernels.interface import AttentionMeta, KVCache
from torch import Tensor

from paged_infer.config import ConfigError
from paged_infer.engine.batch import ScheduledBatch, StepOutput
from paged_infer.engine.runner import Runner
from paged_infer.models.decoder import Decoder
from paged_infer.models.lora import AdapterRows
from paged_infer.parallel.groups import StageLink
from paged_infer.parallel.place import Place
from paged_infer.parallel.process import LOOK_SECONDS, Worker, WorkerFailed, stop_all
from paged_infer.parallel.worker import Channel

_BLAME_SECONDS = 0.5
"""Ranks that lose another one soon fail, too; so long is waited to see which of them was the first."""


class Stage:
    """A model's share as a runner sees it: takes the residual stream from the stage before, hands it to the next."""

    def __init__(self, decoder: Decoder, place: Place, link: StageLink) -> None:
        self._decoder = decoder
        self._place = place
        self._link = link
        self.logits = decoder.logits

    def hidden(
        self,
        input_ids: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        logits_indices: Tensor,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """See `runner.Model`; no rows before the last stage."""
        if self._place.is_first:
            residual = self._decoder.embed(input_ids, meta)
        else:
            shape = len(input_ids), self._decoder.config.hidden_size
            residual = self._link.receive(torch.empty(shape, dtype=torch.float32, device=input_ids.device))
        residual = self._decoder.onwards(residual, meta, kv, logits_indices, adapters)
        if self._place.is_last:
            return residual
        self._link.send(residual)
        return residual[:0]


class BeforeLast:
    """Batches as the stages before the last one need them: nothing is sampled or scored, sampled tokens are told."""

    def __init__(self) -> None:
        self._sampled: dict[int, list[int]] = {}

    def sampled(self, output: StepOutput) -> None:
        """Take in what the last stage has sampled."""
        for seq_id, tokens in zip(output.seq_ids, output.token_ids, strict=True):
            self._sampled.setdefault(seq_id, []).extend(tokens)

    def batch(self, batch: ScheduledBatch) -> ScheduledBatch:
        for seq_id in [*batch.finished_ids, *(new.seq_id for new in batch.new)]:
            self._sampled.pop(seq_id, None)
        return replace(
            batch,
            new=[replace(new, score_from=None, carried=None) for new in batch.new],
            scheduled=[
                replace(item, samples=False, new_token_ids=[*self._sampled.pop(item.seq_id, ()), *item.new_token_ids])
                for item in batch.scheduled
            ],
        )


def serve_runner(channel: Channel, runner: Runner, answers: bool) -> None:
    """Run the batches that come, one by one; send their outputs if this is the rank that `answers`."""
    while True:
        runner.submit(channel.receive())
        output = runner.collect()
        if answers:
            channel.send(output)


class RankGroup:
    """A runner over ranks.

    Each rank first sends what `agree` gets from all of them, gets its result, and says that it is ready; then it serves
    batches (`serve_runner`).

    Args:
        start: starts the process of a rank, given a file name under which the ranks can meet.
        places: of the ranks, by number.
        depth: batches submitted and not yet collected.
        agree: called with what the ranks have sent.

    Raises:
        ConfigError: a rank says that it cannot be made.
        WorkerFailed: one has died.
    """

    def __init__(
        self,
        start: Callable[[Place, str], Worker],
        places: Sequence[Place],
        depth: int,
        agree: Callable[[list[Any]], Any],
    ) -> None:
        self.depth = depth
        self._places = list(places)
        self._workers: list[Worker] = []
        self._before_last = BeforeLast()
        self._answering = next(place.rank for place in places if place.is_last and place.tp_rank == 0)
        self._folder = tempfile.TemporaryDirectory(prefix="paged-infer-")
        try:
            for place in places:
                self._workers.append(start(place, f"{self._folder.name}/rendezvous"))
            self.agreed = agree(self._one_each())
            for worker in self._workers:
                worker.send(self.agreed)
            self._one_each()
        except BaseException:
            self.close()
            raise

    def _one_each(self) -> list[Any]:
        """The next message of every rank."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self._workers):
            for rank in self._with_news({*range(len(self._workers))} - messages.keys()):
                message = messages[rank] = self._receive(rank)
                if isinstance(message, ConfigError):
                    raise message
        return [messages[rank] for rank in range(len(self._workers))]

    def _with_news(self, ranks: set[int]) -> list[int]:
        """Those of `ranks` that have sent something, once there are any.

        Raises `WorkerFailed` when any rank dies, or hangs.
        """
        numbers = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        heard: list[Any] = []
        while not heard:
            heard = wait([*numbers], LOOK_SECONDS)
            for hung in [worker for worker in self._workers if worker.is_hung()]:
                raise hung.failure()
        found = [numbers[connection] for connection in heard]
        for rank in set(found) - ranks:  # no message is due from these: they have ended
            self._receive(rank)
        return [rank for rank in found if rank in ranks]

    def _receive(self, rank: int) -> Any:
        try:
            return self._workers[rank].receive()
        except WorkerFailed as failure:
            raise self._first_to_fail(rank, failure) from None

    def _first_to_fail(self, rank: int, failure: WorkerFailed) -> WorkerFailed:
        """Of the ranks that are dead by now, one that was killed, else the one that was seen first."""
        time.sleep(_BLAME_SECONDS)
        killed = [worker for worker in self._workers if worker.was_killed()]
        return killed[0].failure() if killed and killed[0] is not self._workers[rank] else failure

    def submit(self, batch: ScheduledBatch) -> None:
        whole = pickle.dumps(batch)
        stripped = b""
        if self._places[0].pp_size > 1:
            stripped = pickle.dumps(self._before_last.batch(batch))
        for place, worker in zip(self._places, self._workers, strict=True):
            worker.send_bytes(whole if place.is_last else stripped)

    def collect(self) -> StepOutput:
        """The output of the oldest submitted batch. Raises `WorkerFailed` when a rank has died."""
        while not self._with_news({self._answering}):
            pass
        output: StepOutput = self._receive(self._answering)
        if self._places[0].pp_size > 1:
            self._before_last.sampled(output)
        return output

    def close(self) -> None:
        stop_all(self._workers)
        self._workers = []
        self._folder.cleanup()
