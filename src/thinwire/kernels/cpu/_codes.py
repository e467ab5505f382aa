"""Stochastic codes of entries that share a scale, and packing codes of b bits into bytes and back.

Packing works on eight codes at a time inside 64-bit words, which vectorises.
"""

import numpy as np

from thinwire.kernels.cpu._jit import F32, U8, U16, U64, kernel, reordering
from thinwire.kernels.cpu._random import fill_words, one_to_two
from thinwire.kernels.cpu._simd import LANES, bits_of, float_of
from thinwire.kernels.cpu._simd_codes import encode64
from thinwire.kernels.reference.quantisation import CENTRE, LARGEST, TINY_BOOST, TINY_SCALE, shift

TILE = 4096

_4A, _4B, _4C = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x0F0F0F0F0F0F0F0F)
_2A, _2B, _2C = np.uint64(0x000F000F000F000F), np.uint64(0x000000FF000000FF), np.uint64(0x0303030303030303)
_1A, _1B, _1C = np.uint64(0x0003000300030003), np.uint64(0x0000000F0000000F), np.uint64(0x0101010101010101)
_4, _8, _16 = np.uint64(4), np.uint64(8), np.uint64(16)
_TWO, _32, _64 = np.uint64(2), np.uint64(32), np.uint64(64)
_6, _12, _24 = np.uint64(6), np.uint64(12), np.uint64(24)
_7, _14, _28 = np.uint64(7), np.uint64(14), np.uint64(28)
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
def copy_bytes(to: U8, source: U8) -> None:
    # A loop: slice assignment would go byte by byte.
    for j in range(len(to)):
        to[j] = source[j]


@kernel
def spread(bits: np.uint64, places: np.uint64) -> np.uint64:
    """A mask with the low `bits` bits of every `places` bits."""
    mask, part = np.uint64(0), (np.uint64(1) << bits) - np.uint64(1)
    for at in range(0, 64, int(places)):
        mask |= part << np.uint64(at)
    return mask


@kernel
def pack_words(words: U64, bits: np.uint64, out: U8) -> None:
    """Eight codes of any width in every word, to `bits` bytes each."""
    ones, twos, fours = spread(bits, _16), spread(_TWO * bits, _32), spread(_4 * bits, _64)
    size = int(bits)
    for j in range(len(words)):
        x = words[j]
        x = (x & ones) | ((x & (ones << _8)) >> (_8 - bits))
        x = (x & twos) | ((x & (twos << _16)) >> (_16 - _TWO * bits))
        x = (x & fours) | ((x & (fours << _32)) >> (_32 - _4 * bits))
        for k in range(size):
            out[size * j + k] = np.uint8(x >> np.uint64(8 * k))


@kernel
def unpack_words(packed: U8, bits: np.uint64, words: U64) -> None:
    """Undo `pack_words`."""
    ones, twos, fours = spread(bits, _16), spread(_TWO * bits, _32), spread(_4 * bits, _64)
    size = int(bits)
    for j in range(len(words)):
        x = np.uint64(0)
        for k in range(size):
            x |= np.uint64(packed[size * j + k]) << np.uint64(8 * k)
        x = (x & fours) | ((x << (_32 - _4 * bits)) & (fours << _32))
        x = (x & twos) | ((x << (_16 - _TWO * bits)) & (twos << _16))
        words[j] = (x & ones) | ((x << (_8 - bits)) & (ones << _8))


@kernel
def pack_tile(codes: U8, n: int, bits: int, scratch: U64, out: U8) -> None:
    """Pack n codes (a tile at most, in a buffer of TILE) into ceil(bits * n / 8) bytes of `out`."""
    for j in range(n, (n + 7) // 8 * 8):
        codes[j] = 0
    words = codes.view(np.uint64)[: (n + 7) // 8]
    size = (bits * n + 7) // 8
    if bits == 8:
        copy_bytes(out[:size], codes[:size])
    elif bits == 4:
        four = scratch.view(np.uint32)
        for j in range(len(words)):
            x = words[j]
            x = (x | (x >> _4)) & _4A
            x = (x | (x >> _8)) & _4B
            four[j] = np.uint32(x | (x >> _16))
        copy_bytes(out[:size], scratch.view(np.uint8)[:size])
    elif bits == 2:
        two = scratch.view(np.uint16)
        for j in range(len(words)):
            x = words[j]
            x = (x | (x >> _6)) & _2A
            x = (x | (x >> _12)) & _2B
            two[j] = np.uint16(x | (x >> _24))
        copy_bytes(out[:size], scratch.view(np.uint8)[:size])
    elif bits != 1:
        pack_words(words, np.uint64(bits), scratch.view(np.uint8))
        copy_bytes(out[:size], scratch.view(np.uint8)[:size])
    else:
        one = scratch.view(np.uint8)
        for j in range(len(words)):
            x = words[j]
            x = (x | (x >> _7)) & _1A
            x = (x | (x >> _14)) & _1B
            one[j] = np.uint8(x | (x >> _28))
        copy_bytes(out[:size], one[:size])


@kernel
def unpack_tile(packed: U8, n: int, bits: int, scratch: U64, codes: U8) -> None:
    """Undo `pack_tile`: n codes, a byte each, from the first bytes of `packed`, at whatever address."""
    size = (bits * n + 7) // 8
    if bits == 8:
        copy_bytes(codes[:n], packed[:n])
        return
    copy_bytes(scratch.view(np.uint8)[:size], packed[:size])
    words = codes.view(np.uint64)[: (n + 7) // 8]
    if bits == 4:
        four = scratch.view(np.uint32)
        for j in range(len(words)):
            x = np.uint64(four[j])
            x = (x | (x << _16)) & _4B
            x = (x | (x << _8)) & _4A
            words[j] = (x | (x << _4)) & _4C
    elif bits == 2:
        two = scratch.view(np.uint16)
        for j in range(len(words)):
            x = np.uint64(two[j])
            x = (x | (x << _24)) & _2B
            x = (x | (x << _12)) & _2A
            words[j] = (x | (x << _6)) & _2C
    elif bits != 1:
        unpack_words(scratch.view(np.uint8), np.uint64(bits), words)
    else:
        one = scratch.view(np.uint8)
        for j in range(len(words)):
            x = np.uint64(one[j])
            x = (x | (x << _28)) & _1B
            x = (x | (x << _14)) & _1A
            words[j] = (x | (x << _7)) & _1C


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
            encode64(8, x, at, inverse, _ADD_8, np.uint32(counter + np.uint32(at // 2)), key, packed, at)
    elif bits == 4:
        inverse = inverse_scale(scale, np.float32(7.0))
        for at in range(0, len(x), LANES):
            encode64(4, x, at, inverse, _ADD_4, np.uint32(counter + np.uint32(at // 2)), key, packed, at // 2)
    elif bits == 2:
        inverse = inverse_scale(scale, np.float32(1.0))
        for at in range(0, len(x), LANES):
            encode64(2, x, at, inverse, _ADD_2, np.uint32(counter + np.uint32(at // 2)), key, packed, at // 4)
    else:
        inverse = inverse_scale(scale, np.float32(1.0))
        for at in range(0, len(x), LANES):
            encode64(1, x, at, inverse, _COIN, np.uint32(counter + np.uint32(at // 2)), key, packed, at // 8)


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
