"""Sums in double precision that do not depend on the number of threads.

A tensor is summed in blocks of a fixed size, each into its own slot; the slots are added up in order. Inside
a tile the compiler may reorder, which is what makes the loops vectorise.
"""

import numpy as np

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, F64, kernel, reordering
from thinwire.kernels.cpu._tensors import Source, summed

TILE = 2048


@reordering
def tile_sums(tile: F32) -> tuple[float, float]:
    """Sum and sum of squares."""
    total = 0.0
    squares = 0.0
    for j in range(len(tile)):
        v = np.float64(tile[j])
        total += v
        squares += v * v
    return total, squares


@kernel
def tile_moments(tile: F32) -> tuple[float, float, float]:
    """(how many are finite, their sum, the sum of their squares)."""
    total, squares = tile_sums(tile)
    if np.isfinite(squares):
        return float(len(tile)), total, squares
    count, total, squares = 0.0, 0.0, 0.0
    for j in range(len(tile)):
        if np.isfinite(tile[j]):
            v = np.float64(tile[j])
            count += 1.0
            total += v
            squares += v * v
    return count, total, squares


@kernel
def moments_into(a: F32, b: F32 | None, block: int, out: F64) -> None:
    """One row (count, sum, squares) per block."""
    scratch = np.empty(TILE, np.float32)
    for lo in range(0, len(a), TILE):
        hi = min(lo + TILE, len(a))
        tile = summed(a, b, lo, hi, scratch)
        n, s, q = tile_moments(tile)
        row = out[lo // block]
        row[0] += n
        row[1] += s
        row[2] += q


def finite_sums(source: Source) -> tuple[int, float, float]:
    """(count, sum, sum of squares) of the finite entries."""

    def work(a: F32, b: F32 | None, _: int) -> F64:
        rows = rows_for(a, 3)
        moments_into(a, b, _pool.GRAIN, rows)
        return rows

    count, total, squares = total_of(source.run(work))
    return int(count), total, squares


def rows_for(x: F32, width: int) -> F64:
    """A row of sums for each block of the pool's grain."""
    return np.zeros((-(-len(x) // _pool.GRAIN), width), np.float64)


def total_of(parts: list[F64]) -> list[float]:
    """All rows added up in order."""
    return np.add.accumulate(np.concatenate(parts))[-1].tolist()
