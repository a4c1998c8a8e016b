"""Block ownership: arithmetic on small pools, and random operations against a naive model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_infer.engine.block_manager import BlockManager
from paged_infer.engine.prefix import Prefix, sha256
from paged_infer.engine.sequence import Sequence
from paged_infer.types import Request, SamplingParams

_ids = iter(range(10**9))


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    seq_id = next(_ids)
    return Sequence(seq_id, Request(seq_id, tokens, SamplingParams(), salt=salt), max_output_tokens=1000)


def compute(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> list[int] | None:
    """What a scheduler does with a sequence: allocate, advance, publish. Default: all known tokens."""
    num_tokens = len(seq.token_ids) - seq.num_computed_tokens if num_tokens is None else num_tokens
    new = blocks.allocate_slots(seq, num_tokens)
    if new is not None:
        seq.num_computed_tokens += num_tokens
        blocks.publish(seq)
    return new


def cached_tokens(blocks: BlockManager, tokens: list[int], salt: str = "") -> int:
    """How much of a prompt the cache holds; leaves nothing behind but the use it counts as."""
    seq = sequence(tokens, salt)
    cached = blocks.match_prefix(seq)
    blocks.free(seq)
    return cached


def run_and_free(blocks: BlockManager, tokens: list[int], salt: str = "") -> None:
    seq = sequence(tokens, salt)
    blocks.match_prefix(seq)
    assert compute(blocks, seq) is not None
    blocks.free(seq)


@pytest.mark.parametrize("length", range(1, 18))
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_blocks_of_a_prompt(length: int, block_size: int) -> None:
    blocks = BlockManager(40, block_size)
    seq = sequence([5] * length)
    expected = (length + block_size - 1) // block_size
    assert blocks.num_new_blocks(seq, length) == expected
    assert len(compute(blocks, seq) or []) == expected
    assert blocks.num_free_blocks == 40 - expected
    for i in range(20):  # one decode after the other
        seq.token_ids.append(i)
        new = compute(blocks, seq)
        assert len(new or []) == ((length + i) % block_size == 0)
        blocks.check_invariants([seq])
    blocks.free(seq)
    blocks.check_invariants([])
    assert blocks.num_free_blocks == 40


def test_all_or_nothing() -> None:
    blocks = BlockManager(4, 4)
    seq = sequence(list(range(40)))
    assert compute(blocks, seq, 6) == [0, 1]
    assert blocks.allocate_slots(seq, 11) is None
    assert (seq.block_table, seq.num_computed_tokens, blocks.num_free_blocks) == ([0, 1], 6, 2)
    assert blocks.allocate_slots(seq, 2) == []
    assert compute(blocks, seq, 10) == [2, 3]
    assert blocks.allocate_slots(seq, 1) is None
    blocks.check_invariants([seq])


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    blocks = BlockManager(8, 16)
    tokens = list(range(length))
    run_and_free(blocks, tokens)
    assert cached_tokens(blocks, tokens) == cached
    assert cached_tokens(blocks, [*tokens, 1]) == length // 16 * 16
    off = BlockManager(8, 16, prefix_caching=False)
    run_and_free(off, tokens)
    assert cached_tokens(off, tokens) == 0


def test_hits_end_where_the_prompts_part() -> None:
    blocks = BlockManager(16, 4)
    run_and_free(blocks, list(range(20)))
    for same in range(20):
        prompt = [*range(same), *range(100, 120)]
        assert cached_tokens(blocks, prompt) == same // 4 * 4


def test_the_tail_is_evicted_first_and_the_least_recently_used() -> None:
    blocks = BlockManager(6, 4)
    a, b = list(range(12)), list(range(50, 62))
    run_and_free(blocks, a)
    run_and_free(blocks, b)
    run_and_free(blocks, [99])  # takes the least recently used: a's last block
    assert cached_tokens(blocks, [*b, 0]) == 12
    assert cached_tokens(blocks, [*a, 0]) == 8
    run_and_free(blocks, [98])  # the block that held 99 was not worth keeping
    assert cached_tokens(blocks, [*a, 0]) == 8
    assert cached_tokens(blocks, [*b, 0]) == 12
    run_and_free(blocks, [*range(200, 208)])  # that one and one more: b was used last, so it is a's
    assert cached_tokens(blocks, [*b, 0]) == 12
    assert cached_tokens(blocks, [*a, 0]) == 4


def test_a_hit_is_pinned_before_anything_else_allocates() -> None:
    blocks = BlockManager(4, 4)
    shared = [1, 2, 3, 4]
    run_and_free(blocks, shared)
    a, b = sequence([*shared, 5]), sequence(list(range(20, 36)))
    assert blocks.match_prefix(a) == 4
    assert compute(blocks, b) is None  # 4 blocks, but one is a's now
    assert blocks.num_free_blocks == 3
    assert compute(blocks, b, 12) is not None
    assert not set(a.block_table) & set(b.block_table)
    blocks.check_invariants([a, b])
    assert compute(blocks, a) is None


def test_a_recycled_block_is_not_served_as_what_it_was() -> None:
    blocks = BlockManager(8, 4)
    first = list(range(9))
    run_and_free(blocks, first)
    assert cached_tokens(blocks, first) == 8
    for i in range(1, 30):
        run_and_free(blocks, list(range(100 * i, 100 * i + 9)))
        blocks.check_invariants([])
    assert cached_tokens(blocks, first) == 0
    assert blocks.num_free_blocks == 8


@pytest.mark.parametrize("digest", [sha256, lambda data: b"", lambda data: sha256(data)[:0] + bytes([len(data) % 2])])
def test_the_key_is_the_whole_history(digest: Callable[[bytes], bytes]) -> None:
    """Also where all digests collide: then fewer blocks may be found, never wrong ones."""
    strong = digest is sha256
    blocks = BlockManager(32, 4, digest=digest)
    run_and_free(blocks, [65, 1, 2, 3, 4, 5, 6, 7, 8])
    assert cached_tokens(blocks, [321, 1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert cached_tokens(blocks, [65 + 2**16, 1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert cached_tokens(blocks, [65, 1, 2, 3, 4, 5, 6, 7, 8]) in ((8,) if strong else (4, 8))
    run_and_free(blocks, [9, 9, 9, 9, 4, 5, 6, 7, 8])  # the same second block after another first
    assert cached_tokens(blocks, [8, 8, 8, 8, 4, 5, 6, 7, 8]) == 0
    assert cached_tokens(blocks, [4, 5, 6, 7, 8]) == 0
    assert cached_tokens(blocks, [65, 1, 2, 3, 4, 5, 6, 7, 8], salt="x") == 0
    run_and_free(blocks, [65, 1, 2, 3, 4, 5, 6, 7, 8], salt="x")
    if strong:
        assert cached_tokens(blocks, [65, 1, 2, 3, 4, 5, 6, 7, 8], salt="x") == 8
        assert cached_tokens(blocks, [9, 9, 9, 9, 4, 5, 6, 7, 8]) == 8
    assert cached_tokens(blocks, [65, 1, 2, 3, 4, 5, 6, 7, 8], salt="y") == 0
    blocks.check_invariants([])


def test_a_later_block_under_a_colliding_first_is_no_hit() -> None:
    """Two first blocks share a digest, the second blocks are equal: only a look at the whole chain tells them apart."""

    root = Prefix.root(sha256, salt="", adapter="").digest

    def digest(data: bytes) -> bytes:
        return b"first" if data.startswith(root) else sha256(data)

    blocks = BlockManager(8, 4, digest=digest)
    a, b = [1, 1, 1, 1, 7, 7, 7, 7, 0], [2, 2, 2, 2, 7, 7, 7, 7, 0]
    run_and_free(blocks, a)
    assert cached_tokens(blocks, a) == 8
    seq = sequence(b)
    assert blocks.match_prefix(seq) == 0
    compute(blocks, seq)
    blocks.check_invariants([seq])
    # a's first block stays, its second goes; then b's second block is the cached one behind a's first
    other = BlockManager(8, 4, digest=digest)
    keeper = sequence(a[:5])
    compute(other, keeper)
    late = sequence(b)
    compute(other, late)
    assert cached_tokens(other, b) == 0
    assert cached_tokens(other, a) == 4
    other.check_invariants([keeper, late])


def test_scopes_are_typed() -> None:
    roots = [
        Prefix.root(sha256, **scope)
        for scope in (
            {"salt": ""},
            {"salt": "x"},
            {"adapter": "x"},
            {"salt": "x", "adapter": ""},
            {"salt": "", "adapter": "x"},
            {"salt": "x7:adapter1:x"},
            {"salt": "x", "adapter": "x"},
            {"salt": "\ud800"},
        )
    ]
    assert len({root.digest for root in roots}) == len(roots)
    assert not any(a.same(b) for a in roots for b in roots if a is not b)
    assert Prefix.root(sha256, salt="x", adapter="y").same(Prefix.root(sha256, adapter="y", salt="x"))


def test_long_chains_compare_without_recursion() -> None:
    a, b = Prefix.root(sha256), Prefix.root(sha256)
    for i in range(20_000):
        a, b = a.extend(sha256, b"%d" % i), b.extend(sha256, b"%d" % i)
    assert a.same(b)
    assert not a.same(b.extend(sha256, b""))
    del a, b


def test_pending_tokens_are_published_when_they_are_known() -> None:
    blocks = BlockManager(8, 4)
    seq = sequence([1, 2, 3])
    compute(blocks, seq)
    seq.num_pending = 1
    blocks.allocate_slots(seq, 1)
    seq.num_computed_tokens += 1
    blocks.publish(seq)
    assert cached_tokens(blocks, [1, 2, 3, 4, 5]) == 0
    seq.num_pending = 0
    seq.token_ids.append(4)
    blocks.publish(seq)
    assert cached_tokens(blocks, [1, 2, 3, 4, 5]) == 4
    blocks.check_invariants([seq])


def test_the_same_content_is_cached_once() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence(list(range(9))), sequence(list(range(9)))
    compute(blocks, a)
    compute(blocks, b)  # without looking: as though both had been computed at once
    blocks.check_invariants([a, b])
    c = sequence(list(range(9)))
    assert blocks.match_prefix(c) == 8
    assert c.block_table == a.block_table[:2]
    for seq in (a, b, c):
        blocks.free(seq)
    blocks.check_invariants([])
    assert blocks.num_free_blocks == 8


@pytest.mark.parametrize("length", [5, 7, 8, 12])
def test_fork_and_copy_on_write(length: int) -> None:
    blocks = BlockManager(8, 4)
    parent = sequence(list(range(length)))
    compute(blocks, parent)
    children = [sequence(list(range(length))) for _ in range(2)]
    for child in children:
        blocks.fork(parent, child)
    family = [parent, *children]
    before = list(parent.block_table)
    blocks.check_invariants(family)
    assert blocks.num_free_blocks == 8 - len(before)
    assert not blocks.owns_blocks(parent)
    assert blocks.num_shared_tokens(parent) == length
    for i, seq in enumerate(family):
        seq.token_ids.append(100 + i)
        expected = int(i < 2 or length % 4 == 0)  # the last of the three has the old block to itself
        assert blocks.num_new_blocks(seq, 1) == expected
        new = compute(blocks, seq)
        copies = blocks.take_copies()
        if length % 4 == 0:
            assert seq.block_table == [*before, *(new or [])]
            assert copies == []
        elif i < 2:
            assert new is not None
            assert copies == [(before[-1], new[0])]
            assert seq.block_table == [*before[:-1], new[0]]
        else:
            assert (new, copies, seq.block_table) == ([], [], before)
        blocks.check_invariants(family)
    for seq in family:
        blocks.free(seq)
    blocks.check_invariants([])


def test_copy_on_write_without_a_free_block() -> None:
    blocks = BlockManager(2, 4)
    parent = sequence(list(range(6)))
    compute(blocks, parent)
    child = sequence(list(range(6)))
    blocks.fork(parent, child)
    assert blocks.allocate_slots(child, 1) is None
    assert blocks.take_copies() == []
    assert child.block_table == parent.block_table
    blocks.free(parent)
    assert blocks.allocate_slots(child, 1) == []


def test_a_copy_can_bring_further_blocks() -> None:
    blocks = BlockManager(8, 4)
    parent = sequence(list(range(6)))
    compute(blocks, parent)
    child = sequence(list(range(6)))
    blocks.fork(parent, child)
    child.token_ids += [9] * 7
    assert compute(blocks, child) == [2, 3, 4]  # 13 tokens: blocks 0 | 2 (copy of 1) | 3 | 4
    assert child.block_table == [0, 2, 3, 4]
    assert blocks.take_copies() == [(1, 2)]
    blocks.check_invariants([parent, child])


@pytest.mark.parametrize("damage", ["leak", "twice", "stale", "shared tail"])
def test_the_invariants_see_damage(damage: str) -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence(list(range(9))), sequence(list(range(20, 29)))
    compute(blocks, a)
    compute(blocks, b)
    blocks.check_invariants([a, b])
    if damage == "leak":
        b.block_table, b.num_computed_tokens = [], 0
        b.num_published_blocks = 0
    elif damage == "twice":
        b.block_table[2] = a.block_table[2]
    elif damage == "stale":
        a.token_ids[2] = 77
        a.prefixes.clear()
    else:
        b.num_computed_tokens = 7
    with pytest.raises(AssertionError):
        blocks.check_invariants([a, b])


class NaiveBlocks:
    """The same rules over plain lists and dicts: the free list is a list, a cache key is the token history itself."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.free = list(range(num_blocks))
        self.users: dict[int, int] = {}
        self.content: dict[tuple[str, tuple[int, ...]], int] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.offered: dict[int, int] = {}

    def key(self, seq: Sequence, i: int) -> tuple[str, tuple[int, ...]]:
        return seq.request.salt, tuple(seq.token_ids[: (i + 1) * self.size])

    def match(self, seq: Sequence) -> int:
        table: list[int] = []
        while (len(table) + 1) * self.size < len(seq.token_ids) and self.key(seq, len(table)) in self.content:
            block = self.content[self.key(seq, len(table))]
            if block in self.free:
                self.free.remove(block)
            self.users[block] = self.users.get(block, 0) + 1
            table.append(block)
        self.tables[seq.seq_id] = table
        self.computed[seq.seq_id] = len(table) * self.size
        self.offered[seq.seq_id] = len(table)
        return len(table) * self.size

    def compute(self, seq: Sequence, n: int) -> tuple[list[int], list[tuple[int, int]]] | None:
        table, start = self.tables[seq.seq_id], self.computed[seq.seq_id]
        copy = start % self.size != 0 and self.users[table[-1]] > 1
        needed = copy + sum(1 for p in range(start, start + n) if p // self.size >= len(table) and p % self.size == 0)
        if needed > len(self.free):
            return None
        new = self.free[:needed]
        del self.free[:needed]
        self.content = {key: block for key, block in self.content.items() if block not in new}
        copies = []
        if copy:
            old = table.pop()
            self.users[old] -= 1
            copies.append((old, new[0]))
        for block in new:
            self.users[block] = 1
            table.append(block)
        self.computed[seq.seq_id] = start + n
        for i in range(self.offered[seq.seq_id], (start + n) // self.size):
            self.content.setdefault(self.key(seq, i), table[i])
            self.offered[seq.seq_id] = i + 1
        return new, copies

    def release(self, seq: Sequence) -> None:
        for block in reversed(self.tables.pop(seq.seq_id)):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self.content.values():
                    self.free.append(block)
                else:
                    self.free.insert(0, block)

    def fork(self, seq: Sequence, child: Sequence) -> None:
        self.tables[child.seq_id] = list(self.tables[seq.seq_id])
        self.computed[child.seq_id] = self.computed[seq.seq_id]
        self.offered[child.seq_id] = self.offered[seq.seq_id]
        for block in self.tables[seq.seq_id]:
            self.users[block] += 1


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12), size=st.sampled_from([1, 2, 3, 4, 16]))
def test_random_operations_against_the_naive_model(seed: int, num_blocks: int, size: int) -> None:
    """Same block ids, same hits, same copies, operation by operation."""
    r = random.Random(seed)
    blocks, naive = BlockManager(num_blocks, size), NaiveBlocks(num_blocks, size)
    stems = [[r.randrange(3) for _ in range(3 * size)] for _ in range(2)]
    alive: list[Sequence] = []
    for _ in range(60):
        action = r.choice(["new", "new", "grow", "grow", "grow", "free", "fork"])
        if action == "new" and len(alive) < 6:
            prompt = r.choice(stems)[: r.randrange(3 * size + 1)] + [
                r.randrange(3) for _ in range(r.randrange(1, size + 2))
            ]
            seq = sequence(prompt, r.choice(["", "", "s"]))
            assert blocks.match_prefix(seq) == naive.match(seq)
            alive.append(seq)
        elif action == "grow" and alive:
            seq = r.choice(alive)
            room = len(seq.token_ids) - seq.num_computed_tokens
            if room == 0:
                seq.token_ids.append(r.randrange(3))
                room = 1
            n = r.randrange(1, room + 1)
            expected = naive.compute(seq, n)
            new = compute(blocks, seq, n)
            assert (None if new is None else (new, blocks.take_copies())) == expected
        elif action == "free" and alive:
            seq = alive.pop(r.randrange(len(alive)))
            naive.release(seq)
            blocks.free(seq)
        elif action == "fork" and alive:
            seq = r.choice(alive)
            child = sequence(list(seq.request.prompt_token_ids), seq.request.salt)
            child.token_ids = seq.token_ids.copy()
            naive.fork(seq, child)
            blocks.fork(seq, child)
            alive.append(child)
        assert [seq.block_table for seq in alive] == [naive.tables[seq.seq_id] for seq in alive]
        assert blocks.num_free_blocks == len(naive.free)
        blocks.check_invariants(alive)
    for seq in alive:
        blocks.free(seq)
    blocks.check_invariants([])
    assert blocks.num_free_blocks == num_blocks
