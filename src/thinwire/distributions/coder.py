"""Whole numbers in few bits: an adaptive binary range coder, compiled by Numba on first use.

A number is coded as its class (how many bits it has, in unary) and the bits below the leading one. Each
binary decision has a probability that is learned from the decisions before it, apart for each context; bits
far below the leading one are written as they are. All arithmetic is on whole numbers, so that every machine
decodes what another has encoded.
"""

import numpy as np

from thinwire.errors import PayloadError
from thinwire.kernels.cpu._jit import I64, U8, kernel

CONTEXTS = 64
# Numbers have fewer than so many bits.
CLASSES = 36
_LEARNED = 4  # bits below the leading one that have probabilities of their own
_NODES = CLASSES + (CLASSES << _LEARNED)
_FULL = 1 << 32
_SMALLEST = 1 << 24
_FORGET = 1 << 14
# The state of a coder: its interval, the code read, the place in the bytes, the byte held back and how
# often, and whether a byte did not fit.
_LOW, _RANGE, _CODE, _AT, _HELD, _PENDING, _OVER = range(7)


@kernel
def _chance(seen: I64) -> np.int64:
    """The probability of a zero, in 1 / 65,536."""
    chance = ((2 * seen[0] + 1) << 16) // (2 * (seen[0] + seen[1]) + 2)
    return min(max(chance, 16), (1 << 16) - 16)


@kernel
def _learn(seen: I64, bit: np.int64) -> None:
    seen[bit] += 1
    if seen[0] + seen[1] > _FORGET:
        seen[0] >>= 1
        seen[1] >>= 1


@kernel
def _put(state: I64, out: U8) -> None:
    """Move the highest byte of the low end out; a carry goes into bytes that were held back."""
    if state[_LOW] < 0xFF000000 or state[_LOW] >= _FULL:
        carry = state[_LOW] >> 32
        byte = state[_HELD]
        while state[_PENDING] > 0:
            at = state[_AT]
            value = (byte + carry) & 0xFF
            if 0 <= at < len(out):  # the very first byte is always 0 and is left out
                out[at] = np.uint8(value)
            elif value:
                state[_OVER] = 1
            state[_AT] = at + 1
            byte = 0xFF
            state[_PENDING] -= 1
        state[_HELD] = (state[_LOW] >> 24) & 0xFF
    state[_PENDING] += 1
    state[_LOW] = (state[_LOW] & 0x00FFFFFF) << 8


@kernel
def _write(bit: np.int64, chance: np.int64, state: I64, out: U8) -> None:
    bound = (state[_RANGE] >> 16) * chance
    if bit:
        state[_LOW] += bound
        state[_RANGE] -= bound
    else:
        state[_RANGE] = bound
    while state[_RANGE] < _SMALLEST:
        state[_RANGE] <<= 8
        _put(state, out)


@kernel
def _next(state: I64, packed: U8) -> np.int64:
    """The next byte; zeros after the last."""
    at = state[_AT]
    state[_AT] += 1
    return np.int64(packed[at]) if at < len(packed) else np.int64(0)


@kernel
def _read(chance: np.int64, state: I64, packed: U8) -> np.int64:
    bound = (state[_RANGE] >> 16) * chance
    bit = np.int64(state[_CODE] >= bound)
    if bit:
        state[_CODE] -= bound
        state[_RANGE] -= bound
    else:
        state[_RANGE] = bound
    while state[_RANGE] < _SMALLEST:
        state[_RANGE] <<= 8
        state[_CODE] = (state[_CODE] << 8) | _next(state, packed)
    return bit


@kernel
def _encode(values: I64, contexts: I64, out: U8) -> bool:
    """False if the bytes do not fit; zeros at the end need not."""
    seen = np.zeros((CONTEXTS * _NODES, 2), np.int64)
    state = np.zeros(7, np.int64)
    state[_RANGE] = _FULL - 1
    state[_AT] = -1
    state[_PENDING] = 1
    for j in range(len(values)):
        value = values[j] + 1
        size = 0
        while value >> (size + 1):
            size += 1
        base = contexts[j] * _NODES
        for c in range(size + 1):
            node = seen[base + c]
            bit = np.int64(c < size)
            _write(bit, _chance(node), state, out)
            _learn(node, bit)
        prefix = 1
        base += CLASSES + (size << _LEARNED)
        for b in range(size - 1, -1, -1):
            bit = (value >> b) & 1
            if prefix < (1 << _LEARNED):
                node = seen[base + prefix]
                _write(bit, _chance(node), state, out)
                _learn(node, bit)
                prefix = 2 * prefix + bit
            else:
                _write(bit, np.int64(1 << 15), state, out)
        if state[_OVER]:
            return False
    # Of all numbers in the last range, the one that ends in most zeros: those need not be sent.
    for zeros in range(32, -1, -1):
        rounded = ((state[_LOW] + (1 << zeros) - 1) >> zeros) << zeros
        if rounded < state[_LOW] + state[_RANGE]:
            state[_LOW] = rounded
            break
    for _ in range(5):
        _put(state, out)
    return state[_OVER] == 0


@kernel
def _decode(packed: U8, contexts: I64, values: I64) -> bool:
    """False if a number is too large."""
    seen = np.zeros((CONTEXTS * _NODES, 2), np.int64)
    state = np.zeros(7, np.int64)
    state[_RANGE] = _FULL - 1
    for _ in range(4):
        state[_CODE] = (state[_CODE] << 8) | _next(state, packed)
    for j in range(len(values)):
        base = contexts[j] * _NODES
        size = 0
        while True:
            node = seen[base + size]
            bit = _read(_chance(node), state, packed)
            _learn(node, bit)
            if not bit:
                break
            size += 1
            if size >= CLASSES:
                return False
        prefix = 1
        value = np.int64(1)
        base += CLASSES + (size << _LEARNED)
        for _ in range(size):
            if prefix < (1 << _LEARNED):
                node = seen[base + prefix]
                bit = _read(_chance(node), state, packed)
                _learn(node, bit)
                prefix = 2 * prefix + bit
            else:
                bit = _read(np.int64(1 << 15), state, packed)
            value = 2 * value + bit
        values[j] = value - 1
    return True


def encode(values: I64, contexts: I64, limit: int) -> U8 | None:
    """Numbers from 0 on, below 2^(CLASSES - 1), in `limit` bytes or fewer; None if they do not fit."""
    out = np.zeros(max(0, limit), np.uint8)
    if not _encode(values, contexts, out):
        return None
    needed = np.flatnonzero(out)
    return out[: int(needed[-1]) + 1 if len(needed) else 0]


def decode(packed: U8, contexts: I64) -> I64:
    """Undo `encode`. Bytes that it does not make are a PayloadError."""
    values = np.empty(len(contexts), np.int64)
    if _decode(packed, contexts, values):
        again = encode(values, contexts, len(packed))
        if again is not None and np.array_equal(again, packed):
            return values
    raise PayloadError(f"{len(packed)} bytes are no coded numbers")
