# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
"""GSpar's sampling: what is certain or drawn goes to a buffer in one pass, then to two lists in order."""

import triton
import triton.language as tl

from thinwire.kernels.triton.programs.candidates import append, candidates, is_whole
from thinwire.kernels.triton.programs.numbers import loaded, number_of, place_of, tile, word


@triton.jit
def certain_or_drawn(v, at, factor, key_a, key_b):
    """Certain with p = factor |v| of 1 or more, or not a number; else drawn with the probability p."""
    p = tl.abs(v) * factor
    unsure = p < 1.0
    limit = (tl.where(unsure, p, 0.0) * 2147483648.0).to(tl.int32)
    draw = (word(at, key_a, key_b) >> 1).to(tl.int32)
    return unsure == 0, unsure & (draw < limit)


@triton.jit(do_not_specialize=["key_a", "key_b", "capacity"])
def draw(
    x,
    n,
    factor,
    key_a,
    key_b,
    capacity,
    total,
    offsets,
    counts,
    indices,
    values,
    certain_counts,
    BLOCK: tl.constexpr,
):
    at = tile(BLOCK)
    inside = at < n
    v = loaded(x, None, at, inside)
    certain, drawn = certain_or_drawn(v, at, tl.load(factor), key_a, key_b)
    append(
        at,
        v,
        inside & (certain | drawn),
        tl.program_id(0) >= 0,
        capacity,
        total,
        offsets,
        counts,
        indices,
        values,
    )
    tl.store(certain_counts + tl.program_id(0), number_of(inside & certain))


@triton.jit(do_not_specialize=["key_a", "key_b", "capacity"])
def write_drawn(
    x,
    n,
    factor,
    key_a,
    key_b,
    capacity,
    total,
    offsets,
    counts,
    indices,
    values,
    certain_before,
    drawn_before,
    certain_indices,
    certain_values,
    drawn_indices,
    BLOCK: tl.constexpr,
):
    """Draws again, from the buffer, or from the tensor if the buffer was too small."""
    whole = is_whole(total, 0, capacity)
    where, v, from_tensor, from_buffer = candidates(
        x, None, n, offsets, counts, indices, values, whole, BLOCK
    )
    valid = from_tensor | from_buffer
    certain, drawn = certain_or_drawn(v, where, tl.load(factor), key_a, key_b)
    certain = certain & valid
    drawn = drawn & valid
    to = tl.load(certain_before + tl.program_id(0)) + place_of(certain)
    tl.store(certain_indices + to, where, mask=certain)
    tl.store(certain_values + to, v, mask=certain)
    to = tl.load(drawn_before + tl.program_id(0)) + place_of(drawn)
    tl.store(drawn_indices + to, tl.where(v < 0, where | -2147483648, where), mask=drawn)
