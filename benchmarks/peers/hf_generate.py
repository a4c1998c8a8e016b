"""transformers `generate` over padded batches, sorted by output length.

Kinder than most scripts: it knows the output lengths beforehand, so a batch wastes little on its longest row.
`--batch-size 1` and `--order input` make it the naive pipeline.
"""

from __future__ import annotations

import argparse

import protocol


def load(args: argparse.Namespace) -> protocol.Engine:
    """Load with SDPA attention, the fastest that transformers has on a CPU."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token

    def generate_batch(jobs: list[protocol.Job]) -> tuple[int, int]:
        batch = tokenizer([job.prompt for job in jobs], return_tensors="pt", padding=True, add_special_tokens=False)
        longest = max(job.max_tokens for job in jobs)
        with torch.inference_mode():
            out = model.generate(
                **batch,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=None,
            )
        rows = out[:, batch.input_ids.shape[1] :].tolist()
        tokenizer.batch_decode([row[: job.max_tokens] for row, job in zip(rows, jobs, strict=True)])
        return int(batch.attention_mask.sum()), sum(job.max_tokens for job in jobs)

    def generate(jobs: list[protocol.Job]) -> protocol.Outcome:
        if args.order == "length":
            jobs = sorted(jobs, key=lambda job: (job.max_tokens, len(job.prompt)))
        counts = [generate_batch(jobs[i : i + args.batch_size]) for i in range(0, len(jobs), args.batch_size)]
        return protocol.Outcome(sum(p for p, _ in counts), sum(g for _, g in counts))

    settings = {"batch_size": args.batch_size, "order": args.order}
    return protocol.Engine(transformers.__version__, settings, generate)


if __name__ == "__main__":
    parser = protocol.parser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--order", choices=("length", "input"), default="length")
    protocol.serve(parser.parse_args(), load)
