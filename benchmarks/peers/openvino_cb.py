"""openvino-genai's ContinuousBatchingPipeline; `--model` is the exported OpenVINO folder."""

from __future__ import annotations

import argparse

import protocol


def load(args: argparse.Namespace) -> protocol.Engine:
    """Load with prefix caching and chunked prefill; the precision hint is a hint: the CPU may run float32 instead."""
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = args.max_num_batched_tokens
    scheduler.max_num_seqs = 256
    scheduler.cache_size = args.kv_gib
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": args.threads,
        "INFERENCE_PRECISION_HINT": "f32" if args.dtype == "float32" else "bf16",
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
    tokenizer = pipeline.get_tokenizer()

    def options(max_tokens: int) -> openvino_genai.GenerationConfig:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config

    def generate(jobs: list[protocol.Job]) -> protocol.Outcome:
        ids = [tokenizer.encode(job.prompt, add_special_tokens=False).input_ids for job in jobs]
        outputs = [o.m_generation_ids[0] for o in pipeline.generate(ids, [options(job.max_tokens) for job in jobs])]
        for output in outputs:
            tokenizer.decode(output)
        return protocol.Outcome(sum(i.shape[1] for i in ids), sum(map(len, outputs)))

    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    runs_bf16 = args.dtype == "bfloat16" and "BF16" in capabilities
    settings = {"runs": "bfloat16" if runs_bf16 else "float32", "max_num_batched_tokens": args.max_num_batched_tokens}
    return protocol.Engine(openvino_genai.__version__, settings, generate)


if __name__ == "__main__":
    parser = protocol.parser()
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    protocol.serve(parser.parse_args(), load)
