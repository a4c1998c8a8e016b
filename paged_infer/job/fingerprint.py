"""What the results of a job depend on, so that an interrupted one is only continued as what it was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from paged_infer import __version__
from paged_infer.config import EngineConfig
from paged_infer.io import fingerprint as input_fingerprint
from paged_infer.io.readers import Inputs
from paged_infer.job.config import RunConfig

SPEED_ONLY = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_kv_blocks",
        "kv_cache_memory",
        "gpu_memory_utilization",
        "prefix_caching",
        "chunked_prefill",
        "num_speculative_tokens",
        "offload",
        "order",
        "speculative",
        "threads",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
    }
)
"""Engine settings that change how fast answers come, not which."""

JOB_ONLY = frozenset(
    {
        "inputs",
        "output",
        "on_error",
        "overwrite",
        "resume",
        "retry_errors",
        "time_limit",
        "max_error_rate",
        "dedupe",
        "cost_per_hour",
        "report",
        "progress",
        "log_level",
        "ray",
        "engine",
        "sampling",
    }
)
"""Settings of a job that its rows do not depend on, and those that are looked at one by one."""

_MISSING = object()


def fingerprint(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """Plain data: version, settings as they were asked for, and the input files."""
    settings = {f.name: getattr(config, f.name) for f in fields(RunConfig) if f.name not in JOB_ONLY}
    settings["chat"] = bool(config.chat)
    engine = {f.name: getattr(config.engine, f.name) for f in fields(EngineConfig) if f.name not in SPEED_ONLY}
    if config.engine.calibration is not None:
        engine["calibration"] = hashlib.sha256(config.engine.calibration.encode()).hexdigest()
    named = {**settings, **engine, **config.sampling}
    named |= {f"contents of {name}": digest for name, value in named.items() if (digest := _contents(name, value))}
    named |= {
        f"contents of lora {name}": _weights(Path(folder)) for name, folder in config.engine.adapter_folders.items()
    }
    plain = {name: value for name, value in named.items() if value is not None}
    return {
        "version": __version__,
        "settings": orjson.loads(orjson.dumps(plain, default=_plain, option=orjson.OPT_NON_STR_KEYS)),
        "input": inputs.fingerprint(),
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


_FILES = frozenset({"few_shot", "chat_template", "json_schema", "grammar"})
"""Settings that may name a file, whose contents then count as well."""


def _contents(name: str, value: Any) -> str | None:
    if not isinstance(value, str) or not (name in _FILES or value.startswith("@")):
        return None
    path = Path(value.removeprefix("@"))
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def _weights(adapter: Path) -> str:
    """Digest of an adapter's files; empty where the engine will find none."""
    digest = hashlib.sha256()
    for path in sorted(adapter.glob("adapter_*")):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def difference(recorded: Mapping[str, Any], config: RunConfig, inputs: Inputs) -> str | None:
    """What differs from a recorded fingerprint, in words; None = nothing, or the last input has only grown."""
    now = fingerprint(config, inputs)
    if recorded.get("version") != now["version"]:
        return f"version is now {now['version']}, was {recorded.get('version')}"
    before, after = recorded.get("settings", {}), now["settings"]
    for name in sorted({*before, *after}):
        if before.get(name, _MISSING) != after.get(name, _MISSING):
            return f"{name} is now {_shown(after, name)}, was {_shown(before, name)}"
    return input_fingerprint.difference(recorded.get("input", []), inputs)


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name])[:80] if name in settings else "not set"
