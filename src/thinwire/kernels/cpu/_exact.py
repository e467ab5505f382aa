"""Exact selection of the k largest magnitudes: among collected survivors, or by radix over everything."""

from functools import reduce

import numpy as np

from thinwire.kernels.cpu._collect import TILE
from thinwire.kernels.cpu._jit import F32, I32, I64, kernel
from thinwire.kernels.cpu._simd import LANES, above64, equal64, lowest_bit
from thinwire.kernels.cpu._tensors import Source, summed

_MAGNITUDE = np.int32(0x7FFFFFFF)
_ONE = np.uint64(1)

HIGH_BITS = 16  # the radix: 16 high bits of the 31, then the 15 low ones
LOW_BITS = 15


@kernel
def kth_magnitude(values: F32, k: int) -> int:
    """The k-th largest magnitude (k >= 1), as an integer: three levels of 11, 11 and 9 bits.

    Without branches on the data; entries of other prefixes go to a bin that nobody reads. Two tables take
    turns, since increments of one counter would wait for each other.
    """
    bits = values.view(np.int32)
    unread = 2048
    size = unread + 1
    counts = np.zeros(2 * size, np.int64)
    prefix = 0
    known = 31
    left = k
    shift = 20
    width = 11
    while True:
        counts[:] = 0
        mask = (1 << width) - 1
        for j in range(len(bits)):
            m = int(bits[j] & _MAGNITUDE)
            digit = (m >> shift) & mask if (m >> known) == prefix else unread
            counts[digit + (j & 1) * size] += 1
        digit = mask
        while left > counts[digit] + counts[digit + size]:
            left -= counts[digit] + counts[digit + size]
            digit -= 1
        prefix = (prefix << width) | digit
        known = shift
        if shift == 0:
            return prefix
        width = min(shift, 11)
        shift -= width


@kernel
def keep_largest(
    indices: I32, values: F32, k: int, out_indices: I32, out_values: F32, restore: F32 | None
) -> None:
    """The k largest of the survivors, in order; the others go back to where they were taken from."""
    limit = kth_magnitude(values, k)
    bits = values.view(np.int32)
    above = 0
    for j in range(len(bits)):
        above += int((bits[j] & _MAGNITUDE) > limit)
    ties = k - above
    at = 0
    for j in range(len(bits)):
        m = bits[j] & _MAGNITUDE
        if m > limit or (m == limit and ties > 0):
            ties -= int(m == limit)
            out_indices[at] = indices[j]
            out_values[at] = values[j]
            at += 1
        elif restore is not None:
            restore[indices[j]] = values[j]


@kernel
def histogram_high(a: F32, b: F32 | None, counts: I64) -> None:
    """Count magnitudes by their high bits; two tables in turn, since equal neighbours would wait."""
    size = 1 << HIGH_BITS
    scratch = np.empty(TILE, np.float32)
    for lo in range(0, len(a), TILE):
        hi = min(lo + TILE, len(a))
        tile = summed(a, b, lo, hi, scratch)
        bits = tile.view(np.int32)
        for j in range(len(bits)):
            counts[((bits[j] & _MAGNITUDE) >> LOW_BITS) + (j & 1) * size] += 1


@kernel
def histogram_low(a: F32, b: F32 | None, digit: int, counts: I64) -> None:
    """Count the low bits of the magnitudes whose high bits are `digit`."""
    size = 1 << LOW_BITS
    mask = size - 1
    scratch = np.empty(TILE, np.float32)
    for lo in range(0, len(a), TILE):
        hi = min(lo + TILE, len(a))
        tile = summed(a, b, lo, hi, scratch)
        bits = tile.view(np.int32)
        for j in range(len(bits)):
            m = bits[j] & _MAGNITUDE
            if (m >> LOW_BITS) == digit:
                counts[(m & mask) + (j & 1) * size] += 1


@kernel
def find_digit(counts: I64, size: int, k: int) -> tuple[int, int]:
    """The digit of the k-th largest, and which of its equals it is (counting from 1)."""
    digit = size - 1
    left = k
    while left > counts[digit] + counts[digit + size]:
        left -= counts[digit] + counts[digit + size]
        digit -= 1
    return digit, left


@kernel
def collect_exact(
    a: F32, b: F32 | None, base: int, limit: int, ties: int, indices: I32, values: F32, at: int
) -> tuple[int, int]:
    """Everything above `limit` and the first `ties` equal to it: (the new end, ties left)."""
    n = len(a)
    scratch = np.empty(TILE, np.float32)
    for lo in range(0, n, TILE):
        hi = min(lo + TILE, n)
        tile = summed(a, b, lo, hi, scratch)
        full = (hi - lo) - (hi - lo) % LANES
        for block in range(0, full, LANES):
            mask = above64(tile, block, np.int32(limit))
            if ties > 0:
                equal = equal64(tile, block, np.int32(limit))
                while equal != 0 and ties > 0:
                    mask |= equal & (~equal + _ONE)
                    equal &= equal - _ONE
                    ties -= 1
            while mask != 0:
                j = block + lowest_bit(mask)
                indices[at] = base + lo + j
                values[at] = tile[j]
                at += 1
                mask &= mask - _ONE
        bits = tile.view(np.int32)
        for j in range(full, hi - lo):
            m = bits[j] & _MAGNITUDE
            if m > limit or (m == limit and ties > 0):
                ties -= int(m == limit)
                indices[at] = base + lo + j
                values[at] = tile[j]
                at += 1
    return at, ties


def radix_topk(source: Source, k: int, indices: I32, values: F32) -> None:
    """The exact k largest for any distribution: two histograms, then one pass that collects."""
    digit, left = _digit(source, k, None)
    low, ties = _digit(source, left, digit)
    limit = (digit << LOW_BITS) | low
    at = 0
    for a, b, lo in source.in_order():
        at, ties = collect_exact(a, b, lo, limit, ties, indices, values, at)


def _digit(source: Source, k: int, high: int | None) -> tuple[int, int]:
    size = 1 << (HIGH_BITS if high is None else LOW_BITS)

    def work(a: F32, b: F32 | None, _: int) -> I64:
        counts = np.zeros(2 * size, np.int64)
        if high is None:
            histogram_high(a, b, counts)
        else:
            histogram_low(a, b, high, counts)
        return counts

    return find_digit(reduce(np.add, source.run(work)), size, k)
