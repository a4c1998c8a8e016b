"""Random weights in the shape of a model, to measure with where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_infer.models.config import ModelConfig
from paged_infer.models.source import Entry, Keeps, ModelSource, native
from paged_infer.models.weights import StoredWeight, num_weights, parameters


class DummySource:
    """A model's config and tokenizer with weights drawn at random: bfloat16, norms of ones, the same each time."""

    quantized = False

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def config(self) -> ModelConfig:
        return native(self._source.config(), "load_format='dummy'")

    def entries(self) -> Iterator[Entry]:
        config = self.config()
        for parameter in parameters(config):
            if not (parameter.key == "lm_head" and config.tie_word_embeddings):
                for name, shape in parameter.shapes().items():
                    yield name, partial(_random, name, shape)

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        return ((name, read()) for name, read in self.entries())

    def generation_config(self) -> dict[str, Any]:
        return self._source.generation_config()

    def tokenizer_folder(self) -> Path:
        return self._source.tokenizer_folder()

    def weight_bytes(self, dtype: torch.dtype, keeps: Keeps | None = None) -> int:
        return num_weights(self.config()) * dtype.itemsize

    def files(self) -> list[Path]:
        return [path for path in self._source.files() if path.suffix != ".safetensors"]

    def revision(self) -> str | None:
        return None


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
