"""The step of a Ray Data pipeline, called as Ray calls it: batches of columns, several at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from paged_infer.config import ConfigError
from paged_infer.integrations import ray_data
from paged_infer.integrations.ray_data import PagedInfer
from tests.job.fake_engine import FakeEngine


class Fake(PagedInfer):
    engine = None

    @staticmethod
    def _build(config):
        Fake.engine = FakeEngine(rate=8, max_model_len=100)
        return Fake.engine


def answers(step, *batches):
    async def one(batch):
        return [result async for result in step(batch)]

    async def work():
        return await asyncio.gather(*map(one, batches))

    return [result for [result] in asyncio.run(work())]


def test_batches_keep_their_rows_and_columns_however_they_share_the_engine():
    step = Fake(max_tokens=5, template="{{ q }}!")
    batches = [{"q": np.array([f"batch {b} row {i}" for i in range(40)]), "n": np.arange(40) + b} for b in range(3)]
    for b, result in enumerate(answers(step, *batches)):
        assert result["text"].tolist() == [f"batch {b} row {i}!"[:5] for i in range(40)]
        assert result["n"].tolist() == [*range(b, 40 + b)]
        assert [len(ids) for ids in result["token_ids"]] == [5] * 40
        assert result["error"].tolist() == [None] * 40
    assert Fake.engine.steps <= 120 // 8 + 8  # together, not one batch after the other


def test_a_bad_row_stays_in_place_and_messages_are_chats():
    step = Fake(max_tokens=50)
    messages = np.empty(3, object)
    messages[:] = [
        [{"role": "user", "content": "hi"}],
        [{"role": "wizard", "content": "x"}],
        np.array([{"role": "user", "content": "x" * 200}]),
    ]
    [result] = answers(step, {"messages": messages})
    assert result["error_type"].tolist() == [None, "chat_template", "prompt_too_long"]
    assert result["text"].tolist() == ["<user>hi", "", ""]


def test_noise_follows_the_row_column_not_the_batch():
    keys = []
    for order in (np.arange(6), np.arange(6)[::-1]):
        step = Fake(row_column="i", seed=3, temperature=1.0)
        answers(step, {"prompt": np.array([f"p{i}" for i in order]), "i": order})
        keys.append({bytes(r.prompt_token_ids): r.noise_key for r in Fake.engine.requests.values()})
    assert keys[0] == keys[1]
    assert len(set(keys[0].values())) == 6


def test_enough_rows_are_in_flight():
    assert ray_data._concurrency(64, 64) * 64 >= 3 * 64
    assert ray_data._concurrency(256, 100) * 100 >= 4 * 256


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="max_token"):
        Fake(max_token=3)
