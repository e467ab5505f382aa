# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""The search for Gaussian-k's threshold, one step after each count; the reference explains it."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def as_float32(value):
    """Rounded to a float32 and not beyond the largest, in double precision."""
    return tl.where(value > LARGEST, LARGEST, value).to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize=["k"])
def advance(control, state, k):
    """`control`: entries counted, bits of the threshold, whether to go on, whether this is the result.

    `state`: the threshold, the highest one with too many entries, the lowest with too few (NaN: not known
    yet), and the strides down and up.
    """
    on = tl.load(control + 2) != 0
    number = tl.load(control).to(tl.int64)
    t = tl.load(state)
    low = tl.load(state + 1)
    high = tl.load(state + 2)
    down = tl.load(state + 3)
    up = tl.load(state + 4)
    many = 3 * number > 4 * k.to(tl.int64)
    few = 3 * number < 2 * k.to(tl.int64)
    low = tl.where(many, t, low)  # compared with itself below: whether it is known
    high = tl.where(few, t, high)
    # Thresholds only fall while none has had too many, so the last count has the most of those too few.
    found = (many == 0) & (few == 0)
    ready = found | (few & (number >= 1) & (low != low))  # noqa: PLR0124
    middle = tl.sqrt(low) * tl.sqrt(high)
    t = as_float32(tl.where(low != low, down * t, tl.where(high != high, up * t, middle)))  # noqa: PLR0124
    stuck = (t == low) | (t == high)
    more = (found == 0) & (stuck == 0)
    tl.store(control + 3, ready.to(tl.int32), mask=on)
    tl.store(control + 2, more.to(tl.int32), mask=on)
    tl.store(control + 1, t.to(tl.float32).to(tl.int32, bitcast=True), mask=on & more)
    tl.store(control, 0, mask=on & more)
    tl.store(state, t, mask=on)
    tl.store(state + 1, low, mask=on)
    tl.store(state + 2, high, mask=on)
    tl.store(state + 3, down * down, mask=on)
    tl.store(state + 4, up * up, mask=on)
