"""Compaction: indices and values of all entries above a magnitude, in one pass of 64-lane masks."""

import numpy as np

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, I32, kernel
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._simd import LANES, above64, lowest_bit, sum_above64
from thinwire.kernels.cpu._tensors import Source, summed

TILE = 2048
NOTHING_ABOVE = 0x7FFFFFFF
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ONE = np.uint64(1)


@kernel
def collect_tile(tile: F32, base: int, above: int, indices: I32, values: F32, at: int) -> int:
    """Append the entries of `tile` above the magnitude; the caller has made sure that there is room."""
    n = len(tile)
    full = n - n % LANES
    for block in range(0, full, LANES):
        mask = above64(tile, block, np.int32(above))
        while mask != 0:
            j = block + lowest_bit(mask)
            indices[at] = base + j
            values[at] = tile[j]
            at += 1
            mask &= mask - _ONE
    bits = tile.view(np.int32)
    for j in range(full, n):
        if (bits[j] & _MAGNITUDE) > above:
            indices[at] = base + j
            values[at] = tile[j]
            at += 1
    return at


@kernel
def collect_tile_sum(a: F32, b: F32, base: int, above: int, indices: I32, values: F32, at: int) -> int:
    """`collect_tile` of a + b."""
    n = len(a)
    full = n - n % LANES
    for block in range(0, full, LANES):
        mask = sum_above64(a, b, block, np.int32(above))
        while mask != 0:
            j = block + lowest_bit(mask)
            indices[at] = base + j
            values[at] = a[j] + b[j]
            at += 1
            mask &= mask - _ONE
    rest = np.empty(LANES, np.float32)
    for j in range(full, n):
        rest[j - full] = a[j] + b[j]
    return collect_tile(rest[: n - full], base + full, above, indices, values, at)


@kernel
def collect(
    a: F32, b: F32 | None, base: int, above: int, indices: I32, values: F32, at: int
) -> tuple[int, bool]:
    """All entries above, appended at `at`: (the new end, False), or True if the room might not suffice."""
    n = len(a)
    for lo in range(0, n, TILE):
        hi = min(lo + TILE, n)
        if at + (hi - lo) > len(indices):
            return at, True
        if b is None:
            at = collect_tile(a[lo:hi], base + lo, above, indices, values, at)
        else:
            at = collect_tile_sum(a[lo:hi], b[lo:hi], base + lo, above, indices, values, at)
    return at, False


@kernel
def collect_all(a: F32, b: F32 | None, base: int, above: int, indices: I32, values: F32, at: int) -> None:
    """`collect` where the caller has counted: there is room for exactly these."""
    if b is None:
        collect_tile(a, base, above, indices, values, at)
    else:
        collect_tile_sum(a, b, base, above, indices, values, at)


@kernel
def count(a: F32, b: F32 | None, above: int) -> int:
    """How many entries are above."""
    n = len(a)
    scratch = np.empty(TILE, np.float32)
    total = 0
    for lo in range(0, n, TILE):
        hi = min(lo + TILE, n)
        tile = summed(a, b, lo, hi, scratch)
        total += count_tile(tile, above)
    return total


@kernel
def count_tile(tile: F32, above: int) -> int:
    bits = tile.view(np.int32)
    limit = np.int32(above)
    total = np.int32(0)
    for j in range(len(bits)):
        total += np.int32((bits[j] & _MAGNITUDE) > limit)
    return int(total)


def survivors(source: Source, above: int, room: int) -> tuple[I32, F32] | None:
    """Entries above, if no more than about `room`; scratch memory, valid until the next call in this thread.

    None means that there are more than `room`.
    """
    capacity = room + TILE
    ranges = source.cuts()
    indices = scratch_array("survivors", np.int32, capacity * len(ranges))
    values = scratch_array("survivors", np.float32, capacity * len(ranges))
    if not source.direct:
        at, full = 0, False
        for block, lo in source.widened():
            at, full = collect(block, None, lo, above, indices, values, at)
            if full:
                break
        return None if full or at > room else (indices[:at], values[:at])

    def work(part: int) -> tuple[int, bool]:
        lo, hi = ranges[part]
        mine = slice(part * capacity, (part + 1) * capacity)
        return collect(*source.views(lo, hi), lo, above, indices[mine], values[mine], 0)

    return joined(_pool.run(work, len(ranges)), capacity, room, indices, values)


def joined(
    ends: list[tuple[int, bool]], capacity: int, room: int, indices: I32, values: F32
) -> tuple[I32, F32] | None:
    """Move what each thread collected (at multiples of `capacity`) together."""
    total = sum(end for end, _ in ends)
    if total > room or any(full for _, full in ends):
        return None
    at = ends[0][0]
    for part, (end, _) in enumerate(ends[1:], start=1):
        first = part * capacity
        indices[at : at + end] = indices[first : first + end]
        values[at : at + end] = values[first : first + end]
        at += end
    return indices[:at], values[:at]
