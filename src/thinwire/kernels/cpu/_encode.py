"""Stochastic codes of one run of entries that share a scale."""

import numpy as np

from thinwire.kernels._levels import LARGEST, TINY_BOOST, TINY_SCALE
from thinwire.kernels.cpu._codes import TILE, pack_tile
from thinwire.kernels.cpu._jit import F32, U8, kernel, reordering
from thinwire.kernels.cpu._random import uniform

_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_TINY = np.float32(TINY_SCALE)
_BOOST = np.float32(TINY_BOOST)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


@kernel
def largest_bits(x: F32) -> int:
    """The largest magnitude as an integer; NaN above infinity."""
    bits = x.view(np.int32)
    top = np.int32(0)
    for j in range(len(bits)):
        top = max(top, bits[j] & _MAGNITUDE)
    return int(top)


@reordering
def squares(x: F32) -> float:
    total = 0.0
    for j in range(len(x)):
        v = np.float64(x[j])
        total += v * v
    return total


@kernel
def scale_from_bits(top: int) -> np.float32:
    if top >= _INFINITY:
        return np.float32(np.nan)
    box = np.empty(1, np.int32)
    box[0] = top
    return box.view(np.float32)[0]


@kernel
def scale_from_squares(total: float) -> np.float32:
    if not np.isfinite(total):
        return np.float32(np.nan)
    return np.float32(min(np.sqrt(total), LARGEST))


@kernel
def run_scale(x: F32, l2: bool) -> np.float32:
    if l2:
        return scale_from_squares(squares(x))
    return scale_from_bits(largest_bits(x))


@kernel
def encode_run(x: F32, scale: np.float32, bits: int, counter: np.uint32, key: np.uint32, codes: U8) -> None:
    """The codes of entries under one scale; `counter` belongs to the first of them."""
    s = np.float32((1 << (bits - 1)) - 1) if bits > 1 else _ONE
    if not scale > 0:  # zero or NaN: the middle code, or a fair coin
        if bits > 1:
            codes[:] = np.uint8(s)
        else:
            for j in range(len(codes)):
                codes[j] = np.uint8(uniform(np.uint32(counter + np.uint32(j)), key) < _HALF)
        return
    boost = _BOOST if scale < _TINY else _ONE
    inverse = s / (scale * boost)
    if bits == 1:
        for j in range(len(codes)):
            y = max(min((x[j] * boost) * inverse, s), -s)
            u = uniform(np.uint32(counter + np.uint32(j)), key)
            codes[j] = np.uint8(u < (y + _ONE) * _HALF)
    else:
        for j in range(len(codes)):
            y = max(min((x[j] * boost) * inverse, s), -s)
            low = np.floor(y)
            u = uniform(np.uint32(counter + np.uint32(j)), key)
            codes[j] = np.uint8(np.int32(low + s) + np.int32(u < y - low))


@kernel
def encode_range(
    x: F32,
    base: int,
    scales: F32,
    bits: int,
    bucket: int,
    counter: np.uint32,
    key: np.uint32,
    packed: U8,
) -> None:
    """Codes of entries base .. base + len(x) (base a multiple of 8), scales known, packed from byte 0 on."""
    codes = np.empty(TILE, np.uint8)
    scratch = np.empty(TILE // 8, np.uint64)
    for lo in range(0, len(x), TILE):
        hi = min(lo + TILE, len(x))
        at = lo
        while at < hi:
            which = (base + at) // bucket
            end = min(hi, (which + 1) * bucket - base)
            begin = np.uint32(counter + np.uint32(at))
            encode_run(x[at:end], scales[which], bits, begin, key, codes[at - lo : end - lo])
            at = end
        pack_tile(codes, hi - lo, bits, scratch, packed[lo * bits // 8 : (hi * bits + 7) // 8])
