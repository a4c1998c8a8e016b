"""The public nouns: what a request asks for and what comes back. Standard library only.

`SamplingParams` holds every option a single row may set; `Request` is a tokenised row on its way into the engine;
`Completion` is one finished sample. `RowError` is the one exception that stands for "this row cannot be answered":
it carries a type, the field at fault and a remedy, and never ends a job.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error"]

UNTIL_CONTEXT = -1
"""`max_tokens` value that means: generate up to the model's context length."""


class RowError(Exception):
    """One row cannot be answered; the others go on.

    Attributes:
        error_type: stable machine-readable kind, e.g. `invalid_parameter`, `prompt_too_long`.
        field: the offending field of the row, or None when no single field is at fault.
    """

    def __init__(self, error_type: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.field = field

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str, str | None]]:
        return RowError, (self.error_type, str(self), self.field)


class InputFailed(OSError):
    """An input cannot be read any further for now (disk, network): nothing is wrong with its rows, try again."""


def _invalid(name: str, value: object, expected: str) -> RowError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RowError("invalid_parameter", f"{name}={shown}: expected {expected}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose and when to stop; the names are those of vLLM's offline API.

    Raises `RowError("invalid_parameter")` naming field and value when a value is out of range.

    Attributes:
        max_tokens: most tokens to generate; -1 = up to the context length; 0 = none (prompt only).
        temperature: 0 = greedy; else logits are divided by it before truncation and sampling.
        top_p, top_k, min_p: truncation, applied in the order top-k, top-p, min-p after temperature; `top_k` 0 or -1
            and `top_p` 1 and `min_p` 0 switch them off. The argmax always survives.
        seed: the row's own seed; None = derived from the run's seed and the row number.
        stop: strings that end the output; the earliest match in the text wins.
        stop_token_ids: token ids that end the output, `ignore_eos` or not.
        include_stop_str_in_output: keep the matched stop string in `text`.
        min_tokens: neither EOS, nor stop ids, nor stop strings end the output before this many tokens.
        ignore_eos: do not end at the model's EOS tokens.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive and multiplied where
            negative; 1 = off.
        presence_penalty: taken off the logits of tokens in the output; frequency_penalty: once for each occurrence.
        logit_bias: (token id, what is added to its logit) pairs; given as a mapping, whose keys may be text.
        bad_words: texts that the output never spells out with the tokenizer's own tokens for them.
        allowed_token_ids: the only ids that may be chosen; None = all.
        logprobs: report the log-probability of each output token and that many of the likeliest; None = no report.
        prompt_logprobs: the same for the tokens of the prompt.
        n: samples of the prompt; more than one needs a temperature or beams.
        beam_width: beams of a beam search, which the temperature and truncation options do not touch; 1 = none.
        length_penalty: a hypothesis' score is its log-probability divided by its output length to this power.
        early_stopping: end once as many hypotheses as beams are finished (true), once no running beam is likely to do
            better at its present length (false), or once none possibly can ("never"); as in Hugging Face.
        json_schema: the output is JSON that fits this schema, an object or its text.
        regex: the output matches this regular expression as a whole.
        grammar: the output is a text of this Lark grammar. At most one of the three.
        adapter: name of a loaded LoRA adapter to answer with; None = the model as it is.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        def real(name: str) -> float:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise _invalid(name, value, "a finite number")
            object.__setattr__(self, name, float(value))
            return float(value)

        def whole(name: str, low: int) -> int:
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
                object.__setattr__(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise _invalid(name, value, f"a whole number of at least {low}")
            return value

        whole("max_tokens", -1)
        whole("top_k", -1)
        whole("min_tokens", 0)
        whole("n", 1)
        whole("beam_width", 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, 0)
        if real("temperature") < 0:
            raise _invalid("temperature", self.temperature, "0 (greedy) or more")
        for name in ("top_p", "min_p"):
            if not 0 <= real(name) <= 1:
                raise _invalid(name, getattr(self, name), "a number from 0 to 1")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise _invalid("seed", self.seed, "a whole number")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "true or false")
        if real("repetition_penalty") <= 0:
            raise _invalid("repetition_penalty", self.repetition_penalty, "a number above 0; 1 changes nothing")
        for name in ("presence_penalty", "frequency_penalty", "length_penalty"):
            real(name)
        if self.early_stopping not in (True, False, "never") or isinstance(self.early_stopping, int | float) != (
            isinstance(self.early_stopping, bool)
        ):
            raise _invalid("early_stopping", self.early_stopping, 'true, false or "never"')
        object.__setattr__(self, "stop", _texts(self.stop, "stop", "an empty string would stop at once"))
        object.__setattr__(self, "stop_token_ids", token_ids(self.stop_token_ids, "stop_token_ids"))
        object.__setattr__(self, "bad_words", _texts(self.bad_words, "bad_words", "nothing can avoid an empty one"))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", token_ids(self.allowed_token_ids, "allowed_token_ids"))
            if not self.allowed_token_ids:
                raise _invalid("allowed_token_ids", [], "at least one token id")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise _invalid("adapter", self.adapter, "a name")
        self._check_structure()
        if self.beam_width > 1:
            if self.n > self.beam_width:
                raise _invalid("n", self.n, f"at most beam_width ({self.beam_width})")
            if self.stop:
                raise _invalid("stop", self.stop, "no stop strings beside beam_width; stop_token_ids work")
            if self.logprobs is not None:
                raise _invalid("logprobs", self.logprobs, "none beside beam_width; a beam's score is reported")
        elif self.n > 1 and self.temperature == 0:
            raise _invalid("n", self.n, "1 at temperature 0, where all samples would be equal")
        if 0 <= self.max_tokens < self.min_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")

    def _check_structure(self) -> None:
        schema: object = self.json_schema
        if isinstance(schema, Mapping | bool):
            object.__setattr__(self, "json_schema", json.dumps(schema, ensure_ascii=False))
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        for name in given:
            if not isinstance(getattr(self, name), str):
                raise _invalid(name, getattr(self, name), "text" if name != "json_schema" else "a schema or its text")
            if name != given[0]:
                raise _invalid(name, getattr(self, name), f"no {given[0]} beside it")
            if self.beam_width > 1:
                raise _invalid(name, getattr(self, name), "no beam_width beside it")
            if self.ignore_eos:
                raise _invalid("ignore_eos", True, f"false, since {name} says where the output ends")

    @property
    def is_structured(self) -> bool:
        """Whether the output has a structure to follow."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @classmethod
    def names(cls) -> frozenset[str]:
        """The option names a row, a YAML file or the command line may set."""
        return _PARAM_NAMES

    @classmethod
    def resolve(cls, *layers: Mapping[str, Any]) -> SamplingParams:
        """Merge option layers, later ones winning; a None value means "unset" and never overrides.

        Raises `RowError` for an unknown name or a bad value.
        """
        merged: dict[str, Any] = {}
        for layer in layers:
            for name, value in layer.items():
                if name not in _PARAM_NAMES:
                    near = difflib.get_close_matches(str(name), sorted(_PARAM_NAMES), n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise RowError("invalid_parameter", f"unknown sampling option {name!r}{hint}", name)
                if value is not None:
                    merged[name] = value
        return cls(**merged)


_PARAM_NAMES = frozenset(f.name for f in fields(SamplingParams))


def _texts(value: object, name: str, why: str) -> tuple[str, ...]:
    """One text or a list of them as a tuple, none empty."""
    if value is None:
        return ()
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        raise _invalid(name, value, "a string or a list of strings")
    for text in given:
        if not isinstance(text, str) or not text:
            raise _invalid(name, value, f"non-empty strings ({why})")
    return tuple(given)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs sorted by id, from a mapping whose keys may be text, as JSON's are, or from pairs."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise _invalid("logit_bias", value, "token ids and what is added to their logits")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _invalid("logit_bias", value, "token ids and what is added to their logits")
        key, bias = pair
        if isinstance(key, str) and key.isascii() and key.isdigit():
            key = int(key)
        (token,) = token_ids([key], "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise _invalid("logit_bias", bias, f"a finite number for token {token}")
        biases[token] = float(bias)
    return tuple(sorted(biases.items()))


def token_ids(value: object, name: str, vocab_size: int | None = None) -> tuple[int, ...]:
    """Check a list of token ids and return it as a tuple.

    Raises `RowError` naming the field and the first bad value: not a list, not a whole number (booleans, floats and
    strings included), negative, beyond int32, or not below `vocab_size`.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _invalid(name, value, "a list of token ids")
    ids: tuple[Any, ...] = tuple(value)
    limit = vocab_size if vocab_size is not None else 2**31
    if set(map(type, ids)) <= {int} and 0 <= min(ids, default=0) <= max(ids, default=0) < limit:
        return ids
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limit:
            raise _invalid(name, token, f"token ids, whole numbers from 0 to {limit - 1}")
    return ids


@dataclass(frozen=True, slots=True)
class Request:
    """One tokenised row.

    Attributes:
        request_id: unique in the run; the job uses the row number.
        prompt_token_ids: what the model reads, BOS and template included.
        params: the resolved options of this row.
        noise_key: 64-bit key of this row's sampling noise (see `paged_kernels.reference.gumbel_noise`).
        salt: mixed into the prefix-cache key; rows share cached blocks only when their salts are equal.
        score_from: with `params.prompt_logprobs`, the first prompt token to report; those before it are not computed.
            Where it is more than 0 and nothing is generated, the prompt may be one token longer than `max_model_len`,
            since its last token is scored and not run.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    noise_key: int = 0
    salt: str = ""
    score_from: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of a run of positions under the model's raw distribution, a column for each figure.

    Attributes:
        token_ids: [P], the token that stands at each position.
        logprobs: [P], its log-probability; NaN where a position has none (the first of a prompt).
        ranks: [P], 1 + how many tokens are strictly likelier; 0 where a position has none.
        top_token_ids, top_logprobs: [P, k], the k best in falling order, ties by id; empty lists where there are none.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_token_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a given continuation is.

    Attributes:
        logprob: of the whole continuation, in nats.
        is_greedy: whether each of its tokens is the one greedy decoding would choose; of equally likely tokens that is
            the one with the lowest id.
        tokens: position by position.
    """

    logprob: float
    is_greedy: bool
    tokens: Logprobs

    @classmethod
    def of(cls, tokens: Logprobs) -> Score:
        """From log-probabilities that list at least the likeliest token of each position."""
        greedy = all(top[0] == token for token, top in zip(tokens.token_ids, tokens.top_token_ids, strict=True))
        return cls(math.fsum(tokens.logprobs), greedy, tokens)

    @classmethod
    def of_completion(cls, scored: Completion) -> Score:
        """From the completion of a request for nothing but prompt log-probabilities.

        Raises:
            RowError: the one it failed with.
        """
        if scored.error is not None:
            raise RowError(scored.error_type or "error", f"row {scored.request_id}: {scored.error}")
        if scored.prompt_logprobs is None:
            raise ValueError("the request did not ask for prompt_logprobs")
        return cls.of(scored.prompt_logprobs)


@dataclass(slots=True)
class Completion:
    """One finished sample of a request.

    `token_ids` holds every generated token, the stop token included; `text` leaves out EOS, special tokens and the stop
    string. `stop_reason` is the stop string, or the stop token id as text, when the user asked for it; None for EOS.
    A request's samples leave the engine together, in order. `cumulative_logprob` and the logprobs are None unless asked
    for, `score` unless from a beam, `valid` unless the output had a structure to follow.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason
    text: str = ""
    sample: int = 0
    stop_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    error_type: str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    valid: bool | None = None
    adapter: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @classmethod
    def failed(cls, request_id: int, error: RowError, prompt_tokens: int = 0) -> Completion:
        """The completion that stands for a row that could not be answered."""
        return cls(
            request_id=request_id,
            token_ids=[],
            finish_reason="error",
            prompt_tokens=prompt_tokens,
            error=str(error),
            error_type=error.error_type,
        )


def noise_key(seed: int | None, run_seed: int, row: int) -> int:
    """The 64-bit key of a row's sampling noise: from its own seed, else from the run's seed and the row number.

    The same seed gives the same key wherever the row stands; rows without a seed never share a key with seeded ones.
    """
    source = f"run {run_seed} row {row}" if seed is None else f"seed {seed}"
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")
