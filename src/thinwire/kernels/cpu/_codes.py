"""Packing b-bit codes into bytes and back: eight codes at a time inside 64-bit words, which vectorises."""

import numpy as np

from thinwire.kernels.cpu._jit import U8, U64, kernel

TILE = 4096

_4A, _4B, _4C = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x0F0F0F0F0F0F0F0F)
_2A, _2B, _2C = np.uint64(0x000F000F000F000F), np.uint64(0x000000FF000000FF), np.uint64(0x0303030303030303)
_1A, _1B, _1C = np.uint64(0x0003000300030003), np.uint64(0x0000000F0000000F), np.uint64(0x0101010101010101)
_4, _8, _16 = np.uint64(4), np.uint64(8), np.uint64(16)
_6, _12, _24 = np.uint64(6), np.uint64(12), np.uint64(24)
_7, _14, _28 = np.uint64(7), np.uint64(14), np.uint64(28)


@kernel
def copy_bytes(to: U8, source: U8) -> None:
    # A loop: slice assignment would go byte by byte.
    for j in range(len(to)):
        to[j] = source[j]


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
    else:
        one = scratch.view(np.uint8)
        for j in range(len(words)):
            x = np.uint64(one[j])
            x = (x | (x << _28)) & _1B
            x = (x | (x << _14)) & _1A
            words[j] = (x | (x << _7)) & _1C
