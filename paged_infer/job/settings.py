"""What a results file says about how it was made."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from paged_infer import __version__
from paged_infer.config import ConfigError
from paged_infer.io.ledger import Ledger
from paged_infer.io.schema import read_settings
from paged_infer.io.stream import stream_schema
from paged_infer.io.targets import PARTIAL_SUFFIX, make_target
from paged_infer.job.config import RunConfig
from paged_infer.types import SamplingParams

if TYPE_CHECKING:
    from paged_infer.engine.interface import AnyEngine

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyarrow")


def settings_of(config: RunConfig, engine: AnyEngine, sampling: SamplingParams, ledger: Ledger) -> dict[str, Any]:
    """Plain data for the results' metadata: settings as they took effect, model, versions, fingerprint.

    Args:
        sampling: what rows get that set nothing of their own.
    """
    columns = {name: getattr(config, name) for name in ("prompt_column", "messages_column", "id_column")}
    settings = {
        "version": __version__,
        "versions": versions(),
        "inputs": list(config.inputs),
        "columns": columns,
        "template": config.template,
        "chat": bool(config.chat) or config.system is not None,
        "system": config.system,
        "few_shot": config.few_shot,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        "split_special_tokens": config.split_special_tokens,
        "too_long": config.too_long,
        "sampling": asdict(sampling),
        "engine": {**asdict(replace(config.engine, seed=ledger.run_seed)), **engine.description.get("engine", {})},
        "model": engine.description.get("model", {}),
        "run_seed": ledger.run_seed,
        "fingerprint": ledger.fingerprint,
    }
    return orjson.loads(orjson.dumps(settings, default=str, option=orjson.OPT_NON_STR_KEYS))


def versions() -> dict[str, str]:
    """Of Python and the packages that answers may depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_model(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ConfigError` when the rows that are there were computed by other weights or in another precision."""
    for part, names in (("model", None), ("engine", ("dtype",))):
        before, after = recorded.get(part, {}), now.get(part, {})
        for name in names or sorted({*before, *after}):
            if before.get(name) != after.get(name):
                raise ConfigError(
                    f"the rows that are there were made with other settings ({part} {name} is now {after.get(name)}, "
                    f"was {before.get(name)}): choose another -o, or --overwrite to start again"
                )


def settings_in(path: Path) -> dict[str, Any]:
    """The settings in the metadata of results, unfinished ones too; empty where there are none."""
    if path.suffix == PARTIAL_SUFFIX:
        schema = stream_schema(path)
        return {} if schema is None else read_settings(schema)
    return make_target(path).settings()


def read_report(path: Path) -> dict[str, Any]:
    """A report that `run --report` wrote. Raises `ConfigError`."""
    try:
        report = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"report {path} cannot be read: {error}") from None
    if not isinstance(report, dict) or not {"rates", "seconds", "run", "row_seconds"} <= report.keys():
        raise ConfigError(f"{path} is no report of a run")
    return report
