"""Quantised checkpoints: one file for each format, an object made from the config's `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from paged_kernels.quantized import GroupWeight, QuantizedWeight

from paged_infer.config import ConfigError
from paged_infer.models.quantization.awq import AWQ
from paged_infer.models.quantization.compressed_tensors import CompressedTensors
from paged_infer.models.quantization.fp8 import FP8
from paged_infer.models.quantization.gptq import GPTQ
from paged_infer.models.quantization.scheme import Scheme
from paged_infer.models.safetensors import Checkpoint
from paged_infer.models.weights import CheckpointError, StoredWeight

_SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": FP8,
    "fp8": FP8,
    "gptq": GPTQ,
}


def scheme_of(hf: Mapping[str, Any]) -> Scheme | None:
    """How the weights of a parsed `config.json` are quantised, None = not at all.

    Raises `ConfigError` naming a quantiser, or a setting of one, that is not supported.
    """
    settings = hf.get("quantization_config") or hf.get("compression_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"model config: quantization_config={settings!r}, expected an object")
    method = settings.get("quant_method", "unknown")
    if method == "mxfp4":  # of the one family that has it, unpacked as its weights come
        return None
    if method not in _SCHEMES:
        raise ConfigError(
            f"quant_method {method!r} is not supported (supported: {', '.join(sorted(_SCHEMES))}); use the "
            "unquantised checkpoint, if need be with --quantization, or a GGUF file"
        )
    return _SCHEMES[method](settings)


def quantized_modules(scheme: Scheme, names: Iterable[str]) -> dict[str, list[str]]:
    """Of a checkpoint's tensor names: layer → the last parts of the names of its tensors, where it is quantised."""
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        if suffix in scheme.suffixes:
            found.setdefault(module, []).append(suffix)
    return {module: suffixes for module, suffixes in found.items() if set(suffixes) & scheme.marks}


def entries(scheme: Scheme, checkpoint: Checkpoint) -> Iterator[tuple[str, Callable[[], StoredWeight]]]:
    """Every weight's Hugging Face name and what reads it, quantised layers as one weight each."""
    modules = quantized_modules(scheme, checkpoint.names)
    for name in checkpoint.names:
        module, _, suffix = name.rpartition(".")
        if suffix in scheme.ignored:
            continue
        if module not in modules or suffix not in scheme.suffixes:
            yield name, partial(checkpoint.tensor, name)
        elif suffix == modules[module][0]:
            yield f"{module}.weight", partial(_layer, scheme, checkpoint, module, modules[module])


def _layer(scheme: Scheme, checkpoint: Checkpoint, module: str, suffixes: list[str]) -> StoredWeight:
    """The weight of a quantised layer. Raises `CheckpointError` naming the layer whose tensors don't make one."""
    tensors = {suffix: checkpoint.tensor(f"{module}.{suffix}") for suffix in suffixes}
    try:
        weight = scheme.weight(module, tensors)
        _check_groups(weight, scheme.format_of(module).group_size)
        return weight
    except ConfigError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{module}: {scheme.method} tensor {error.args[0]} is missing") from None
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{module}: its {scheme.method} tensors do not fit together: {error}") from error


def _check_groups(weight: QuantizedWeight, asked: int | None) -> None:
    """Raise ValueError for groups of another size than the config's, as where that does not divide the inputs."""
    inputs = weight.shape[1]
    if isinstance(weight, GroupWeight) and weight.group_size != min(asked or inputs, inputs):
        raise ValueError(f"{inputs} inputs, group_size {asked}, and scales for {inputs // weight.group_size} groups")
