# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Programs that add a gradient to a residual and do something with the sum in the same pass.

`undo` may be the gradient's own memory: every program reads an entry of both before it writes there.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.candidates import append
from thinwire.kernels.triton.programs.moments import store_moments
from thinwire.kernels.triton.programs.numbers import magnitude, number_of, tile


@triton.jit
def summed(residual, grad, undo, at, inside):
    """residual + grad, not stored yet; the old residual goes to `undo`."""
    old = tl.load(residual + at, mask=inside, other=0.0)
    total = old + tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if undo is not None:
        tl.store(undo + at, old, mask=inside)
    return total


@triton.jit
def accumulate(residual, grad, n, undo, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < n
    tl.store(residual + at, summed(residual, grad, undo, at, inside), mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def accumulate_taking(
    residual, grad, n, undo, above, capacity, total, offsets, counts, indices, values, BLOCK: tl.constexpr
):
    """Sums above a magnitude become candidates and leave the residual, if the buffer has room for them."""
    at = tile(BLOCK)
    inside = at < n
    v = summed(residual, grad, undo, at, inside)
    kept = inside & (magnitude(v) > tl.load(above))
    taken = append(at, v, kept, tl.program_id(0) >= 0, capacity, total, offsets, counts, indices, values)
    tl.store(residual + at, tl.where(taken, 0.0, v), mask=inside)


@triton.jit
def accumulate_counting(residual, grad, n, undo, limit, above, equal, BLOCK: tl.constexpr):
    """Counts the sums above the limit (and none as equal to it)."""
    at = tile(BLOCK)
    inside = at < n
    v = summed(residual, grad, undo, at, inside)
    tl.store(residual + at, v, mask=inside)
    tl.store(above + tl.program_id(0), number_of(inside & (magnitude(v) > tl.load(limit))))
    tl.store(equal + tl.program_id(0), 0)


@triton.jit
def accumulate_moments(residual, grad, n, undo, sums, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < n
    v = summed(residual, grad, undo, at, inside)
    tl.store(residual + at, v, mask=inside)
    store_moments(v, inside, sums)


@triton.jit(do_not_specialize=["start", "length"])
def accumulate_block(residual, grad, n, undo, clear, start, length, out, BLOCK: tl.constexpr):
    """The block that begins at `start` and wraps around the end moves from the sums to `out`."""
    at = tile(BLOCK)
    inside = at < n
    v = summed(residual, grad, undo, at, inside)
    if clear is not None:
        tl.store(clear + at, tl.zeros([BLOCK], tl.float32), mask=inside)
    place = at - start
    place = tl.where(place < 0, place + n, place)
    taken = inside & (place < length)
    tl.store(out + place, v, mask=taken)
    tl.store(residual + at, tl.where(taken, 0.0, v), mask=inside)


@triton.jit
def zero_at(x, indices, k, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < k
    where = tl.load(indices + at, mask=inside, other=0)
    tl.store(x + where, tl.zeros([BLOCK], tl.float32), mask=inside)
