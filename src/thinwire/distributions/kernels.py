"""Loops over samples and messages that numpy cannot fuse, compiled by Numba on first use.

Callers check lengths and ranges: Numba does not.
"""

import numpy as np

from thinwire.kernels.cpu._jit import F64, I32, I64, U8, U64, kernel
from thinwire.kernels.cpu._random import mix64

_ONE = np.uint64(1)


@kernel
def parity(value: np.uint64) -> np.int64:
    """1 if an odd number of bits is set."""
    value ^= value >> np.uint64(32)
    value ^= value >> np.uint64(16)
    value ^= value >> np.uint64(8)
    value ^= value >> np.uint64(4)
    return np.int64((np.uint64(0x6996) >> (value & np.uint64(15))) & _ONE)


@kernel
def chance(key: np.uint64, player: int) -> float:
    """A private number in [0, 1) of this player."""
    return np.float64(mix64(key + np.uint64(player)) >> np.uint64(11)) * 2.0**-53


@kernel
def pack(codes: I64, bits: int, out: U8) -> None:
    """Little-endian, `bits` for each code; `out` has ceil(bits * n / 8) bytes."""
    if 8 % bits == 0:  # whole bytes at a time
        each = 8 // bits
        whole = len(codes) // each
        for i in range(whole):
            byte = np.int64(0)
            for j in range(each):
                byte |= codes[i * each + j] << (j * bits)
            out[i] = np.uint8(byte)
        if whole * each < len(codes):
            out[whole] = 0
            for j in range(len(codes) - whole * each):
                out[whole] |= np.uint8(codes[whole * each + j] << (j * bits))
        return
    held = np.uint64(0)
    width = 0
    at = 0
    for j in range(len(codes)):
        held |= np.uint64(codes[j]) << np.uint64(width)
        width += bits
        while width >= 8:
            out[at] = np.uint8(held & np.uint64(255))
            at += 1
            held >>= np.uint64(8)
            width -= 8
    if width:
        out[at] = np.uint8(held & np.uint64(255))


@kernel
def unpack(packed: U8, bits: int, codes: I64) -> np.int64:
    """Undo `pack`; returns the largest code."""
    mask = (_ONE << np.uint64(bits)) - _ONE
    held = np.uint64(0)
    width = 0
    at = 0
    largest = np.int64(0)
    for j in range(len(codes)):
        while width < bits:
            held |= np.uint64(packed[at]) << np.uint64(width)
            at += 1
            width += 8
        code = np.int64(held & mask)
        codes[j] = code
        largest = max(largest, code)
        held >>= np.uint64(bits)
        width -= bits
    return largest


@kernel
def count(values: I64, counts: I64) -> None:
    for j in range(len(values)):
        counts[values[j]] += 1


@kernel
def look_up(x: I64, table: I32, out: I64) -> None:
    for j in range(len(x)):
        out[j] = table[x[j]]


@kernel
def grouping_codes(x: I64, first: int, width: int, groups: int, codes: I64) -> None:
    """Player i looks after block i mod groups: the place in it, from 1, or 0."""
    group = first % groups
    for j in range(len(x)):
        place = x[j] - group * width
        codes[j] = place + 1 if 0 <= place < width else 0
        group += 1
        if group == groups:
            group = 0


@kernel
def grouping_tally(codes: I64, first: int, width: int, groups: int, counts: I64) -> None:
    group = first % groups
    for j in range(len(codes)):
        if codes[j]:
            counts[group * width + codes[j] - 1] += 1
        group += 1
        if group == groups:
            group = 0


@kernel
def split(x: I64, first: int, key: np.uint64, domain: int, out: I64) -> None:
    """Each symbol becomes one of two, by a private coin."""
    for j in range(len(x)):
        coin = np.int64(mix64(key + np.uint64(first + j)) & _ONE)
        out[j] = x[j] + coin * domain


# Accepted samples so far, then of the round: hits, the block and code of the last one, whether it is vetoed.
SIMULATION_STATE = 5


@kernel
def simulate(codes: I64, first: int, width: int, groups: int, domain: int, tally: I64) -> None:
    """Rounds of 2 x groups players; `tally` is the state between calls, then the samples accepted."""
    place = first % (2 * groups)
    for j in range(len(codes)):
        if place == 0:
            tally[1:SIMULATION_STATE] = 0
        code = codes[j]
        if code:
            if place < groups:
                tally[1] += 1
                tally[2] = place
                tally[3] = code
            elif place - groups == tally[2]:
                tally[4] = 1
        place += 1
        if place == 2 * groups:
            place = 0
            if tally[1] == 1 and tally[4] == 0:
                tally[SIMULATION_STATE + tally[0]] = (tally[2] * width + tally[3] - 1) % domain
                tally[0] += 1


@kernel
def hash_codes(x: I64, first: int, key: np.uint64, bits: int, words: U64, codes: I64) -> None:
    """Bit b of player i's hash is the parity of x and its random word, shifted right by b."""
    for j in range(len(x)):
        words[j] = mix64(key + np.uint64(first + j))
        codes[j] = 0
    mask = np.int64((1 << bits) - 1)
    for b in range(0, bits, 2):  # two parities in the halves of a word; no branch, so that it vectorises
        low, high = np.uint64(b), np.uint64(b + 1)
        for j in range(len(x)):
            value = np.uint64(x[j])
            v = ((words[j] >> low) & value) | (((words[j] >> high) & value) << np.uint64(32))
            v = (v ^ (v >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
            v = (v ^ (v >> np.uint64(8))) & np.uint64(0x000000FF000000FF)
            v = (v ^ (v >> np.uint64(4))) & np.uint64(0x0000000F0000000F)
            v = (v ^ (v >> np.uint64(2))) & np.uint64(0x0000000300000003)
            v = (v ^ (v >> _ONE)) & np.uint64(0x0000000100000001)
            codes[j] |= np.int64((v | (v >> np.uint64(31))) << low) & mask


@kernel
def hash_tally(codes: I64, first: int, key: np.uint64, bits: int, mask: np.uint64, spectrum: I64) -> None:
    """Add each message's Walsh spectrum: its 2^bits frequencies, visited in Gray code order."""
    for j in range(len(codes)):
        word = mix64(key + np.uint64(first + j))
        code = codes[j]
        frequency = np.uint64(0)
        sign = 1
        spectrum[0] += 1
        for subset in range(1, 1 << bits):
            b = 0
            while not (subset >> b) & 1:
                b += 1
            frequency ^= (word >> np.uint64(b)) & mask
            if (code >> b) & 1:
                sign = -sign
            spectrum[np.int64(frequency)] += sign


@kernel
def hadamard_codes(x: I64, first: int, block_bits: int, rows: int, codes: I64) -> None:
    """The block of x, and the sign at row i mod rows of the place in it."""
    for j in range(len(x)):
        place = x[j] >> block_bits
        block = x[j] - (place << block_bits)
        row = (first + j) & (rows - 1)
        codes[j] = (block << 1) | parity(np.uint64(row & place))


@kernel
def hadamard_tally(codes: I64, first: int, rows: int, sums: I64) -> None:
    for j in range(len(codes)):
        row = (first + j) & (rows - 1)
        sums[(codes[j] >> 1) * rows + row] += 1 - 2 * (codes[j] & 1)


@kernel
def flip(first: int, key: np.uint64, truth: float, codes: I64) -> None:
    """Turn each one-bit code around, except with probability `truth`."""
    for j in range(len(codes)):
        if chance(key, first + j) >= truth:
            codes[j] ^= 1


@kernel
def response_codes(
    x: I64, first: int, key: np.uint64, other: np.uint64, truth: float, size: int, codes: I64
) -> None:
    """A uniform column where row x + 1 is +1 (with probability `truth`) or -1."""
    for j in range(len(x)):
        row = np.uint64(x[j] + 1)
        column = mix64(other + np.uint64(first + j)) & np.uint64(size - 1)
        wanted = 0 if chance(key, first + j) < truth else 1
        if parity(row & column) != wanted:
            column ^= row & (~row + _ONE)  # the lowest bit of the row: a bijection between the halves
        codes[j] = np.int64(column)


@kernel
def pool_adjacent(values: F64, weights: F64, out: F64) -> None:
    """The non-increasing sequence nearest to `values` in the weighted l2 norm."""
    n = len(values)
    level = np.empty(n)
    weight = np.empty(n)
    length = np.empty(n, np.int64)
    top = 0
    for j in range(n):
        level[top] = values[j]
        weight[top] = weights[j]
        length[top] = 1
        while top > 0 and level[top - 1] < level[top]:
            total = weight[top - 1] + weight[top]
            level[top - 1] = (level[top - 1] * weight[top - 1] + level[top] * weight[top]) / total
            weight[top - 1] = total
            length[top - 1] += length[top]
            top -= 1
        top += 1
    at = 0
    for block in range(top):
        for _ in range(length[block]):
            out[at] = level[block]
            at += 1
