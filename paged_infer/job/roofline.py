"""What a job would take on machines that are not here: a roofline of weights, KV cache, arithmetic and links.

A step takes as long as the slower of two: the multiplications at the machine's rate, or the bytes (weights once, keys
and values of every sequence) at its memory's (Williams et al., "Roofline", 2009). Ranks that share layers add two
all-reduces a layer; stages of a pipeline work on parts of the batch in turn. The rest is counting: prompts that no
prefix cache saves, then as many decode steps as the rows need with as many at once as the cache holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paged_infer.config import ConfigError, EngineConfig
from paged_infer.models.config import ModelConfig
from paged_infer.models.sharding import check_divisible, local_config, stage_layers
from paged_infer.models.weights import num_weights
from paged_infer.parallel.place import Place

GIB = 1 << 30
PREFILL_TOKENS = 8192
"""Tokens of a step in which a GPU computes prompts."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One device.

    Attributes:
        memory_bytes: that it has.
        bandwidth: of its memory, bytes a second, as kernels reach it.
        flops: of its matrix units in the run's dtype, a second, as kernels reach it.
        link: bytes a second to the other devices of the node, in one direction.
        link_seconds: an all-reduce takes beside its bytes.
        step_seconds: a step takes beside its arithmetic: launches, scheduling.
        half_rate_rows: tokens of a step with which products reach half of `flops`; 0 = any number reaches all of it.
        dtype_bytes: of a weight and of a number in the KV cache.
        layer_share: of these bytes, that the layers' weights take where they are quantised.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link: float
    link_seconds: float = 10e-6
    step_seconds: float = 1e-3
    half_rate_rows: float = 0.0
    dtype_bytes: float = 2.0
    layer_share: float = 1.0


def _gpu(name: str, gib: float, terabytes: float, teraflops: float, link_gigabytes: float) -> Machine:
    """From the data sheet (dense bf16); kernels reach some 80 % of the bandwidth and 60 % of the arithmetic."""
    return Machine(name, gib * GIB, 0.8 * terabytes * 1e12, 0.6 * teraflops * 1e12, 0.8 * link_gigabytes * 1e9)


GPUS = {
    machine.name.lower(): machine
    for machine in (
        _gpu("A100-40", 40, 1.555, 312, 300),
        _gpu("A100", 80, 2.039, 312, 300),
        _gpu("H100", 80, 3.35, 989, 450),
        _gpu("H200", 141, 4.8, 989, 450),
        _gpu("B200", 180, 8.0, 2250, 900),
        _gpu("L4", 24, 0.3, 121, 32),
        _gpu("L40S", 48, 0.864, 362, 32),
        _gpu("A10", 24, 0.6, 125, 32),
        _gpu("RTX4090", 24, 1.008, 165, 32),
        _gpu("MI300X", 192, 5.3, 1307, 448),
    )
}


def parse_gpus(text: str) -> tuple[int, Machine]:
    """`8xH100` → 8 and what one of them is. Raises `ConfigError`."""
    match = re.fullmatch(r"(?:([1-9][0-9]*)\s*[xX*])?\s*([\w-]+)", text.strip())
    if match is None or match[2].lower() not in GPUS:
        known = ", ".join(machine.name for machine in GPUS.values())
        raise ConfigError(f"gpus={text!r}: expected a number and a kind, as 8xH100; known kinds: {known}")
    return int(match[1] or 1), GPUS[match[2].lower()]


@dataclass(frozen=True, slots=True)
class Workload:
    """A job in numbers: rows, mean tokens of a prompt, those of them that a prefix cache saves, mean and greatest
    number of generated tokens of a row."""

    rows: int
    prompt_tokens: float
    shared_tokens: float
    output_tokens: float
    max_output_tokens: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """A layout of devices and what the job would take there.

    Attributes:
        num_seqs: sequences an engine runs at once. weight_bytes, kv_bytes: of the fullest device.
        why_not: None, or why the layout is out of the question; the other figures are 0 then.
    """

    tp: int
    pp: int
    dp: int
    num_seqs: int = 0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    why_not: str | None = None

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def name(self) -> str:
        return " × ".join(f"{kind} {size}" for kind, size in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)))


def layouts(devices: int, node: int = 8) -> Iterator[tuple[int, int, int]]:
    """Every (tp, pp, dp) that uses all devices, shared layers within a node of so many."""
    for tp in range(1, min(devices, node) + 1):
        for pp in range(1, devices // tp + 1):
            if devices % (tp * pp) == 0 and (tp & (tp - 1)) == 0:
                yield tp, pp, devices // (tp * pp)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a rank of the dearest stage has.

    Attributes:
        dense: weights every token passes; experts: those of all experts, of which a token uses `used_share`.
        head: of the LM head. kv_numbers: that a token leaves in the cache. attention: multiplications of a token with
            one earlier one.
    """

    layers: int
    hidden: int
    dense: float
    experts: float
    used_share: float
    head: float
    kv_numbers: float
    attention: float


def _stage(model: ModelConfig, tp: int, pp: int) -> _Stage:
    own = [local_config(model, Place(0, tp, stage, pp)) for stage in range(pp)]
    largest = max(own, key=lambda share: share.num_layers)
    experts, used = 0.0, 1.0
    if largest.experts is not None:
        one = 3 * largest.hidden_size * largest.experts.intermediate_size
        experts = one * largest.experts.num_experts * len(largest.experts.layers)
        used = largest.experts.top_k / largest.experts.num_experts
    head = float(largest.vocab_size * largest.hidden_size)
    embeddings = head * (1 if largest.tie_word_embeddings else 2)
    return _Stage(
        largest.num_layers,
        largest.hidden_size,
        num_weights(largest) - embeddings - experts,
        experts,
        used,
        head,
        2.0 * largest.num_layers * largest.num_kv_heads * largest.head_dim,
        4.0 * largest.num_layers * largest.num_heads * largest.head_dim,
    )


def step_seconds(
    machine: Machine, stage: _Stage, tp: int, tokens: float, sequences: float, context: float, sampled: float
) -> float:
    """One stage's time for a step.

    Args:
        tokens: run through the model. sequences: they belong to, each with `context` tokens in the cache.
        sampled: how many of them need logits.
    """
    touched = min(1.0, tokens * stage.used_share)
    work = 2 * tokens * (stage.dense + stage.experts * stage.used_share) + 2 * sampled * stage.head
    work += tokens * context * stage.attention
    weights = machine.layer_share * (stage.dense + stage.experts * touched) + stage.head * (sampled > 0)
    moved = machine.dtype_bytes * (weights + sequences * context * stage.kv_numbers)
    rate = machine.flops * tokens / (tokens + machine.half_rate_rows)
    seconds = max(work / rate, moved / machine.bandwidth) + machine.step_seconds
    if tp > 1:
        reduced = 2 * (tp - 1) / tp * tokens * stage.hidden * machine.dtype_bytes
        seconds += 2 * stage.layers * (machine.link_seconds + reduced / machine.link)
    return seconds


def forecast(
    model: ModelConfig,
    machine: Machine,
    load: Workload,
    tp: int,
    pp: int,
    dp: int,
    *,
    max_num_seqs: int,
    prefill_tokens: int = PREFILL_TOKENS,
    utilisation: float = 0.9,
) -> Forecast:
    """What the job would take on `tp * pp * dp` such machines.

    Args:
        prefill_tokens: the token budget of a step.
        utilisation: share of the memory that may be used.
    """
    found = Forecast(tp, pp, dp)
    try:
        check_divisible(model, tp, pp)
    except ConfigError as error:
        return replace(found, why_not=str(error).partition(": ")[2] or str(error))
    stage = _stage(model, tp, pp)
    layers = machine.layer_share * (stage.dense + stage.experts)
    weights = machine.dtype_bytes * (layers + stage.head * (1 if model.tie_word_embeddings else 2))
    length = load.prompt_tokens + load.output_tokens
    free = utilisation * machine.memory_bytes - weights - machine.dtype_bytes * prefill_tokens * 4 * stage.hidden
    fit = int(free / (machine.dtype_bytes * stage.kv_numbers * max(1.0, length)))
    if fit < 1:
        return replace(found, weight_bytes=weights, why_not=f"weights of {weights / GIB:.0f} GiB leave no room")
    rows = -(-load.rows // dp)
    most = max(1, min(fit, max_num_seqs, rows))
    computed = rows * (load.prompt_tokens - load.shared_tokens)
    steps = computed / prefill_tokens
    chunk = min(prefill_tokens, computed) or 1
    prompts = chunk / max(1.0, load.prompt_tokens)
    prefill = steps * step_seconds(machine, stage, tp, chunk, prompts, load.prompt_tokens / 2, prompts)
    micro = most / pp
    context = load.prompt_tokens + load.output_tokens / 2
    decode_step = pp * step_seconds(machine, stage, tp, micro, micro, context, micro)
    decode_steps = max(load.output_tokens * rows / most, load.max_output_tokens)
    return replace(
        found,
        num_seqs=most,
        weight_bytes=weights,
        kv_bytes=min(free, machine.dtype_bytes * stage.kv_numbers * length * most),
        prefill_seconds=prefill,
        decode_seconds=decode_steps * decode_step,
    )


def forecasts(
    model: ModelConfig, devices: int, machine: Machine, load: Workload, config: EngineConfig
) -> list[Forecast]:
    """Every layout of the devices, the fastest first, those that do not work last."""
    found = [
        forecast(
            model,
            machine,
            load,
            tp,
            pp,
            dp,
            max_num_seqs=config.max_num_seqs,
            utilisation=config.gpu_memory_utilization,
        )
        for tp, pp, dp in layouts(devices)
        if len(stage_layers(model, min(pp, model.num_layers))) == pp
    ]
    return sorted(found, key=lambda each: (each.why_not is not None, each.seconds))
