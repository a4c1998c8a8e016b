"""lm-evaluation-harness with this engine beside its own `hf` model, in one run.

    python benchmarks/harness.py --dtype bfloat16 --questions 24 --batch-sizes 1 4 8 16

Five-shot questions whose choices are whole answers (MMLU examples that come with the harness, their worked solutions
left in): all prompts begin with the same solved examples, and the choices of a question share all but themselves. `hf`
runs at the best of the batch sizes, found on the first questions. The engine runs before and after it; the ratio is to
the slower of the two runs. Loading the models does not count. Results: `results/harness-DTYPE.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import report
import torch
import yaml
from model_folder import hf_folder

TASK = "long_choices"
_EXAMPLE = re.compile(
    r"Q: (?P<question>.+?)\n\(A\) (?P<A>.+?) \(B\) (?P<B>.+?) \(C\) (?P<C>.+?) \(D\) (?P<D>.+?)\n"
    r"A: (?P<solution>.*?answer is \((?P<answer>[ABCD])\)\.?)",
    re.DOTALL,
)


def write_task(folder: Path) -> None:
    """A multiple-choice task over the harness' own chain-of-thought examples."""
    import lm_eval

    source = Path(lm_eval.__file__).parent / "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
    rows = []
    for text in json.loads(source.read_text(encoding="utf-8")).values():
        for example in text.split("\n\n"):
            if (found := _EXAMPLE.search(example)) is not None:
                choices = [found[letter].strip() for letter in "ABCD"]
                row = {"question": found["question"].strip(), "choices": choices, "solution": found["solution"]}
                rows.append(row | {"label": "ABCD".index(found["answer"])})
    rows.sort(key=lambda row: len(row["question"]) + len(row["solution"]))
    middle = len(rows) // 2
    shots, asked = rows[middle : middle + 5], rows[middle + 5 :]
    solved = [row | {"question": f"{row['question']}\nSolution: {row['solution']}"} for row in shots]
    splits = {"train": solved, "test": asked}
    files = {}
    for split, part in splits.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / f"{TASK}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def requests(model: Any, folder: Path, questions: int) -> list[Any]:
    """What the harness asks a model: all (context, continuation) pairs of the task."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    task = manager.load([TASK])["tasks"][TASK]
    task.set_config(key="num_fewshot", value=5)
    task.build_all_requests(limit=questions, rank=0, world_size=1)
    return list(task.instances)


def seconds(run: Callable[[], object]) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--probe", type=int, default=4, help="questions on which the batch sizes are tried")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM

    from paged_infer.integrations.lm_eval import PagedInferLM

    torch.set_num_threads(arguments.threads)
    model = str(hf_folder(arguments.model, arguments.dtype))
    ours = PagedInferLM(model, dtype=arguments.dtype, device="cpu", threads=arguments.threads)
    theirs = HFLM(pretrained=model, dtype=arguments.dtype, device="cpu", batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder))
        asked = requests(ours, Path(folder), arguments.questions)
    per_question = len(asked) // arguments.questions
    few = asked[: arguments.probe * per_question]
    lengths = [len(ours.tok_encode(request.args[0])) for request in asked]
    print(f"{len(asked)} requests, contexts of {min(lengths)} to {max(lengths)} tokens", flush=True)

    tried = {}
    for size in arguments.batch_sizes if len(arguments.batch_sizes) > 1 else []:
        theirs.batch_size_per_gpu = size
        tried[size] = seconds(lambda: theirs.loglikelihood(few, disable_tqdm=True))
        print(f"hf, batch size {size}: {len(few) / tried[size]:.2f} requests/s", flush=True)
    theirs.batch_size_per_gpu = best = min(arguments.batch_sizes, key=lambda size: tried.get(size, 0.0))

    answers: dict[str, list[tuple[float, bool]]] = {}

    def run(name: str, model: Any) -> float:
        took = seconds(lambda: answers.update({name: model.loglikelihood(asked, disable_tqdm=True)}))
        print(f"{name}: {took:.1f} s, {len(asked) / took:.2f} requests/s", flush=True)
        return took

    ours.llm.score([[1]], [[2]])  # warm, and nothing of the task in the cache
    stats = ours.llm.engine.scheduler.stats
    before = stats.num_cached_tokens, stats.num_prompt_tokens
    first = run("paged-infer", ours)
    hits = (stats.num_cached_tokens - before[0]) / (stats.num_prompt_tokens - before[1])
    other = run("hf", theirs)
    ours.close()
    ours = PagedInferLM(model, dtype=arguments.dtype, device="cpu", threads=arguments.threads)  # with an empty cache
    again = run("paged-infer again", ours)
    worst = max(abs(a[0] - b[0]) for a, b in zip(answers["paged-infer"], answers["hf"], strict=True))
    figures: dict[str, Any] = {
        "machine": report.machine(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "requests": len(asked),
        "context_tokens": [min(lengths), max(lengths)],
        "hf_requests_per_second": {str(size): len(few) / took for size, took in tried.items()},
        "hf_batch_size": best,
        "hf_seconds": other,
        "seconds": [first, again],
        "ratio": other / max(first, again),
        "cache_hit_rate": hits,
        "largest_difference": worst,
        "equal_is_greedy": [a[1] for a in answers["paged-infer"]] == [b[1] for b in answers["hf"]],
    }
    print(
        f"{figures['ratio']:.1f} times as fast as hf at its best batch size {best}; {hits:.1%} of the prompt tokens "
        f"came from the cache; log-likelihoods differ by at most {worst:.1e}"
    )
    report.write(f"harness-{arguments.dtype}", figures, summary(figures))


def summary(figures: dict[str, Any]) -> str:
    """The figures in markdown."""
    first, again = figures["seconds"]
    runs = {"paged-infer": first, f"hf, batch size {figures['hf_batch_size']}": figures["hf_seconds"]}
    runs["paged-infer again"] = again
    shortest, longest = figures["context_tokens"]
    return "\n\n".join(
        [
            f"# lm-evaluation-harness: five-shot choices, {figures['dtype']}, {figures['threads']} threads",
            report.machine_line(),
            f"{figures['requests']} log-likelihoods of whole answers after contexts of {shortest} to {longest} tokens; "
            f"`hf` tried at the batch sizes {', '.join(figures['hf_requests_per_second'])}.",
            report.table(
                ["model", "seconds", "requests/s"],
                [[name, f"{took:.1f}", f"{figures['requests'] / took:.2f}"] for name, took in runs.items()],
            ),
            f"**{figures['ratio']:.1f}×** `hf`, by the slower of our runs. "
            f"{figures['cache_hit_rate']:.1%} of the prompt "
            "tokens came from the prefix cache. Log-likelihoods differ by at most "
            f"{figures['largest_difference']:.1e}; is_greedy is "
            f"{'equal throughout' if figures['equal_is_greedy'] else 'not always equal'}.",
        ]
    )


if __name__ == "__main__":
    main()
