# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Programs that sum in double precision: one row (how many, their sum, the sum of squares) per tile.

The rows are added up by torch, in an order that does not depend on which program was first.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.numbers import loaded, magnitude, number_of, tile

INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def store_sums(v, kept, sums):
    wide = tl.where(kept, v, 0.0).to(tl.float64)
    row = sums + 3 * tl.program_id(0)
    tl.store(row, number_of(kept).to(tl.float64))
    tl.store(row + 1, tl.sum(wide, 0))
    tl.store(row + 2, tl.sum(wide * wide, 0))


@triton.jit
def store_moments(v, inside, sums):
    """Of the finite entries."""
    store_sums(v, inside & (magnitude(v) < INFINITY), sums)


@triton.jit
def moments(x, grad, n, sums, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < n
    store_moments(loaded(x, grad, at, inside), inside, sums)


@triton.jit
def tail_sums(x, n, factor, active, sums, BLOCK: tl.constexpr):
    """Of the magnitudes of the finite entries with factor |x| < 1; reads nothing unless `active`."""
    at = tile(BLOCK)
    inside = at < tl.where(tl.load(active) != 0, n, 0)
    v = tl.abs(loaded(x, None, at, inside))
    kept = inside & (magnitude(v) < INFINITY) & (v * tl.load(factor) < 1.0)
    store_sums(v, kept, sums)
