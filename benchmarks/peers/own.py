"""paged-infer through its Python API. `--engine KEY=VALUE` sets any engine option."""

from __future__ import annotations

import argparse
import importlib.metadata

import protocol
import yaml


def load(args: argparse.Namespace) -> protocol.Engine:
    """Load the model with the engine's defaults but for dtype, threads and `--engine`."""
    from paged_infer.llm import LLM
    from paged_infer.types import SamplingParams

    options = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in args.engine)}
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, kv_cache_memory=args.kv_gib << 30, **options)

    def generate(jobs: list[protocol.Job]) -> protocol.Outcome:
        params = [SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
        completions = llm.generate([job.prompt for job in jobs], params)
        failed = [c for c in completions if c.finish_reason == "error"]
        if failed:
            raise RuntimeError(f"{len(failed)} rows failed, the first with: {failed[0].error}")
        return protocol.Outcome(sum(c.prompt_tokens for c in completions), sum(len(c.token_ids) for c in completions))

    return protocol.Engine(importlib.metadata.version("paged-infer"), options, generate)


if __name__ == "__main__":
    parser = protocol.parser()
    parser.add_argument("--engine", action="append", default=[], metavar="KEY=VALUE")
    protocol.serve(parser.parse_args(), load)
