"""Who owns which KV block: allocation, sharing, the prefix cache and its eviction. Pure Python.

Owns the state of every block and the `block_table` of every sequence. Knows nothing of budgets, queues or devices: it
is told about tokens and answers with block ids.

Every block is in exactly one place. `ref_count` > 0: that many sequences have it in their table. `ref_count` == 0: it
is in the free queue, whose order is the order of eviction; a free block whose content is still in the prefix cache
comes back to life by a hit, until the queue hands it out for other content.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from paged_infer.engine.batch import LogprobColumns
from paged_infer.engine.prefix import Digest, Prefix, sha256
from paged_infer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockScores:
    """Log-probabilities of the tokens in a block, the very first of a prompt left out, with the `k` likeliest of each,
    and the hidden state (float32, as bytes) after its last token.
    """

    columns: LogprobColumns
    k: int
    hidden: bytes


class Block:
    """`prefix` is set while the prefix cache points at this block; `before` and `after` while it is free. `scores` are
    those of `prefix`, if any row asked for them.
    """

    __slots__ = ("after", "before", "block_id", "prefix", "ref_count", "scores")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.prefix: Prefix | None = None
        self.scores: BlockScores | None = None
        self.before: Block | None = None
        self.after: Block | None = None


class FreeQueue:
    """Doubly linked through the blocks themselves: next to be handed out first, O(1) removal from the middle."""

    __slots__ = ("_end", "_length")

    def __init__(self) -> None:
        self._end = Block(-1)  # one sentinel closes the ring: after = first, before = last
        self._end.before = self._end.after = self._end
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._end.after
        while block is not None and block is not self._end:
            yield block
            block = block.after

    def append(self, block: Block) -> None:
        """Last to be handed out."""
        before = self._end.before
        assert before is not None
        self._link(before, block, self._end)

    def append_first(self, block: Block) -> None:
        """Next to be handed out."""
        after = self._end.after
        assert after is not None
        self._link(self._end, block, after)

    def pop(self) -> Block:
        """The next block; the queue must not be empty."""
        block = self._end.after
        assert block is not None
        assert block is not self._end
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.before, block.after
        assert before is not None
        assert after is not None
        before.after, after.before = after, before
        block.before = block.after = None
        self._length -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        before.after = after.before = block
        block.before, block.after = before, after
        self._length += 1


class BlockManager:
    """Hands out KV blocks and shares those with equal content.

    Below, t = num_computed_tokens and s = block_size. Between calls a sequence's table covers [0, t): it has ceil(t/s)
    blocks, of which those covering [0, floor(t/s) * s) are full and never written again. With a window, the first
    `num_passed_blocks` of them are not the sequence's any more, though their ids stay in the table: no query will look
    at them.

    A window frees blocks only where every layer has one, and the widest counts: a block holds its tokens' keys and
    values of all layers, so one layer that looks at everything keeps them all.

    Args:
        num_blocks, block_size: the pool; a block holds `block_size` tokens.
        prefix_caching: keep the content of full blocks findable until the block is handed out again.
        digest: hash of the prefix cache's keys; tests pass a weak one to force collisions.
        window: how many tokens up to and with its own any query looks at; 0 = all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        digest: Digest = sha256,
        window: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._digest = digest
        self._window = window
        self._pack = struct.Struct(f"<{block_size}i").pack
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeQueue()
        for block in self._blocks:
            self._free.append(block)
        self._cached: dict[bytes, Block] = {}
        self._copies: list[tuple[int, int]] = []
        self._last_root: tuple[tuple[str, str], Prefix] | None = None
        self._shared_tails: set[int] = set()  # partly filled blocks that several sequences use

    @property
    def num_free_blocks(self) -> int:
        """Blocks no sequence uses, those with cached content included."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def num_new_blocks(self, seq: Sequence, num_new_tokens: int) -> int:
        """Free blocks that `allocate_slots` would take, copy-on-write included."""
        end = seq.num_computed_tokens + num_new_tokens
        return -(-end // self.block_size) - len(seq.block_table) + self._shares_tail(seq)

    # [0, t) belongs to seq before and after; [t, t + n) comes to belong to it, and to it alone.
    # Blocks [0, floor(t/s)) keep their id; block floor(t/s), when partly filled and shared, is replaced by a copy.
    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> list[int] | None:
        """Give `seq` room for its next tokens; None, with nothing changed, where the free blocks do not suffice.

        Returns the new block ids. They extend the table; where the last block was shared and partly filled, the first
        of them takes its place instead, and `take_copies` announces (old, new).
        """
        needed = self.num_new_blocks(seq, num_new_tokens)
        if not needed:
            return []
        if needed > len(self._free):
            return None
        new = [self._take() for _ in range(needed)]
        if self._shares_tail(seq):
            shared = seq.block_table.pop()
            self._release(shared)
            self._copies.append((shared, new[0]))
        seq.block_table += new
        return new

    # seq owns nothing before; after, it owns [0, k * s), k full blocks, shared with whoever else uses them, and
    # k * s < num_tokens. They have left the free queue when this returns: no later allocation can take them.
    def match_prefix(self, seq: Sequence) -> int:
        """Put the longest cached prefix of `seq` into its empty table and return how many tokens that is.

        At least the last token is left to compute, since its logits are what the sequence is there for. Beyond
        `num_cacheable_tokens` a block must bring the log-probabilities that are wanted of its tokens; they go to the
        sequence. Every hit is verified against the tokens it was stored for.
        """
        assert not seq.block_table
        assert not seq.num_computed_tokens
        seq.carried = None
        if not self.prefix_caching:
            return 0
        as_they_are = seq.num_cacheable_tokens // self.block_size
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            prefix = self._prefix(seq, i)
            block = self._cached.get(prefix.digest)
            if block is None or block.prefix is None or not block.prefix.same(prefix):
                break
            if i >= as_they_are and not self._take_scores(seq, i, block.scores):
                break
            seq.prefixes[i + 1] = block.prefix  # from here on both chains are one object and compare at once
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        seq.num_published_blocks = len(seq.block_table)
        seq.num_computed_tokens = seq.num_published_blocks * self.block_size
        return seq.num_computed_tokens

    def _take_scores(self, seq: Sequence, index: int, scores: BlockScores | None) -> bool:
        """Give `seq` what is known of the tokens in its block `index`; False where that is not all it wants."""
        if scores is None or seq.next_scored is None or scores.k < (seq.request.params.prompt_logprobs or 0):
            return False
        seq.add_prompt_logprobs(max(1, index * self.block_size), scores.columns)
        seq.carried = scores.hidden
        return True

    # Owners do not change; cached blocks gain scores.
    def publish_scores(self, seq: Sequence, hidden: Mapping[int, bytes]) -> None:
        """Keep the log-probabilities of the prompt tokens in cached blocks of `seq` with the blocks.

        Args:
            hidden: by position, hidden states of tokens that end a block and whose followers were scored.
        """
        if not self.prefix_caching or seq.prompt_logprobs is None:
            return
        for position, state in hidden.items():
            index = position // self.block_size
            first = max(1, index * self.block_size)
            block = self._cached.get(self._prefix(seq, index).digest)
            if first < seq.first_scored or block is None or block.prefix is None:
                continue
            k = seq.request.params.prompt_logprobs or 0
            if block.prefix.same(self._prefix(seq, index)) and (block.scores is None or block.scores.k < k):
                columns = seq.prompt_logprobs.take(slice(first - seq.first_scored, position + 1 - seq.first_scored), k)
                block.scores = BlockScores(columns, k, state)

    # Owners do not change. Blocks [num_published_blocks, floor(min(t, known tokens)/s)) become findable for others.
    def publish(self, seq: Sequence) -> None:
        """Enter the full blocks of `seq` whose tokens are all known into the prefix cache.

        Call it when tokens were scheduled and when pending ones became known. Content that is cached already stays with
        the block that has it.
        """
        if not self.prefix_caching:
            return
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        for i in range(seq.num_published_blocks, full):
            prefix = self._prefix(seq, i)
            block = self._blocks[seq.block_table[i]]
            if self._cached.setdefault(prefix.digest, block) is block:
                block.prefix = prefix
            seq.num_published_blocks = i + 1

    # seq owns [p * s, t) before, p = num_passed_blocks, and [q * s, t) after, where q * s <= t - window + 1: the next
    # query stands at t, and none after it looks further back. Blocks not published yet stay, to be found by others.
    def release_passed(self, seq: Sequence) -> None:
        """Take the blocks from `seq` that its window has passed; what they hold stays findable as after `free`."""
        if not self._window:
            return
        passed = max(0, seq.num_computed_tokens - self._window + 1) // self.block_size
        if self.prefix_caching:
            passed = min(passed, seq.num_published_blocks)
        for block_id in seq.block_table[seq.num_passed_blocks : passed]:
            self._release(block_id)
        seq.num_passed_blocks = max(passed, seq.num_passed_blocks)

    # seq owned [0, t + n) and now has t computed tokens; it keeps [0, t). What is given back was written by it alone.
    def trim(self, seq: Sequence) -> None:
        """Take the blocks past `num_computed_tokens` from `seq`, which held nothing but drafts that failed."""
        for _ in range(len(seq.block_table) - self.num_blocks_for(seq.num_computed_tokens)):
            self._release(seq.block_table.pop())

    # seq owns [0, t) before and nothing after. Blocks that nobody else uses enter the free queue, the last one first:
    # a prefix is worth nothing without its beginning. Blocks without cached content are next to be handed out.
    def free(self, seq: Sequence) -> None:
        """Take all blocks from `seq`; their cached content stays findable until they are handed out again."""
        for block_id in reversed(self._owned(seq)):
            self._release(block_id)
        seq.block_table = []
        seq.num_passed_blocks = 0
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0

    # [0, t) belongs to seq before, and to seq and child after, the partly filled last block included: whoever of them
    # writes to it first gets a copy from `allocate_slots`.
    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Let `child`, which has the same tokens and no blocks yet, share everything `seq` has stored."""
        assert not child.block_table
        assert not seq.num_pending
        assert child.token_ids == seq.token_ids
        for block_id in self._owned(seq):
            self._blocks[block_id].ref_count += 1
        if seq.num_computed_tokens % self.block_size:
            self._shared_tails.add(seq.block_table[-1])
        child.block_table = seq.block_table.copy()
        child.num_passed_blocks = seq.num_passed_blocks
        child.num_computed_tokens = seq.num_computed_tokens
        child.prefixes = seq.prefixes.copy()
        child.num_published_blocks = seq.num_published_blocks

    def take_copies(self) -> list[tuple[int, int]]:
        """Copies (source, destination) to make, in order, before the tokens allocated since the last call are run."""
        copies, self._copies = self._copies, []
        return copies

    def num_shared_tokens(self, seq: Sequence) -> int:
        """Leading tokens of `seq` that stay in the pool when it is freed, because other sequences use them too."""
        shared = 0
        for block_id in () if seq.num_passed_blocks else seq.block_table:
            if self._blocks[block_id].ref_count == 1:
                break
            shared += self.block_size
        return min(shared, seq.num_computed_tokens)

    def owns_blocks(self, seq: Sequence) -> bool:
        """Whether freeing `seq` would release any block; its last ones are the least likely to be shared."""
        return any(self._blocks[block_id].ref_count == 1 for block_id in reversed(self._owned(seq)))

    def _owned(self, seq: Sequence) -> list[int]:
        return seq.block_table[seq.num_passed_blocks :] if seq.num_passed_blocks else seq.block_table

    def _shares_tail(self, seq: Sequence) -> bool:
        return bool(self._shared_tails) and bool(seq.block_table) and seq.block_table[-1] in self._shared_tails

    def _release(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.ref_count -= 1
        if block.ref_count <= 1:
            self._shared_tails.discard(block_id)
        if block.ref_count == 0:
            if block.prefix is None:
                self._free.append_first(block)
            else:
                self._free.append(block)

    def _take(self) -> int:
        block = self._free.pop()
        if block.prefix is not None:
            del self._cached[block.prefix.digest]
            block.prefix = block.scores = None
        block.ref_count = 1
        return block.block_id

    def _prefix(self, seq: Sequence, index: int) -> Prefix:
        """The prefix that ends with block `index` of `seq`; each is computed once per sequence."""
        chain = seq.prefixes
        if not chain:
            chain.append(self._root(seq.request.salt, seq.adapter_digest))
        size = self.block_size
        while len(chain) <= index + 1:
            start = (len(chain) - 1) * size
            chain.append(chain[-1].extend(self._digest, self._pack(*seq.token_ids[start : start + size])))
        return chain[index + 1]

    def _root(self, salt: str, adapter: str) -> Prefix:
        """The empty prefix of a scope; the last one is kept, since most sequences are of one."""
        if self._last_root is None or self._last_root[0] != (salt, adapter):
            self._last_root = (salt, adapter), Prefix.root(self._digest, salt=salt, adapter=adapter)
        return self._last_root[1]

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless all blocks are accounted for; `sequences` are all that have blocks."""
        size = self.block_size
        holders = list(sequences)
        users: Counter[int] = Counter()
        for seq in holders:
            owned, passed = self._owned(seq), seq.num_passed_blocks
            assert len(set(owned)) == len(owned), "a block twice in one table"
            assert passed * size <= max(0, seq.num_computed_tokens - self._window + 1), "a block left too early"
            assert len(seq.block_table) == self.num_blocks_for(seq.num_computed_tokens), (
                "table and computed tokens disagree"
            )
            assert seq.num_computed_tokens <= seq.num_tokens + seq.num_drafts
            assert seq.num_published_blocks * size <= min(seq.num_computed_tokens, len(seq.token_ids))
            users.update(owned)
            for i, block_id in enumerate(owned, passed):
                prefix = self._blocks[block_id].prefix
                if prefix is not None:
                    assert (i + 1) * size <= seq.num_computed_tokens, "a cached block may still be written to"
                    assert prefix.same(self._prefix(seq, i)), "a table holds a block with other content"
        queued: set[int] = set()
        for block in self._free:
            assert block.before is not None
            assert block.before.after is block
            queued.add(block.block_id)
        assert len(queued) == len(self._free)
        num_cached = 0
        for block in self._blocks:
            assert block.ref_count == users.get(block.block_id, 0), "reference count differs from the number of users"
            assert (block.ref_count == 0) == (block.block_id in queued), "a block both free and in use, or neither"
            if block.prefix is not None:
                num_cached += 1
                assert block.scores is None or len(block.scores.columns) >= size - 1
                assert self._cached.get(block.prefix.digest) is block, "a block believes to be cached and is not"
        assert len(self._cached) == num_cached
        tails = {seq.block_table[-1] for seq in holders if seq.num_computed_tokens % size}
        assert self._shared_tails == {block_id for block_id in tails if users[block_id] > 1}
