"""Reads a model's weights as the settings ask: as they are, rounded on the way, left on disk, or made up."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterable, Iterator

import torch
from paged_kernels.interface import Backend
from paged_kernels.quantized import WeightFormat
from torch import Tensor

from paged_infer.config import ConfigError, EngineConfig
from paged_infer.models.config import ModelConfig
from paged_infer.models.decoder import Decoder
from paged_infer.models.dummy import DummySource
from paged_infer.models.packing import OffloadingPacker
from paged_infer.models.source import ModelSource, native, resolve_model
from paged_infer.models.transformers_model import AnyModel, TransformersConfig, TransformersModel
from paged_infer.models.weights import StoredWeight, deferred, layer_parameters
from paged_infer.text.tokenizer import Tokenizer

CALIBRATION_TOKENS = 1024
"""Of text, for formats rounded at load that need some."""

_FORMATS = {
    "int8": WeightFormat("int8", 8, None, True),
    "fp8": WeightFormat("fp8", 8, None, True),
    "int4": WeightFormat("group", 4, 64),
}

logger = logging.getLogger(__name__)


def model_source(config: EngineConfig) -> ModelSource:
    """The model's files, or random weights in their shape. Raises `ConfigError`."""
    source = resolve_model(config.model, config.model_impl, trust_remote_code=config.trust_remote_code)
    changed = ("quantization", "none"), ("offload", "none"), ("load_format", "auto")
    for name, unchanged in changed:
        if getattr(config, name) != unchanged:
            native(source.config(), f"{name}={getattr(config, name)!r}")
    if config.quantization != "none" and source.quantized:
        raise ConfigError(
            f"quantization={config.quantization!r}: {config.model} is quantised already; leave it out, or give the "
            "unquantised model"
        )
    return DummySource(source) if config.load_format == "dummy" else source


def weight_bytes(config: EngineConfig, source: ModelSource, backend: Backend) -> int:
    """What the weights will take in memory."""
    total = source.weight_bytes(backend.dtype, backend.keeps)
    model = source.config()
    if isinstance(model, TransformersConfig):
        return total
    matrices = list(_matrices(model))
    if config.offload == "disk":
        sizes = sorted((rows * columns * backend.dtype.itemsize for rows, columns in matrices), reverse=True)
        return total - sum(sizes) + sum(sizes[:2])
    kept = _FORMATS.get(config.quantization)
    if kept is None or not backend.keeps(kept):
        return total
    return total + sum(
        kept.bytes_of(rows, columns) - rows * columns * backend.dtype.itemsize for rows, columns in matrices
    )


def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    return [
        (part.rows, parameter.columns)
        for layer in range(config.num_layers)
        for parameter in layer_parameters(config, layer)
        if parameter.columns is not None and ".experts." not in parameter.key
        for part in parameter.parts
    ]


def load_decoder(
    config: EngineConfig, source: ModelSource, backend: Backend, tokenizer: Tokenizer, max_position: int
) -> AnyModel:
    """The model, ready to run. Raises `ConfigError`."""
    model = source.config()
    if isinstance(model, TransformersConfig):
        return TransformersModel(model, backend, max_position=max_position)
    if config.offload == "disk":
        weights = deferred(model, source.entries())
        return Decoder(model, backend, weights, max_position=max_position, packer=OffloadingPacker(backend))
    if config.quantization == "none":
        weights = source.weights()
        if backend.dtype == torch.float16:
            weights = _warned_of_range(config.model, weights)
        return Decoder(model, backend, weights, max_position=max_position)
    return Decoder(model, backend, _rounded(config, source, backend, tokenizer), max_position=max_position)


def _warned_of_range(model: str, weights: Iterable[tuple[str, StoredWeight]]) -> Iterator[tuple[str, StoredWeight]]:
    """The weights of a float16 run, with a word where the first was trained in a wider range."""
    warned = False
    for name, weight in weights:
        if not warned and isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
            warned = True
            logger.warning(
                "%s is a bfloat16 checkpoint: its activations may pass 65504, the largest number of float16, and "
                "rows then end in non_finite_logits; dtype bfloat16 has the range",
                model,
            )
        yield name, weight


def return_freed_memory() -> None:
    """Give the system what was needed only while reading: glibc keeps it, 100 MB for a model of 135M parameters."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _rounded(
    config: EngineConfig, source: ModelSource, backend: Backend, tokenizer: Tokenizer
) -> list[tuple[str, StoredWeight]]:
    """Every weight, the layers' matrices rounded; a calibration text that is short is followed by the built-in one."""
    from paged_infer.models.quantize import make_method, quantized_weights
    from paged_infer.models.quantize.calibration import builtin_text, token_rows

    method = make_method(config.quantization)
    rows = torch.zeros(1, 1, dtype=torch.int64)
    if method.calibrated:
        given = config.calibration
        text = builtin_text() if given is None else f"{given}\n\n{builtin_text()}"
        rows = token_rows(tokenizer, text, CALIBRATION_TOKENS)
        kind = "built-in" if given is None else "the given"
        logger.info("rounding to %s, calibrated on %d tokens of %s text", config.quantization, rows.numel(), kind)
    found: list[tuple[str, StoredWeight]] = []
    quantized_weights(source, backend, method, rows, lambda *entry: found.append(entry))
    return found
