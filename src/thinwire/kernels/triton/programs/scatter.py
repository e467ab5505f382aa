# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""Programs over lists of indices. The indices of one list differ, so its additions need no atomics."""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.numbers import tile


@triton.jit
def violations(indices, k, numel, found, BLOCK: tl.constexpr):
    """Sets `found` if an index is out of range or does not exceed the one before it."""
    at = tile(BLOCK)
    inside = at < k
    index = tl.load(indices + at, mask=inside, other=0)
    before = tl.load(indices + at - 1, mask=inside & (at > 0), other=-1)
    wrong = inside & ((index <= before) | (index < 0) | (index >= numel))
    tl.atomic_max(found, tl.max(wrong.to(tl.int32), 0))


@triton.jit
def add_at(total, indices, values, k, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < k
    where = tl.load(indices + at, mask=inside, other=0)
    v = tl.load(total + where, mask=inside, other=0.0) + tl.load(values + at, mask=inside, other=0.0)
    tl.store(total + where, v, mask=inside)


@triton.jit(do_not_specialize=["workers"])
def divided_at(total, indices, k, workers, means, BLOCK: tl.constexpr):
    at = tile(BLOCK)
    inside = at < k
    where = tl.load(indices + at, mask=inside, other=0)
    v = tl.load(total + where, mask=inside, other=0.0)
    tl.store(means + at, tl.div_rn(v, (tl.zeros([BLOCK], tl.int32) + workers).to(tl.float32)), mask=inside)


@triton.jit
def store_at(out, indices, values, k, BLOCK: tl.constexpr):
    """Indices may occur more than once, if they come with the same value."""
    at = tile(BLOCK)
    inside = at < k
    where = tl.load(indices + at, mask=inside, other=0)
    tl.store(out + where, tl.load(values + at, mask=inside, other=0.0), mask=inside)
