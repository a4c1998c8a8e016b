"""How kernels are launched: pure functions from shapes and the chip to tile sizes, warps and stages.

Nothing here looks at a device, so every choice can be listed, compiled ahead of time and tested anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_TILE = 16
"""Least rows, columns and depth of a tensor-core product."""

SAME_QUERY_ROWS, SAME_GEMM_ROWS = 32, 64
"""Rows of the tiles where these are the same for every batch."""

MAX_SPLITS = 32
"""Most pieces a sequence's keys are cut into."""

SPLIT_TOKENS = 512
"""Least keys worth a piece of their own."""

MAX_SPLIT_QUERIES = 1024
"""Most tokens of a batch whose keys are split: partial results take memory for each."""

TILE_ELEMENTS = 4096
"""Elements of a tile that fit the registers of one warp group in elementwise kernels."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What the settings depend on.

    Attributes:
        processors: streaming multiprocessors or compute units.
        shared_bytes: shared memory a program may take.
        hip: AMD, with 64 lanes a warp and no asynchronous copies to speak of.
        register_operands: products read their operands from registers, so larger tiles spill (NVIDIA before 9.0).
        tensor_memory: products keep their sums in a memory of their own, and other numbers of warps spill (NVIDIA
            from 10.0).
        same_tiles: every batch gets the same tiles and nothing is split, so that no row's bits depend on the others.
    """

    processors: int
    shared_bytes: int
    hip: bool = False
    register_operands: bool = False
    tensor_memory: bool = False
    same_tiles: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Tile of `block_m` query rows (tokens x heads of a group) by `block_n` keys; `num_splits` pieces of the keys."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Tile of an elementwise or reducing kernel."""

    block: int
    num_warps: int


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def attention_settings(
    chip: Chip,
    *,
    num_tokens: int,
    num_seqs: int,
    max_seqlen_q: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
) -> AttentionSettings:
    """The tile and the splits of a batch.

    A decode tile holds the heads that share a key head, at least `MIN_TILE` rows; a tile of prompt tokens is larger.
    Keys are split where sequences times key heads leave processors idle. Keys, values and queries of a tile fit the
    shared memory with `num_stages` of them in flight.
    """
    group = num_heads // num_kv_heads
    depth = max(MIN_TILE, next_power_of_2(head_dim))
    wide = depth > 128 or itemsize > 2
    converted = kv_itemsize < itemsize
    tight = chip.register_operands and (converted or depth > head_dim)
    smallest = max(MIN_TILE, next_power_of_2(group))
    largest = max(smallest, 32 if depth * itemsize > 512 else 64 if wide or tight or chip.hip else 128)
    rows = SAME_QUERY_ROWS if chip.same_tiles else group if max_seqlen_q == 1 else max_seqlen_q * group
    block_m = min(max(smallest, next_power_of_2(rows)), largest)
    block_n = 32 if wide or (block_m > smallest and (chip.register_operands or converted)) else 64
    if block_m == smallest and depth <= 64 and not converted and not wide:
        block_n = 128  # as many bytes as 64 keys of twice the depth
    num_stages = 1 if chip.hip else 3 if block_m == smallest else 2
    query_bytes = block_m * depth * itemsize
    while num_stages > 1 and query_bytes + num_stages * block_n * depth * 2 * kv_itemsize > chip.shared_bytes * 3 // 4:
        num_stages -= 1
    num_warps = 8 if block_m * depth > (32 if tight else 64) * 128 else 4
    if chip.tensor_memory and depth >= 128:
        num_warps = 4 if depth > 128 or block_m < 64 else 8
    num_splits = 1
    if num_tokens <= MAX_SPLIT_QUERIES and not chip.same_tiles:
        programs = num_seqs * num_kv_heads * cdiv(max_seqlen_q * group, block_m)
        idle = 2 * chip.processors // max(1, programs)
        num_splits = next_power_of_2(max(1, min(idle, cdiv(max_seq_len, SPLIT_TOKENS), MAX_SPLITS)))
    return AttentionSettings(block_m, block_n, num_splits, num_warps, num_stages)


def row_settings(width: int) -> RowSettings:
    """A whole row of `width` elements in one tile."""
    block = next_power_of_2(width)
    return RowSettings(block, min(16, max(1, block // 512)))


def chunk_settings(width: int, largest: int = 1024) -> RowSettings:
    """A row of `width` elements in tiles of at most `largest`."""
    block = min(largest, next_power_of_2(width))
    return RowSettings(block, min(8, max(1, block // 256)))


def heads_settings(num_rows: int, head_dim: int) -> RowSettings:
    """Head rows that one program of the rotary kernel takes."""
    depth = next_power_of_2(head_dim)
    block = max(1, min(next_power_of_2(num_rows), TILE_ELEMENTS // 2 // depth))
    return RowSettings(block, min(8, max(1, block * depth // 512)))


@dataclass(frozen=True, slots=True)
class GemmSettings:
    """Tile of a matrix product; the inputs are summed in `splits` pieces."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


def gemm_settings(chip: Chip, *, rows: int, outputs: int, inputs: int, itemsize: int, weight_bits: int) -> GemmSettings:
    """Small tiles for few rows, where reading the weight is all the work and pieces keep every processor at it."""
    block_m = min(128, max(MIN_TILE, next_power_of_2(SAME_GEMM_ROWS if chip.same_tiles else rows)))
    block_n = 64 if block_m <= 32 or itemsize > 2 else 128
    block_k = max(MIN_TILE * 2, 128 // itemsize)
    num_stages = 2 if chip.hip else 4 if block_m <= 32 else 3
    tile_bytes = block_m * block_k * itemsize + block_n * block_k * max(itemsize, weight_bits // 8)
    while num_stages > 1 and num_stages * tile_bytes > chip.shared_bytes * 3 // 4:
        num_stages -= 1
    tiles = cdiv(rows, block_m) * cdiv(outputs, block_n)
    splits = 1
    while (
        not chip.same_tiles
        and splits < 8
        and 2 * splits * tiles <= chip.processors
        and inputs >= 2 * splits * 8 * block_k
    ):
        splits *= 2
    return GemmSettings(block_m, block_n, block_k, splits, 8 if block_m * block_n >= 128 * 128 else 4, num_stages)
