"""What a model's own generation settings (`generation_config.json`) ask for, in our names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty",)
_UNSUPPORTED = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options where a row and the command line say nothing.

    As in Hugging Face's `generate`, temperature and truncation count only where `do_sample` is true; penalties and
    `max_new_tokens` always do. Settings that cannot be honoured are named in a warning.
    """
    defaults: dict[str, Any] = {}
    if generation_config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation_config["max_new_tokens"]
    for name in _PENALTIES:
        if generation_config.get(name) is not None:
            defaults[name] = generation_config[name]
    if generation_config.get("do_sample"):
        defaults["temperature"] = 1.0
        for name in _SAMPLING_FIELDS:
            if generation_config.get(name) is not None:
                defaults[name] = generation_config[name]
    for name, neutral in _UNSUPPORTED.items():
        if generation_config.get(name, neutral) not in (None, neutral):
            logger.warning("generation_config.json sets %s=%s, which is not applied", name, generation_config[name])
    return defaults


def eos_token_ids(generation_config: Mapping[str, Any]) -> frozenset[int]:
    """The ids listed as end of sequence: a whole number, a list of them, or absent."""
    ids = generation_config.get("eos_token_id")
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
