"""vLLM's CPU build, offline `LLM.generate`. `--eager` skips its torch.compile (about a minute of start)."""

from __future__ import annotations

import argparse
import glob
import os
import sys

import protocol

TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"
"""vLLM's CPU guide asks for it (Debian: libtcmalloc-minimal4); without it the engine is slower."""


def preload_tcmalloc() -> None:
    """Start this process again with tcmalloc preloaded, where it is installed."""
    found = glob.glob(TCMALLOC)
    if found and "tcmalloc" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = found[0]
        os.execv(sys.executable, [sys.executable, *sys.argv])


def load(args: argparse.Namespace) -> protocol.Engine:
    """Load in this process, with room for the whole workload at once."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(args.kv_gib),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{args.threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    import vllm

    llm = vllm.LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=256,
        enforce_eager=args.eager,
        enable_prefix_caching=True,
        seed=0,
    )

    def generate(jobs: list[protocol.Job]) -> protocol.Outcome:
        params = [vllm.SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
        outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
        return protocol.Outcome(
            sum(len(o.prompt_token_ids) for o in outputs), sum(len(o.outputs[0].token_ids) for o in outputs)
        )

    return protocol.Engine(vllm.__version__, {"compiled": not args.eager, "kv_gib": args.kv_gib}, generate)


if __name__ == "__main__":
    preload_tcmalloc()
    parser = protocol.parser()
    parser.add_argument("--eager", action="store_true")
    protocol.serve(parser.parse_args(), load)
