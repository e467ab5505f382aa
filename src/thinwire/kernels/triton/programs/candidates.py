# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Programs that select: collect candidates in one pass, find the k-th magnitude, write what is kept in order.

Every program has a tile of the tensor. The candidates of a tile are next to each other in a buffer, in
ascending order, but tiles come in any order: room is reserved by one atomic addition. `counts` and `offsets`
say where those of each tile are. Where the buffer was too small or has fewer than k entries, the following
programs read the tensor itself instead ("whole"), without the host having to know.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.numbers import loaded, magnitude, number_of, place_of, tile

LOW_BITS = tl.constexpr(15)
LOW_MASK = tl.constexpr(0x7FFF)


@triton.jit
def append(at, v, kept, on, capacity, total, offsets, counts, indices, values):
    """Add this tile's candidates to the buffer, if it is on at all; which of them found room."""
    number = number_of(kept)
    offset = tl.atomic_add(total, number)
    to = offset + place_of(kept)
    stored = kept & (to < capacity)
    tl.store(indices + to, at.to(tl.int32), mask=stored)
    tl.store(values + to, v, mask=stored)
    tl.store(offsets + tl.program_id(0), offset, mask=on)
    tl.store(counts + tl.program_id(0), number, mask=on)
    return stored


@triton.jit(do_not_specialize=["capacity"])
def collect(
    x, grad, n, above, active, capacity, total, offsets, counts, indices, values, BLOCK: tl.constexpr
):
    """Candidates are all entries above a magnitude. Nothing is read and nothing changes unless `active`."""
    at = tile(BLOCK)
    on = tl.load(active) != 0
    inside = at < tl.where(on, n, 0)
    v = loaded(x, grad, at, inside)
    kept = inside & (magnitude(v) > tl.load(above))
    append(at, v, kept, on, capacity, total, offsets, counts, indices, values)


@triton.jit
def is_whole(total, k, capacity):
    number = tl.load(total)
    return (number < k) | (number > capacity)


@triton.jit(do_not_specialize=["k", "capacity"])
def count_digits(x, grad, n, values, total, k, capacity, high, histogram, BLOCK: tl.constexpr):
    """Histogram of the candidates' high bits; with `high`, of the low bits of those with these high bits."""
    at = tile(BLOCK)
    whole = is_whole(total, k, capacity)
    from_tensor = at < tl.where(whole, n, 0)
    from_buffer = at < tl.where(whole, 0, tl.load(total))
    v = loaded(x, grad, at, from_tensor)
    v = tl.where(from_buffer, tl.load(values + at, mask=from_buffer, other=0.0), v)
    m = magnitude(v)
    digit = m >> LOW_BITS
    valid = from_tensor | from_buffer
    if high is not None:
        valid = valid & (digit == tl.load(high))
        digit = m & LOW_MASK
    tl.atomic_add(histogram + digit, 1, mask=valid)


@triton.jit
def find_digit(histogram, rank, digit, left, above, SIZE: tl.constexpr, STEP: tl.constexpr):
    """The digit of the entry of this rank (from 1, the largest first), and its rank among its equals.

    With `above`, also the largest magnitude with a smaller digit.
    """
    wanted = tl.load(rank)
    found = wanted * 0
    rest = wanted * 0
    for part in range(SIZE // STEP):
        d = SIZE - 1 - part * STEP - tl.arange(0, STEP)
        number = tl.load(histogram + d)
        upto = tl.cumsum(number, 0)
        hit = (upto >= wanted) & (upto - number < wanted)
        found += tl.sum(tl.where(hit, d, 0), 0)
        rest += tl.sum(tl.where(hit, wanted - (upto - number), 0), 0)
        wanted -= tl.sum(number, 0)
    tl.store(digit, found)
    tl.store(left, rest)
    if above is not None:
        tl.store(above, (found << LOW_BITS) - 1)


@triton.jit
def candidates(x, grad, n, offsets, counts, indices, values, whole, BLOCK: tl.constexpr):
    """This tile's candidates: (where, what, which come from the tensor, which from the buffer)."""
    at = tile(BLOCK)
    lane = tl.arange(0, BLOCK)
    from_tensor = at < tl.where(whole, n, 0)
    offset = tl.load(offsets + tl.program_id(0))
    from_buffer = lane < tl.where(whole, 0, tl.load(counts + tl.program_id(0)))
    v = loaded(x, grad, at, from_tensor)
    v = tl.where(from_buffer, tl.load(values + offset + lane, mask=from_buffer, other=0.0), v)
    where = tl.load(indices + offset + lane, mask=from_buffer, other=0)
    where = tl.where(from_buffer, where, at.to(tl.int32))
    return where, v, from_tensor, from_buffer


@triton.jit
def limit_of(high, low):
    """Either the two digits of a magnitude, or, without `low`, the magnitude."""
    limit = tl.load(high)
    if low is not None:
        limit = (limit << LOW_BITS) | tl.load(low)
    return limit


@triton.jit(do_not_specialize=["k", "capacity"])
def count_kept(
    x,
    grad,
    n,
    offsets,
    counts,
    indices,
    values,
    total,
    k,
    capacity,
    high,
    low,
    above,
    equal,
    BLOCK: tl.constexpr,
):
    """How many candidates of every tile are above the limit, and how many equal it."""
    whole = is_whole(total, k, capacity)
    _, v, from_tensor, from_buffer = candidates(x, grad, n, offsets, counts, indices, values, whole, BLOCK)
    valid = from_tensor | from_buffer
    limit = limit_of(high, low)
    m = magnitude(v)
    tl.store(above + tl.program_id(0), number_of(valid & (m > limit)))
    tl.store(equal + tl.program_id(0), number_of(valid & (m == limit)))


@triton.jit(do_not_specialize=["k", "capacity"])
def write_kept(
    x,
    grad,
    n,
    offsets,
    counts,
    indices,
    values,
    total,
    k,
    capacity,
    high,
    low,
    ties,
    above,
    equal,
    out_indices,
    out_values,
    residual,
    RESTORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The candidates above the limit and the first `ties` equal to it, in ascending order.

    `above` and `equal` are counted over all tiles before this one. What is written is zeroed in `residual`.
    With RESTORE, collecting has zeroed all candidates there: those that are not written get their value back.
    """
    whole = is_whole(total, k, capacity)
    where, v, from_tensor, from_buffer = candidates(
        x, grad, n, offsets, counts, indices, values, whole, BLOCK
    )
    valid = from_tensor | from_buffer
    limit = limit_of(high, low)
    m = magnitude(v)
    is_above = valid & (m > limit)
    is_equal = valid & (m == limit)
    allowed = tl.load(ties)
    number = tl.load(equal + tl.program_id(0)) + place_of(is_equal)
    kept = is_above | (is_equal & (number < allowed))
    to = tl.load(above + tl.program_id(0)) + place_of(is_above) + tl.minimum(number, allowed)
    tl.store(out_indices + to, where, mask=kept)
    tl.store(out_values + to, v, mask=kept)
    if residual is not None:
        if RESTORE:
            tl.store(residual + where, tl.where(kept, 0.0, v), mask=kept | from_buffer)
        else:
            tl.store(residual + where, tl.where(kept, 0.0, v), mask=kept)


@triton.jit(do_not_specialize=["k", "capacity"])
def put_back(residual, indices, values, total, k, capacity, BLOCK: tl.constexpr):
    """If the candidates do not suffice: what collecting has taken out of the residual goes back."""
    at = tile(BLOCK)
    number = tl.minimum(tl.load(total), capacity)
    inside = at < tl.where(is_whole(total, k, capacity), number, 0)
    where = tl.load(indices + at, mask=inside, other=0)
    tl.store(residual + where, tl.load(values + at, mask=inside, other=0.0), mask=inside)
