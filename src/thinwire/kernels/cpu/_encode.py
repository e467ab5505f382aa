"""Stochastic codes of one run of entries that share a scale."""

import numpy as np

from thinwire.kernels._levels import CENTRE, LARGEST, TINY_BOOST, TINY_SCALE, shift
from thinwire.kernels.cpu._codes import TILE, pack_tile
from thinwire.kernels.cpu._jit import F32, U8, U16, kernel, reordering
from thinwire.kernels.cpu._random import fill_words, one_to_two
from thinwire.kernels.cpu._simd import LANES, bits_of, float_of
from thinwire.kernels.cpu._simd_codes import encode64_1bit, encode64_2bit, encode64_4bit, encode64_8bit

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_CENTRE = np.float32(CENTRE)
_COIN = np.float32(1.0 - CENTRE)
_TINY = np.float32(TINY_SCALE)
_BOOST = np.float32(TINY_BOOST)
_ADD_2, _ADD_4, _ADD_8 = np.float32(shift(2)), np.float32(shift(4)), np.float32(shift(8))
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
    return float_of(np.int32(top))


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
def inverse_scale(scale: np.float32, s: np.float32) -> np.float32:
    """s / scale, rounded so that scale times it is at most s: no entry leaves the grid."""
    if not scale > _ZERO:
        return _ZERO
    inverse = s / scale
    if scale * inverse > s:
        inverse = float_of(np.int32(bits_of(inverse) - 1))
    return inverse


@kernel
def encode_run(x: F32, scale: np.float32, bits: int, halves: U16, codes: U8, clipped: bool) -> None:
    """The codes of entries under one scale, each rounded by its 16 random bits.

    Entries beyond the scale are clipped if `clipped` says that there may be any.
    """
    s = np.float32((1 << (bits - 1)) - 1) if bits > 1 else _ONE
    if not scale > 0 and bits > 1:  # zero or NaN: the middle code
        for j in range(len(codes)):
            codes[j] = np.uint8(s)
        return
    boost = _BOOST if scale < _TINY else _ONE
    inverse = inverse_scale(scale * boost, s)
    if bits == 1:
        for j in range(len(codes)):
            v = x[j] if scale > _ZERO else _ZERO
            y = max(min((v * boost) * inverse, s), -s)
            codes[j] = np.uint8(one_to_two(halves[j]) < (y + _ONE) * _HALF + _COIN)
        return
    add = s - _ONE + (_CENTRE if bits < 8 else _ZERO)
    if boost == _ONE and not clipped:
        for j in range(len(codes)):
            codes[j] = np.uint8(np.int32((x[j] * inverse + add) + one_to_two(halves[j])))
    else:
        for j in range(len(codes)):
            y = max(min((x[j] * boost) * inverse, s), -s)
            codes[j] = np.uint8(np.int32((y + add) + one_to_two(halves[j])))


@kernel
def encode_blocks(
    x: F32, scale: np.float32, bits: int, counter: np.uint32, key: np.uint32, packed: U8
) -> None:
    """Whole blocks of 64 entries under one scale that is neither tiny nor zero nor NaN."""
    if bits == 8:
        inverse = inverse_scale(scale, np.float32(127.0))
        for at in range(0, len(x), LANES):
            encode64_8bit(x, at, inverse, _ADD_8, np.uint32(counter + np.uint32(at // 2)), key, packed, at)
    elif bits == 4:
        inverse = inverse_scale(scale, np.float32(7.0))
        for at in range(0, len(x), LANES):
            encode64_4bit(
                x, at, inverse, _ADD_4, np.uint32(counter + np.uint32(at // 2)), key, packed, at // 2
            )
    elif bits == 2:
        inverse = inverse_scale(scale, np.float32(1.0))
        for at in range(0, len(x), LANES):
            encode64_2bit(
                x, at, inverse, _ADD_2, np.uint32(counter + np.uint32(at // 2)), key, packed, at // 4
            )
    else:
        inverse = inverse_scale(scale, np.float32(1.0))
        for at in range(0, len(x), LANES):
            encode64_1bit(
                x, at, inverse, _COIN, np.uint32(counter + np.uint32(at // 2)), key, packed, at // 8
            )


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
    clipped: bool,
) -> None:
    """Codes of entries base .. base + len(x) (base a multiple of 8), scales known, packed from byte 0 on.

    `counter` belongs to the word that the first two entries share.
    """
    done = 0
    if (bucket % LANES == 0 and base % LANES == 0) or bucket >= base + len(x):
        while done + LANES <= len(x):
            which = (base + done) // bucket
            end = min(len(x) - len(x) % LANES, (which + 1) * bucket - base)
            if not scales[which] >= _TINY:
                break
            begin = np.uint32(counter + np.uint32(done // 2))
            encode_blocks(x[done:end], scales[which], bits, begin, key, packed[done * bits // 8 :])
            done = end
    if done < len(x):
        encode_rest(x, base, done, scales, bits, bucket, counter, key, packed, clipped)


@kernel
def encode_rest(
    x: F32,
    base: int,
    done: int,
    scales: F32,
    bits: int,
    bucket: int,
    counter: np.uint32,
    key: np.uint32,
    packed: U8,
    clipped: bool,
) -> None:
    """`encode_range` from entry `done` (a multiple of 8) on, for any scales and buckets."""
    codes = np.empty(TILE, np.uint8)
    scratch = np.empty(TILE // 8, np.uint64)
    words = np.empty(TILE // 2, np.uint32)
    halves = words.view(np.uint16)
    for lo in range(done, len(x), TILE):
        hi = min(lo + TILE, len(x))
        fill_words(np.uint32(counter + np.uint32(lo // 2)), key, words[: (hi - lo + 1) // 2])
        at = lo
        while at < hi:
            which = (base + at) // bucket
            end = min(hi, (which + 1) * bucket - base)
            encode_run(
                x[at:end], scales[which], bits, halves[at - lo : end - lo], codes[at - lo : end - lo], clipped
            )
            at = end
        pack_tile(codes, hi - lo, bits, scratch, packed[lo * bits // 8 : (hi * bits + 7) // 8])
