"""The Python API for event loops: one engine for any number of coroutines.

A thread owns the engine. A coroutine leaves an order in the inbox and waits for its answer; between two steps the
thread takes the orders that have arrived, so a row starts beside those under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from paged_infer.config import DEMO_MODEL
from paged_infer.llm import LLM, Message, Prompt
from paged_infer.types import Completion, SamplingParams, Score


@dataclass(slots=True)
class _Order:
    """A prompt that somebody waits for.

    Attributes:
        number: the order's place among all; its row in the engine.
        params: None = the model's defaults.
        continuation: what to score after the prompt; None = complete the prompt.
        template_options: for prompts that are messages.
        answer: the samples.
    """

    number: int
    prompt: Prompt
    params: SamplingParams | None = None
    continuation: str | Sequence[int] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    answer: Future[list[Completion]] = field(default_factory=Future)


class _Inbox:
    """Orders and cancellations on their way to the thread. Once closed, for a reason, it takes no more."""

    def __init__(self) -> None:
        self._arrival = threading.Condition()
        self._orders: deque[_Order] = deque()
        self._cancelled: list[int] = []
        self._closed: str | None = None
        self._cause: BaseException | None = None

    def put(self, order: _Order) -> None:
        """Raises RuntimeError once closed."""
        with self._arrival:
            if self._closed is not None:
                raise RuntimeError(self._closed) from self._cause
            self._orders.append(order)
            self._arrival.notify()

    def cancel(self, number: int) -> None:
        with self._arrival:
            self._cancelled.append(number)
            self._arrival.notify()

    def close(self, reason: str, cause: BaseException | None = None) -> None:
        """The first reason counts."""
        with self._arrival:
            if self._closed is None:
                self._closed, self._cause = reason, cause
            self._arrival.notify()

    def take(self, wait: bool) -> tuple[list[_Order], list[int]] | None:
        """What has arrived; None once closed. With `wait`, not before there is something."""
        with self._arrival:
            while wait and not (self._orders or self._cancelled or self._closed is not None):
                self._arrival.wait()
            if self._closed is not None:
                return None
            taken = list(self._orders), self._cancelled
            self._orders.clear()
            self._cancelled = []
            return taken

    def refuse(self, orders: Sequence[_Order]) -> None:
        """Fail `orders`, and those that nobody took, with the reason of the closing."""
        with self._arrival:
            left = [*orders, *self._orders]
            self._orders.clear()
        for order in left:
            error = RuntimeError(self._closed)
            error.__cause__ = self._cause
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                order.answer.set_exception(error)


class _Worker:
    """What the thread does."""

    def __init__(self, llm: LLM, inbox: _Inbox) -> None:
        self._llm = llm
        self._inbox = inbox
        self._call = llm.calls.open()
        self._waiting: dict[int, _Order] = {}

    def run(self) -> None:
        """Serve orders until the inbox is closed; a failure closes it."""
        try:
            while (taken := self._inbox.take(wait=not self._call.num_unfinished)) is not None:
                orders, cancelled = taken
                for order in orders:
                    self._start(order)
                for number in cancelled:
                    self._call.abandon(number)
                    self._waiting.pop(number, None)
                if self._call.num_unfinished:
                    self._llm.calls.step()
                self._answer()
        except BaseException as error:
            self._inbox.close(f"the engine failed: {type(error).__name__}: {error}", error)
        finally:
            self._inbox.refuse(list(self._waiting.values()))

    def _start(self, order: _Order) -> None:
        self._waiting[order.number] = order
        llm = self._llm
        try:
            if order.continuation is not None:
                ((context, continuation),) = llm.encode_pairs([order.prompt], [order.continuation])
                params = llm.default_params(order.params)
                self._call.add(order.number, [*context, *continuation], params, score_from=len(context))
                return
            if order.template_options:
                assert isinstance(order.prompt, dict)
                ids = llm.encode_chat(order.prompt["messages"], **order.template_options)
            else:
                (ids,) = llm.encode([order.prompt])
            self._call.add(order.number, ids, llm.default_params(order.params))
        except Exception as error:  # what was ordered makes no sense; the others go on
            self._call.abandon(order.number)
            del self._waiting[order.number]
            with contextlib.suppress(InvalidStateError):
                order.answer.set_exception(error)

    def _answer(self) -> None:
        ready = self._call.ready
        for number, samples in itertools.groupby(ready, key=lambda completion: completion.request_id):
            order = self._waiting.pop(number, None)
            if order is not None:
                with contextlib.suppress(InvalidStateError):
                    order.answer.set_result(list(samples))
        ready.clear()


def _serve(model: str, options: dict[str, Any], inbox: _Inbox, loaded: Future[LLM]) -> None:
    try:
        llm = LLM(model, **options)
    except BaseException as error:
        loaded.set_exception(error)
        return
    with llm:
        loaded.set_result(llm)
        del loaded
        _Worker(llm, inbox).run()


def _stop(inbox: _Inbox, thread: threading.Thread) -> None:
    inbox.close("this AsyncLLM is closed")
    if thread is not threading.current_thread():
        thread.join()


class AsyncLLM:
    """A loaded model for event loops: rows are accepted while others run, from as many coroutines as you like.

    ```python
    async with AsyncLLM("path/to/model") as llm:
        answers = await asyncio.gather(*(llm.generate(prompt) for prompt in prompts))
    ```

    It belongs to no particular loop, and works where one is running already, as in a notebook. Cancelling a coroutine
    takes its row out of the engine. If the engine itself fails, every waiting and every later call raises RuntimeError
    with the reason.

    Args:
        model, **options: as for `LLM`. Loading happens here and now.

    Raises:
        ConfigError: unknown or impossible settings.

    Attributes:
        config: the settings. tokenizer: the model's. max_model_len: most tokens of a sequence.
        sampling_defaults: options that the model's own generation settings ask for.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        self._inbox = _Inbox()
        self._numbers = itertools.count()
        loaded: Future[LLM] = Future()
        thread = threading.Thread(
            target=_serve, args=(model, options, self._inbox, loaded), name="paged-infer engine", daemon=True
        )
        thread.start()
        llm = loaded.result()
        self.config = llm.config
        self.tokenizer = llm.tokenizer
        self.max_model_len = llm.max_model_len
        self.sampling_defaults = llm.engine.sampling_defaults
        self._finalizer = weakref.finalize(self, _stop, self._inbox, thread)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Completion]:
        """Complete a prompt, given in any form that `LLM.generate` knows.

        Returns:
            Its `params.n` samples, or a single one whose `finish_reason` is "error".

        Raises:
            TypeError: something that is no prompt.
            RuntimeError: the engine has failed or is closed.
        """
        return await self._order(_Order(next(self._numbers), prompt, params))

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template_options: Any
    ) -> list[Completion]:
        """Answer a conversation, as `LLM.chat` does; see `generate` for what comes back."""
        order = _Order(next(self._numbers), {"messages": messages}, params, template_options=template_options)
        return await self._order(order)

    async def score(self, context: Prompt, continuation: str | Sequence[int], *, top_logprobs: int = 0) -> Score:
        """How likely the continuation is after its context, as `LLM.score` says, whose errors it raises."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=max(1, top_logprobs))
        (scored,) = await self._order(_Order(next(self._numbers), context, params, continuation))
        return Score.of_completion(scored)

    async def _order(self, order: _Order) -> list[Completion]:
        inbox, number = self._inbox, order.number
        order.answer.add_done_callback(lambda answer: inbox.cancel(number) if answer.cancelled() else None)
        inbox.put(order)
        return await asyncio.wrap_future(order.answer)

    def close(self) -> None:
        """Stop the thread and free the model; whoever still waits gets RuntimeError."""
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
