"""Results in the shape that OpenAI's batch interface answers in: a line for each input row, its samples as choices."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import orjson
import pyarrow as pa

from paged_infer.io.schema import read_settings

URL_COLUMN = "url"
"""Kept input column that says which interface a row was meant for."""


class OpenAILines:
    """A sink of result batches whose rows are complete and in order.

    Args:
        token_text: the text of a token id.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, token_text: Callable[[int], str]) -> None:
        self._file = file
        self._token_text = token_text
        self._model = read_settings(schema).get("model", {}).get("name", "")
        self._created = int(time.time())
        self._held: list[dict[str, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            if self._held and self._held[0]["row"] != row["row"]:
                self._write_row()
            self._held.append(row)

    def close(self) -> None:
        if self._held:
            self._write_row()

    def _write_row(self) -> None:
        samples, self._held = self._held, []
        first = samples[0]
        failed = next((sample for sample in samples if sample["error"] is not None), None)
        name = f"batch_req_{first['row']}"
        response: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        if failed is not None:
            error = {"code": failed["error_type"], "message": failed["error"]}
        else:
            response = {"status_code": 200, "request_id": name, "body": self._body(samples)}
        line = {"id": name, "custom_id": first["id"], "response": response, "error": error}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def _body(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        first = samples[0]
        url = orjson.loads(first.get(URL_COLUMN) or '""')
        chat = not (isinstance(url, str) and url.endswith("/completions") and not url.endswith("/chat/completions"))
        output = sum(sample["output_tokens"] for sample in samples)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{first['row']}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(i, sample, chat) for i, sample in enumerate(samples)],
            "usage": {
                "prompt_tokens": first["prompt_tokens"],
                "completion_tokens": output,
                "total_tokens": first["prompt_tokens"] + output,
                "prompt_tokens_details": {"cached_tokens": first["cached_tokens"]},
            },
        }

    def _choice(self, index: int, sample: dict[str, Any], chat: bool) -> dict[str, Any]:
        logprobs = sample["logprobs"]
        content: Any
        if chat:
            content = {"message": {"role": "assistant", "content": sample["text"]}}
            if logprobs is not None:
                logprobs = {"content": [*self._chat_logprobs(logprobs)]}
        else:
            content = {"text": sample["text"]}
            if logprobs is not None:
                logprobs = self._text_logprobs(logprobs)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": sample["finish_reason"]}

    def _chat_logprobs(self, entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for entry in entries:
            yield {**self._token(entry), "top_logprobs": [self._token(other) for other in entry["top"]]}

    def _token(self, entry: dict[str, Any]) -> dict[str, Any]:
        text = self._token_text(entry["token_id"])
        return {"token": text, "bytes": list(text.encode()), "logprob": _finite(entry["logprob"])}

    def _text_logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = [self._token_text(entry["token_id"]) for entry in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry["logprob"]) for entry in entries],
            "top_logprobs": [
                {self._token_text(other["token_id"]): _finite(other["logprob"]) for other in entry["top"]}
                for entry in entries
            ],
            "text_offset": [*itertools.accumulate(map(len, tokens), initial=0)][:-1],
        }


def _finite(logprob: float) -> float:
    """OpenAI's own stand-in for tokens that cannot be: JSON has no infinity."""
    return logprob if math.isfinite(logprob) else -9999.0
