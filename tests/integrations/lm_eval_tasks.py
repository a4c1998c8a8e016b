"""Tasks for lm-evaluation-harness that need no hub: local YAML over real rows that Python packages ship.

The questions are the MMLU examples that the harness itself carries for its chain-of-thought variant (five for each of
57 subjects); texts are Python's own documentation; programs to complete are its source.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

CHOICES, ROLLING, GENERATING = "local_choices", "local_rolling", "local_generating"

_QUESTION = re.compile(
    r"Q: (?P<question>.+?)\n\(A\) (?P<A>.+?) \(B\) (?P<B>.+?) \(C\) (?P<C>.+?) \(D\) (?P<D>.+?)\n"
    r"A: .*?answer is \((?P<answer>[ABCD])\)",
    re.DOTALL,
)


def questions(num_choices: int = 4) -> list[dict[str, Any]]:
    """Multiple-choice questions, the short ones first; the right answer and the first wrong ones, in their order."""
    import lm_eval

    file = Path(lm_eval.__file__).parent / "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
    rows = []
    for text in json.loads(file.read_text(encoding="utf-8")).values():
        for example in text.split("\n\n"):
            found = _QUESTION.search(example)
            if found is None:
                continue
            right = found["answer"]
            kept = sorted([right, *[letter for letter in "ABCD" if letter != right][: num_choices - 1]])
            choices = [found[letter].strip() for letter in kept]
            rows.append({"question": found["question"].strip(), "choices": choices, "label": kept.index(right)})
    return sorted(rows, key=lambda row: len(row["question"]) + sum(map(len, row["choices"])))


def write_tasks(
    folder: Path, *, num_questions: int, num_texts: int, num_characters: int, num_choices: int = 4, **generating: Any
) -> Path:
    """The YAML files and the rows behind them. `generating` are generation settings of the third task."""
    rows = questions(num_choices)
    shots, asked = rows[:5], rows[5 : 5 + num_questions]
    assert len(asked) == num_questions
    names = sorted(pydoc_data.topics.topics, key=lambda name: len(pydoc_data.topics.topics[name]))
    texts = [{"text": pydoc_data.topics.topics[name][:num_characters]} for name in names[-num_texts:]]
    base: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
    few_shot = {"training_split": "train", "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
    tasks: dict[str, dict[str, Any]] = {
        CHOICES: few_shot
        | {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
        },
        ROLLING: {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        GENERATING: few_shot
        | {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {"until": ["\n\n", "Question:", ". "], "do_sample": False} | generating,
            "metric_list": [{"metric": "exact_match", "ignore_case": True}],
        },
    }
    for name, task in tasks.items():
        files = {"test": texts if name == ROLLING else asked}
        if "fewshot_split" in task:
            files["train"] = shots
        paths = {split: _write_rows(folder / f"{name}-{split}.jsonl", part) for split, part in files.items()}
        settings = {"task": name, **base, "dataset_kwargs": {"data_files": paths}, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
