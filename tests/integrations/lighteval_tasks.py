"""Tasks for lighteval that need no hub: questions of `lm_eval_tasks`, out of the folder that OFFLINE_TASKS names."""

from __future__ import annotations

import os
from typing import Any

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

FOLDER = os.environ["OFFLINE_TASKS"]


def choosing(line: dict[str, Any], task_name: str) -> Doc:
    query = f"Question: {line['question']}\nAnswer:"
    return Doc(query=query, choices=[f" {choice}" for choice in line["choices"]], gold_index=line["label"])


def generating(line: dict[str, Any], task_name: str) -> Doc:
    return Doc(query=f"Question: {line['question']}\nAnswer:", choices=line["choices"], gold_index=line["label"])


def rolling(line: dict[str, Any], task_name: str) -> Doc:
    return Doc(query="", choices=[line["question"]], gold_index=0)


def _task(name: str, prompt: Any, metric: Any, **options: Any) -> LightevalTaskConfig:
    return LightevalTaskConfig(
        name=name,
        prompt_function=prompt,
        hf_repo=FOLDER,
        hf_subset="default",
        hf_avail_splits=["train", "test"],
        evaluation_splits=["test"],
        few_shots_split="train",
        few_shots_select="sequential",
        metrics=[metric],
        version=0,
        **options,
    )


TASKS_TABLE = [
    _task("offline_choosing", choosing, Metrics.loglikelihood_acc),
    _task("offline_generating", generating, Metrics.exact_match, generation_size=8, stop_sequence=["\n", ". "]),
    _task("offline_rolling", rolling, Metrics.word_perplexity),
]
