"""The command `paged-infer`: parse, make a config, call. One file a command; nothing heavy is imported for `--help`."""

from paged_infer.cli.app import main

__all__ = ["main"]
