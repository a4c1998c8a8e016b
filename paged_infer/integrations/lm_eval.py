"""lm-evaluation-harness: the engine as its model `paged-infer`.

Versions after 0.4.13 find it by themselves (entry-point group `lm_eval.models`). Up to there importing this module
registers it, which `paged-infer eval lm-eval -- ARGUMENTS` does before it hands over to the harness; or pass a
`PagedInferLM` to `lm_eval.simple_evaluate`.

Results are those of the harness' own `hf` model: the same tokens before the model, the same truncation, the same
cutting of the text. What differs is that all requests of a call are in the engine at once, sorted by their tokens, so
that what contexts share is computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401 - the registry fills itself with the built-in models only while it is empty
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from paged_infer.config import DEMO_MODEL, ConfigError, num_launched_processes
from paged_infer.llm import LLM
from paged_infer.types import RowError, SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""(context and continuation as text, the key of the cache), token ids of the context, those of the continuation."""

_GENERATION_NAMES = {"num_beams": "beam_width"}
"""What Hugging Face calls otherwise."""


@register_model("paged-infer")
class PagedInferLM(TemplateLM):
    """A model for `lm_eval --model paged-infer --model_args pretrained=...`.

    Args:
        pretrained: Hugging Face folder or id, `.gguf` file or short name.
        batch_size, max_batch_size: accepted because the harness passes them; the engine makes its own batches, of at
            most `max_num_seqs` sequences.
        device: `cpu`, `cuda`, or `cuda:0`, which means the same. The harness says `cuda` where nobody says anything;
            without a GPU it means the CPU, as for `hf`.
        max_length: most tokens of a sequence; default: the model's context length.
        max_gen_toks: most tokens to generate where a task says nothing.
        add_bos_token: whether a text starts with BOS; default: as the tokenizer does.
        prefix_token_id: what stands before a text scored from its first token; default: BOS, else EOS.
        chat_template_args: names the chat template may use; `enable_thinking` is one of them.
        think_end_token: text or token id that ends a chain of thought; only what follows counts as the answer.
        seed: of the noise, where a task samples and names no seed. Repeats of a request differ all the same.
        adapter: LoRA adapter to answer with, one of those loaded by `lora=NAME=PATH`.
        **options: further fields of `paged_infer.config.EngineConfig`, such as `dtype` or `max_num_seqs`.

    Raises:
        ConfigError: unknown or impossible settings.
    """

    def __init__(
        self,
        pretrained: str = DEMO_MODEL,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        seed: int = 1234,
        adapter: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_launched_processes() > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        place, _, index = str(device or "auto").partition(":")
        if index not in ("", "0"):
            raise ConfigError(f"device={device!r}: the engine takes the first GPU it sees; set CUDA_VISIBLE_DEVICES")
        if place == "cuda" and not torch.cuda.is_available():
            logger.warning("torch sees no GPU; the model runs on the CPU")
            place = "cpu"
        self.llm = LLM(pretrained, **{"max_model_len": max_length, "device": place, "seed": seed, **options})
        self._name = str(options.get("tokenizer") or pretrained)
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking
        self._think_end_token = think_end_token
        self._adapter = adapter

    @property
    def device(self) -> torch.device:
        """Where the harness puts the numbers that ranks exchange."""
        return torch.device("cpu")

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.llm.tokenizer
        ids = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else sorted(self.llm.engine.eos_token_ids)
        if not ids:
            raise ConfigError("the model names no EOS token; give prefix_token_id")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.llm.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.llm.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: Any,
    ) -> list[int]:
        """Token ids of a text. One that opens with the prefix token, as rendered chats do, gets no second one."""
        tokenizer = self.llm.tokenizer
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None:
            prefix = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            if prefix and string.startswith(prefix):
                add = False
        ids = tokenizer.encode_plain(string) if add is False else tokenizer.encode(string)
        if add and self._add_bos_token and tokenizer.bos_token_id is not None:
            ids = ids if ids[:1] == [tokenizer.bos_token_id] else [tokenizer.bos_token_id, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.llm.tokenizer.decode(tokens, skip_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, for the record: the one of that name, or the default; None for False."""
        if not chat_template:
            return None
        return self.llm.tokenizer.chat_template("default" if chat_template is True else chat_template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without a generation prompt it ends within its last message.

        A template that refuses a system message is given the conversation without it.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._template_args,
        }
        try:
            return self.llm.tokenizer.render_chat(chat_history, **options)
        except RowError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            logger.warning("%s; trying without the system message", error)
            return self.llm.tokenizer.render_chat(rest, **options)

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one. Contexts lose their beginning where
        they are too long: `max_length` tokens are read, and the last one is not.
        """
        room = self.max_length + 1
        for key, context, continuation in requests:
            if not context or not 0 < len(continuation) < room:
                lengths = f"{len(continuation)} tokens after {len(context)}"
                raise ValueError(f"{key}: {lengths} cannot be scored with max_length {room - 1}")
        contexts = [context[-(room - len(continuation)) :] for _, context, continuation in requests]
        continuations = [continuation for _, _, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: contexts[i] + continuations[i])
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        scores = self.llm.stream_scores([contexts[i] for i in order], [continuations[i] for i in order])
        for row, score in self._bar(scores, len(requests), "Running loglikelihood requests", disable_tqdm):
            i = order[row]
            answers[i] = score.logprob, score.is_greedy
            if requests[i][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context length: each token once, with as much before it as
        fits.
        """
        texts: list[str] = [request.args[0] for request in requests]
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        scores = iter(self._loglikelihood_tokens([pair for pairs in windows for pair in pairs], disable_tqdm))
        totals = [sum(next(scores)[0] for _ in pairs) for pairs in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions, each cut where the first of its `until` texts begins."""
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        prompts: list[list[int]] = []
        options: list[SamplingParams] = []
        untils: list[list[str]] = []
        for text, given in (request.args for request in requests):
            kwargs = normalize_gen_kwargs(dict(given), self.max_gen_toks)
            until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
            params = self._params(kwargs, [stop for stop in until if stop])
            if params.max_tokens >= self.max_length:
                raise ValueError(f"max_gen_toks={params.max_tokens} leaves no room in max_length {self.max_length}")
            prompts.append(self.tok_encode(text, left_truncate_len=self.max_length - params.max_tokens))
            options.append(params)
            untils.append(until)
        answers = [""] * len(requests)
        stream = self.llm.stream(prompts, options, lookahead=max(1, len(prompts)))
        for done in self._bar(stream, len(requests), "Running generate_until requests", disable_tqdm):
            i = done.request_id
            if done.error is not None:
                raise RowError(done.error_type or "error", f"request {i}: {done.error}")
            if done.sample == 0:
                answers[i] = self._answer(done.token_ids, untils[i])
                self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        return answers

    def _params(self, kwargs: dict[str, Any], stop: list[str]) -> SamplingParams:
        """Sampling options from the harness' generation settings. Raises `RowError` for one that is unknown."""
        max_tokens = kwargs.pop("max_gen_toks")
        greedy = not kwargs.pop("do_sample", False)
        named = {_GENERATION_NAMES.get(name, name): value for name, value in kwargs.items()}
        fixed = {"max_tokens": max_tokens, "stop": stop, "adapter": self._adapter}
        if greedy:
            fixed["temperature"] = 0.0
        if named.get("beam_width", 1) > 1:
            fixed["stop"] = []  # what a beam spells out is cut afterwards
        return SamplingParams.resolve(self.llm.engine.sampling_defaults, named, fixed)

    def _answer(self, ids: list[int], until: list[str]) -> str:
        mark = self._think_end_token
        if isinstance(mark, int) and mark in ids:
            ids = ids[len(ids) - ids[::-1].index(mark) :]
            return postprocess_generated_text(self.tok_decode(ids).lstrip(), until, None)
        return postprocess_generated_text(self.tok_decode(ids), until, mark if isinstance(mark, str) else None)

    def _bar(self, done: Any, total: int, what: str, disable: bool) -> Any:
        return tqdm(done, total=total, desc=what, disable=disable or self.rank != 0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return torch.cat([part.reshape(-1, *part.shape[1:]) for part in gathered])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self.world_size == 1:
            return [obj]
        gathered = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, gathered, dst)
        return gathered

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    @property
    def accelerator(self) -> SimpleNamespace:
        """Where versions up to 0.4.11 look for the two of them."""
        return SimpleNamespace(gather=self.all_gather, wait_for_everyone=self.barrier)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes down about the model."""
        model, engine = (self.llm.engine.description[name] for name in ("model", "engine"))
        return {
            "model_dtype": engine["dtype"],
            "model_revision": model["revision"] or "",
            "model_sha": model["digest"],
        }

    def close(self) -> None:
        """Free the model."""
        self.llm.close()
