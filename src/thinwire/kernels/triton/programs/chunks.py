# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Top-k by chunks: a program has a few whole chunks, a row each, and finds the k-th magnitude bit by bit."""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.feedback import summed
from thinwire.kernels.triton.programs.numbers import loaded, magnitude


@triton.jit(do_not_specialize=["k", "last"])
def take_chunks(
    x,
    grad,
    n,
    chunk,
    k,
    last,
    undo,
    indices,
    values,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The k largest of every chunk (`last` of the last one), in ascending order; k per chunk before it.

    With ACCUMULATE, x is the residual: it becomes the sum without what is taken out.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    at = row[:, None] * chunk + column[None, :]
    inside = (column[None, :] < chunk) & (at < n)
    if ACCUMULATE:  # noqa: SIM108 - only one of them is compiled
        v = summed(x, grad, undo, at, inside)
    else:
        v = loaded(x, grad, at, inside)
    wanted = tl.where((row + 1) * chunk < n, k, last)[:, None]
    m = tl.where(inside, magnitude(v), -1)
    limit = tl.zeros([ROWS, 1], tl.int32)
    for step in range(31):
        candidate = limit | (1 << (30 - step))
        reached = tl.sum((m >= candidate).to(tl.int32), 1)[:, None]
        limit = tl.where(reached >= wanted, candidate, limit)
    above = m > limit
    equal = (m == limit).to(tl.int32)
    ties = wanted - tl.sum(above.to(tl.int32), 1)[:, None]
    kept = above | ((m == limit) & (tl.cumsum(equal, 1) - equal < ties))
    ones = kept.to(tl.int32)
    to = row[:, None] * k + tl.cumsum(ones, 1) - ones
    tl.store(indices + to, at.to(tl.int32), mask=kept)
    tl.store(values + to, v, mask=kept)
    if ACCUMULATE:
        tl.store(x + at, tl.where(kept, 0.0, v), mask=inside)
