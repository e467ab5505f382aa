# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Count-sketch programs: a block of 64 neighbours is one run of columns, with 64 signs from one word.

Insertions are atomic additions in any order, so sums may differ in the last bits from run to run.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.candidates import append
from thinwire.kernels.triton.programs.numbers import joined64, loaded, magnitude, mix64

SIGN_SALT = tl.constexpr(0x1D8E4E27C47D124F)
SPLIT_STEP = tl.constexpr(0x9E3779B97F4A7C15)
LANES = tl.constexpr(64)


@triton.jit
def hashed(block, cols, seed_low, seed_high, row: tl.constexpr):
    """The column and the sign (whether positive) of every entry of these blocks, in one row of the table."""
    step = (block * 0).to(tl.uint64) + SPLIT_STEP
    key = mix64(step * (row + 1) + joined64(seed_low, seed_high))
    h = mix64(key + block.to(tl.uint64))
    start = ((h >> 32) * cols.to(tl.uint64)) >> 32
    signs = mix64(h ^ SIGN_SALT)
    lane = tl.arange(0, LANES)
    column = (start.to(tl.uint32)[:, None] + lane.to(tl.uint32)[None, :]) % cols.to(tl.uint32)
    positive = ((signs[:, None] >> lane.to(tl.uint64)[None, :]) & 1) != 0
    return column.to(tl.int64), positive


@triton.jit
def entries(first, BLOCKS: tl.constexpr):
    """The blocks of a program, and the positions of their entries."""
    block = first + tl.arange(0, BLOCKS)
    return block, block[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit(do_not_specialize=["seed_low", "seed_high", "cols"])
def insert(x, n, seed_low, seed_high, cols, table, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    block, at = entries(tl.program_id(0).to(tl.int64) * BLOCKS, BLOCKS)
    inside = at < n
    v = loaded(x, None, at, inside)
    for row in tl.static_range(ROWS):
        column, positive = hashed(block, cols, seed_low, seed_high, row)
        tl.atomic_add(table + row * cols.to(tl.int64) + column, tl.where(positive, v, -v), mask=inside)


@triton.jit
def read(table, block, inside, cols, seed_low, seed_high, row: tl.constexpr):
    column, positive = hashed(block, cols, seed_low, seed_high, row)
    v = tl.load(table + row * cols.to(tl.int64) + column, mask=inside, other=0.0)
    return tl.where(positive, v, -v)


@triton.jit
def sorted2(a, b):
    """As in the reference: what does not compare, NaN, changes places."""
    ordered = a < b
    return tl.where(ordered, a, b), tl.where(ordered, b, a)


@triton.jit
def estimates(table, block, inside, cols, seed_low, seed_high, ROWS: tl.constexpr):
    """The median over the rows, by the reference's networks."""
    a = read(table, block, inside, cols, seed_low, seed_high, 0)
    if ROWS == 1:
        found = a
    else:
        b = read(table, block, inside, cols, seed_low, seed_high, 1)
        c = read(table, block, inside, cols, seed_low, seed_high, 2)
        if ROWS == 3:
            a, b = sorted2(a, b)
            b, c = sorted2(b, c)
            a, b = sorted2(a, b)
            found = b
        else:
            d = read(table, block, inside, cols, seed_low, seed_high, 3)
            e = read(table, block, inside, cols, seed_low, seed_high, 4)
            if ROWS == 5:
                a, b = sorted2(a, b)
                d, e = sorted2(d, e)
                a, d = sorted2(a, d)
                b, e = sorted2(b, e)
                b, c = sorted2(b, c)
                c, d = sorted2(c, d)
                b, c = sorted2(b, c)
                found = c
            else:
                f = read(table, block, inside, cols, seed_low, seed_high, 5)
                g = read(table, block, inside, cols, seed_low, seed_high, 6)
                a, f = sorted2(a, f)
                a, d = sorted2(a, d)
                b, g = sorted2(b, g)
                c, e = sorted2(c, e)
                a, b = sorted2(a, b)
                d, f = sorted2(d, f)
                c, g = sorted2(c, g)
                c, d = sorted2(c, d)
                d, g = sorted2(d, g)
                e, f = sorted2(e, f)
                b, e = sorted2(b, e)
                b, d = sorted2(b, d)
                d, e = sorted2(d, e)
                found = d
    return found


@triton.jit(do_not_specialize=["seed_low", "seed_high", "cols", "stride"])
def query(table, n, seed_low, seed_high, cols, stride, active, out, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Estimates of all entries (stride 1), or of every stride-th block; none if `active` is zero."""
    block, at = entries(tl.program_id(0).to(tl.int64) * BLOCKS, BLOCKS)
    end = n
    if active is not None:
        end = tl.where(tl.load(active) != 0, n, 0)
    inside = at < end
    v = estimates(table, block * stride, inside, cols, seed_low, seed_high, ROWS)
    tl.store(out + at, v, mask=inside)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "cols", "capacity"])
def query_collecting(
    table, n, seed_low, seed_high, cols, above, capacity, total, offsets, counts, indices, values,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Estimates above a magnitude become candidates; the others are not stored anywhere."""
    block, at = entries(tl.program_id(0).to(tl.int64) * BLOCKS, BLOCKS)
    v = estimates(table, block, at < n, cols, seed_low, seed_high, ROWS)
    at = tl.reshape(at, [BLOCKS * 64])
    v = tl.reshape(v, [BLOCKS * 64])
    kept = (at < n) & (magnitude(v) > tl.load(above))
    append(at, v, kept, tl.program_id(0) >= 0, capacity, total, offsets, counts, indices, values)
