"""`paged-infer doctor`: what this machine has, and what would make it faster."""

from __future__ import annotations

import platform
import sys

import typer


def doctor() -> None:
    """Show versions, processor, compiler, kernels, caches and whether the demo model is there."""
    import torch
    from paged_kernels import dispatch
    from rich.console import Console
    from rich.table import Table

    from paged_infer import __version__
    from paged_infer.config import DEMO_MODEL, ConfigError, cache_dir
    from paged_infer.engine.memory import available_memory
    from paged_infer.models.source import resolve_model

    table = Table(title="paged-infer doctor", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("paged-infer", __version__)
    table.add_row("python", f"{platform.python_version()} ({sys.executable})")
    for package in ("torch", "transformers", "tokenizers", "pyarrow", "triton"):
        table.add_row(package, _version(package))
    table.add_row("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none that this torch can use")
    table.add_row("memory", f"{available_memory() / 2**30:.1f} GiB free")
    for name, value in dispatch.describe(cache_dir()).items():
        table.add_row(name, value)
    table.add_row("cache folder", str(cache_dir()))
    try:
        resolve_model(DEMO_MODEL)
        demo = "installed"
    except ConfigError as error:
        demo = str(error)
    table.add_row("demo model", demo)
    Console().print(table)
    if demo != "installed":
        raise typer.Exit(1)


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
