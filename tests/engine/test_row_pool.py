"""Which engine takes which row: every row once, alike rows together, nobody idle while rows are left."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from paged_infer.engine.row_pool import RowPool
from paged_infer.types import Request, SamplingParams

PARAMS = SamplingParams()


def row(i, prefix=0, length=8, salt=""):
    return Request(i, [prefix] * 4 + [i] * (length - 4), PARAMS, salt=salt)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=80), st.booleans())
def test_every_row_is_taken_once_and_an_engine_only_goes_without_when_none_is_left(steps, grouped):
    """Steps are (engine, what it does): 0 = a row is added for it, 1 = it dies, 5 = a row is given up, else it takes
    one.
    """
    pool = RowPool(4 if grouped else None)
    waiting, taken, count = set(), defaultdict(list), 0
    for engine, action in steps:
        if action == 0:
            pool.add(row(count, prefix=engine))
            waiting.add(count)
            count += 1
        elif action == 1:
            pool.disown(engine)
            lost = taken.pop(engine, [])
            pool.put_back(lost)
            waiting |= {request.request_id for request in lost}
        elif action == 5:
            pool.remove(max(waiting, default=-1) - engine)
            waiting.discard(max(waiting, default=-1) - engine)
        else:
            request = pool.take(engine)
            assert (request is None) == (not waiting)
            if request is not None:
                waiting.remove(request.request_id)
                taken[engine].append(request)
        assert len(pool) == len(waiting)
    rest = [pool.take(0) for _ in range(len(waiting))]
    assert {request.request_id for request in rest} == waiting
    assert pool.take(0) is None


def test_rows_that_begin_alike_go_to_one_engine_as_long_as_the_others_have_some():
    pool = RowPool(4)
    for i in range(120):
        pool.add(row(i, prefix=i % 6))
    owners = defaultdict(Counter)
    for _ in range(40):
        for engine in (0, 1, 2):
            request = pool.take(engine)
            owners[request.prompt_token_ids[0]][engine] += 1
    assert all(len(counts) == 1 for counts in owners.values())
    for i in range(120, 126):  # and later ones follow
        pool.add(row(i, prefix=i % 6))
    for engine in (0, 1, 2):
        assert {pool.take(engine).prompt_token_ids[0] for _ in range(2)} == {p for p in owners if engine in owners[p]}


def test_one_beginning_for_all_is_shared_out_in_runs_of_neighbours():
    pool = RowPool(4)
    for i in range(100):
        pool.add(row(i))
    taken = {engine: [pool.take(engine).request_id for _ in range(10)] for engine in (0, 1)}
    assert taken[0] == [*range(10)]
    assert taken[1] == [*range(taken[1][0], taken[1][0] + 10)]
    assert taken[1][0] >= 50


def test_salts_and_adapters_part_what_begins_alike():
    pool = RowPool(4)
    for i in range(4):
        pool.add(row(i, salt="ab"[i % 2]))
    assert [pool.take(0).request_id, pool.take(1).request_id] == [0, 1]
    assert [pool.take(0).request_id, pool.take(1).request_id] == [2, 3]


def test_rows_that_were_lost_come_first():
    pool = RowPool(None)
    for i in range(5):
        pool.add(row(i))
    lost = [pool.take(1), pool.take(1)]
    pool.put_back(lost)
    assert pool.take(0).request_id == 0
