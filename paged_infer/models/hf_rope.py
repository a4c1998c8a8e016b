"""The rotary embeddings that a Hugging Face `config.json` describes, as transformers 4 and 5 write it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_infer.config import ConfigError
from paged_infer.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_magnitude,
)

Fields = Mapping[str, Any]


def layer_ropes(
    values: Fields, head_dim: int, windows: Sequence[int], partial: bool = False
) -> tuple[RopeConfig | None, ...]:
    """The rotary embedding of each layer; None = the layer has none.

    From `rope_parameters` (transformers 5), which may differ between windowed and other layers, or `rope_theta`,
    `rope_local_base_freq` and `rope_scaling` (4). `windows` [num_layers]: 0 = not windowed. `partial`: the
    family's heads may be rotated in part. Raises `ConfigError`.
    """
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        full, local = (
            _rope(parameters.get(kind) or {}, values, head_dim, partial)
            for kind in ("full_attention", "sliding_attention")
        )
    else:
        full = local = _rope(parameters, values, head_dim, partial)
        if values.get("rope_local_base_freq"):
            local = RopeConfig(theta=float(values["rope_local_base_freq"]), rotary_dim=full.rotary_dim)
    return tuple(
        (local if window else full) if has_rope(values, layer) else None for layer, window in enumerate(windows)
    )


def has_rope(values: Fields, layer: int) -> bool:
    """Whether a layer rotates: `no_rope_layers` has a 1 for it, or it is not each `no_rope_layer_interval`th."""
    if values.get("no_rope_layers") is not None:
        return bool(values["no_rope_layers"][layer])
    interval = values.get("no_rope_layer_interval")
    return not interval or (layer + 1) % int(interval) != 0


def _rope(parameters: Fields, values: Fields, head_dim: int, partial: bool) -> RopeConfig:
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(f"rope_type {rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    theta = float(parameters.get("rope_theta") or values.get("rope_theta") or 10000.0)
    share = parameters.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise ConfigError(f"partial_rotary_factor={share} is not supported for this architecture")
    rotary_dim = int(head_dim * share)
    scaling = _ROPE_TYPES[rope_type]({**parameters, "rope_theta": theta, "rotary_dim": rotary_dim}, values)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def _number(parameters: Fields, name: str) -> float:
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"RoPE parameters: {name}={value!r}, expected a positive number")
    return float(value)


def _original_context(parameters: Fields, values: Fields) -> int:
    found = values.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(found or values["max_position_embeddings"])


def _linear(parameters: Fields, values: Fields) -> RopeScaling:
    return LinearScaling(_number(parameters, "factor"))


def _llama3(parameters: Fields, values: Fields) -> RopeScaling:
    return Llama3Scaling(
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position_embeddings=_original_context(parameters, values),
    )


def _yarn(parameters: Fields, values: Fields) -> RopeScaling:
    original = _original_context(parameters, values)
    factor = parameters.get("factor") or values["max_position_embeddings"] / original
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        scales = parameters.get("mscale"), parameters.get("mscale_all_dim")
        magnitude = yarn_magnitude(factor)
        if scales[0] and scales[1]:
            magnitude = yarn_magnitude(factor, scales[0]) / yarn_magnitude(factor, scales[1])
    return YarnScaling(
        theta=parameters["rope_theta"],
        factor=float(factor),
        original_max_position_embeddings=original,
        magnitude=float(magnitude),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=parameters.get("truncate", True),
    )


def _longrope(parameters: Fields, values: Fields) -> RopeScaling:
    original = _original_context(parameters, values)
    factor = parameters.get("factor") or values["max_position_embeddings"] / original
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists = []
    for name in ("short_factor", "long_factor"):
        numbers, expected = parameters.get(name), parameters["rotary_dim"] // 2
        if not isinstance(numbers, Sequence) or len(numbers) != expected:
            raise ConfigError(f"RoPE parameters: {name}, expected {expected} numbers")
        lists.append(tuple(float(number) for number in numbers))
    return LongRopeScaling(lists[0], lists[1], original, float(magnitude))


def _dynamic(parameters: Fields, values: Fields) -> RopeScaling | None:
    """Within the model's own context, the only one a run may have, dynamic frequencies are the plain ones.

    Beyond it they would change with each sequence's length, and the keys already cached with them.
    """
    _number(parameters, "factor")
    return None


_ROPE_TYPES: dict[str, Callable[[Fields, Fields], RopeScaling | None]] = {
    "default": lambda parameters, values: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
