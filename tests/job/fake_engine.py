"""An engine without a model: same calls, answers made of the prompt, a row finished a fixed number of steps later."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from paged_infer.engine.memory import MemoryPlan
from paged_infer.engine.stats import EngineLoad, EngineStats
from paged_infer.text.chat_template import ChatTemplate
from paged_infer.types import Completion, Request, RowError

CHAT = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}",
    {},
)


class FakeTokenizer:
    """A token is a UTF-8 byte; a chat is `<role>content` for each message.

    `encoded` keeps every text that was tokenised, `variables` what the chat template was last given beside messages.
    """

    bos_token_id: int | None = None

    special_ids: frozenset[int] = frozenset()
    fallback_bytes: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.variables: dict[str, object] = {}
        self.has_chat_template = False

    def encode_batch(self, texts):
        self.encoded.extend(texts)
        return [list(text.encode()) for text in texts]

    def encode(self, text):
        return self.encode_batch([text])[0]

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages, *, split_special_tokens=False, **variables):
        self.variables = {"split_special_tokens": split_special_tokens, **variables}
        return list(CHAT.render(messages).encode())


class FakeEngine:
    """Finishes up to `rate` requests a step, the youngest of them first, by echoing the prompt up to `max_tokens`.

    `requests` keeps every request that was added; `max_waiting` how many were ever queued.
    """

    def __init__(self, *, rate: int = 4, max_model_len: int = 1000, vocab_size: int = 256, on_step=None) -> None:
        self.tokenizer = FakeTokenizer()
        self.memory = MemoryPlan(1 << 30, 1 << 20, 1 << 10, 16, 64, max_model_len)
        self.sampling_defaults: dict[str, object] = {}
        self.eos_token_ids = frozenset({0})
        self.description: dict[str, dict[str, object]] = {}
        self.stats = EngineStats()
        self.load = EngineLoad(used_blocks=1, num_blocks=2)
        self.speculation = None
        self.requests: dict[int, Request] = {}
        self.max_waiting = 0
        self.steps = 0
        self.num_running = 0
        self._on_step = on_step
        self._rate = rate
        self._vocab_size = vocab_size
        self._waiting: deque[Request] = deque()
        self._failed: list[Completion] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._failed)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        prompt = request.prompt_token_ids
        error = None
        if not prompt:
            error = RowError("empty_prompt", "the prompt has no tokens", "prompt")
        elif len(prompt) + (request.params.max_tokens != 0) > self.memory.max_model_len:
            error = RowError("prompt_too_long", f"{len(prompt)} > {self.memory.max_model_len}", "prompt")
        elif not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            error = RowError("invalid_parameter", "prompt_token_ids out of range", "prompt_token_ids")
        if error is not None:
            self._failed.append(Completion.failed(request.request_id, error, len(prompt)))
        else:
            self._waiting.append(request)
            self.max_waiting = max(self.max_waiting, len(self._waiting))

    def close(self) -> None:
        self._waiting.clear()

    def abort(self, request_id: int) -> None:
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
        self._failed = [completion for completion in self._failed if completion.request_id != request_id]

    def step(self) -> list[Completion]:
        self.steps += 1
        if self._on_step is not None:
            self._on_step(self)
        taken = [self._waiting.popleft() for _ in range(min(self._rate, len(self._waiting)))]
        failed, self._failed = self._failed, []
        return failed + [self._answer(request) for request in reversed(taken)]

    def _answer(self, request: Request) -> Completion:
        limit = request.params.max_tokens
        prompt = list(request.prompt_token_ids)
        ids = prompt if limit < 0 else prompt[:limit]
        self.stats.prompt_tokens += len(prompt)
        self.stats.output_tokens += len(ids)
        return Completion(
            request.request_id,
            ids,
            "length" if len(ids) == limit else "stop",
            text=bytes(ids).decode(errors="replace"),
            prompt_tokens=len(prompt),
        )
