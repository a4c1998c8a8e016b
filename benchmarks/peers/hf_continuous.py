"""transformers' continuous batching (`generate_batch`'s manager, one request at a time for its own output length)."""

from __future__ import annotations

import argparse

import protocol

NO_EOS = -1


def load(args: argparse.Namespace) -> protocol.Engine:
    """Load the model; the manager is made inside the timed call, as `generate_batch` does."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()
    settings = {"num_blocks": args.num_blocks, "page_size": args.page_size, "max_batch_tokens": args.max_batch_tokens}

    def generate(jobs: list[protocol.Job]) -> protocol.Outcome:
        prompts = tokenizer([job.prompt for job in jobs], add_special_tokens=False).input_ids
        greedy = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, max_new_tokens=max(j.max_tokens for j in jobs))
        outputs: list[list[int]] = []
        with (
            torch.inference_mode(),
            model.continuous_batching_context_manager(
                generation_config=greedy, continuous_batching_config=ContinuousBatchingConfig(**settings)
            ) as manager,
        ):
            # Neighbours in sorted order share prefixes: transformers' own `add_requests` sorts too.
            for ids, job in sorted(zip(prompts, jobs, strict=True), key=lambda pair: pair[0], reverse=True):
                manager.add_request(ids, max_new_tokens=job.max_tokens, eos_token_id=NO_EOS)
            while len(outputs) < len(jobs):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError(f"the generation thread ended after {len(outputs)} of {len(jobs)} rows")
                elif result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    outputs.append(result.generated_tokens)
        tokenizer.batch_decode(outputs)
        return protocol.Outcome(sum(map(len, prompts)), sum(map(len, outputs)))

    return protocol.Engine(transformers.__version__, dict(settings), generate)


if __name__ == "__main__":
    parser = protocol.parser()
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    protocol.serve(parser.parse_args(), load)
