"""Index codes on the CPU: one pass over the indices, bit by bit into bytes."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu._jit import I32, U8, kernel

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ONES = _BITS.sum(1).astype(np.uint8)
# The places of the ones in each byte come first.
_PLACES = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8).ravel()


@kernel
def set_bits(indices: I32, code: U8) -> None:
    for j in range(len(indices)):
        i = indices[j]
        code[i >> 3] |= np.uint8(1 << (i & 7))


@kernel
def bits_set(code: U8, found: I32) -> int:
    """The positions of set bits, as many as fit; returns how many there are."""
    count = 0
    for byte in range(len(code)):
        rest = np.int64(code[byte])
        bit = 8 * byte
        while rest:
            if rest & 1:
                if count < len(found):
                    found[count] = bit
                count += 1
            rest >>= 1
            bit += 1
    return count


@kernel
def encode(indices: I32, low: int, plain: U8, unary: U8) -> None:
    mask = (1 << low) - 1
    held = np.int64(0)
    width = 0
    at = 0
    for j in range(len(indices)):
        i = np.int64(indices[j])
        held |= (i & mask) << width
        width += low
        while width >= 8:
            plain[at] = np.uint8(held & 255)
            at += 1
            held >>= 8
            width -= 8
        bit = (i >> low) + j
        unary[bit >> 3] |= np.uint8(1 << (bit & 7))
    if width:
        plain[at] = np.uint8(held & 255)


@kernel
def decode(plain: U8, unary: U8, low: int, places: U8, ones: U8, found: I32) -> bool:
    """False if there are not exactly as many indices as there is room for, or if one exceeds int32.

    `places` has the bits that are set in each byte, eight at most, and `ones` their number.
    """
    k = len(found)
    mask = (1 << low) - 1
    held = np.int64(0)
    width = 0
    at = 0
    count = 0
    for byte in range(len(unary)):
        value = np.int64(unary[byte])
        if count + ones[value] > k:
            return False
        for e in range(8 * value, 8 * value + ones[value]):
            while width < low:
                held |= np.int64(plain[at]) << width
                at += 1
                width += 8
            index = (np.int64(8 * byte + places[e] - count) << low) | (held & mask)
            if index > 2147483647:
                return False
            found[count] = index
            held >>= low
            width -= low
            count += 1
    return count == k


@kernel
def rice_encode(marked: I32, low: int, signed: int, plain: U8, unary: U8) -> int:
    """Returns the length of the unary part in bits."""
    mask = (1 << low) - 1
    step = low + signed
    held = np.int64(0)
    width = 0
    at = 0
    bit = 0
    expected = np.int64(0)  # the index that would follow the last one without a gap
    for j in range(len(marked)):
        index = np.int64(marked[j]) & 0x7FFFFFFF
        gap = index - expected
        expected = index + 1
        field = gap & mask
        if signed and marked[j] < 0:
            field |= mask + 1
        held |= field << width
        width += step
        while width >= 8:
            plain[at] = np.uint8(held & 255)
            at += 1
            held >>= 8
            width -= 8
        bit += gap >> low
        unary[bit >> 3] |= np.uint8(1 << (bit & 7))
        bit += 1
    if width:
        plain[at] = np.uint8(held & 255)
    return int(bit)


@kernel
def rice_decode(
    plain: U8, unary: U8, n: int, low: int, signed: int, places: U8, ones: U8, found: I32
) -> bool:
    """False if the code does not hold exactly as many indices below n as there is room for.

    `places` has the bits that are set in each byte, eight at most, and `ones` their number.
    """
    k = len(found)
    mask = (1 << low) - 1
    step = low + signed
    held = np.int64(0)
    width = 0
    at = 0
    count = 0
    next_bit = 0  # behind the last one in the unary part
    expected = np.int64(0)  # the index that would follow the last one without a gap
    for byte in range(len(unary)):
        value = np.int64(unary[byte])
        if count + ones[value] > k:
            return False
        for e in range(8 * value, 8 * value + ones[value]):
            while width < step:
                held |= np.int64(plain[at]) << width
                at += 1
                width += 8
            bit = 8 * byte + places[e]
            index = expected + (((bit - next_bit) << low) | (held & mask))
            if index >= n:
                return False
            found[count] = index - 2147483648 if (held >> low) & signed else index
            held >>= step
            width -= step
            count += 1
            next_bit = bit + 1
            expected = index + 1
    return count == k and next_bit > 8 * (len(unary) - 1)


def bitmap(indices: Tensor, n: int) -> Tensor:
    code = torch.zeros((n + 7) // 8, dtype=torch.uint8)
    set_bits(indices.numpy(), code.numpy())
    return code


def from_bitmap(code: Tensor) -> Tensor:
    array = code.numpy()
    found = torch.empty(bits_set(array, np.empty(0, np.int32)), dtype=torch.int32)
    bits_set(array, found.numpy())
    return found


def elias_fano(indices: Tensor, n: int, low: int) -> Tensor:
    k = indices.numel()
    plain = (k * low + 7) // 8
    code = torch.zeros(plain + (k + (n >> low) + 8) // 8, dtype=torch.uint8)
    array = code.numpy()
    encode(indices.numpy(), low, array[:plain], array[plain:])
    return code


def from_elias_fano(code: Tensor, k: int, low: int, plain: int) -> Tensor | None:
    array = code.numpy()
    found = torch.empty(k, dtype=torch.int32)
    good = decode(array[:plain], array[plain:], low, _PLACES, _ONES, found.numpy())
    return found if good else None


def rice(marked: Tensor, n: int, low: int, signed: int) -> Tensor:
    k = marked.numel()
    plain = (k * (low + signed) + 7) // 8
    code = torch.zeros(plain + (k + (n >> low) + 7) // 8, dtype=torch.uint8)
    array = code.numpy()
    bits = rice_encode(marked.numpy(), low, signed, array[:plain], array[plain:])
    return code[: plain + (bits + 7) // 8]


def from_rice(code: Tensor, n: int, k: int, low: int, signed: int, plain: int) -> Tensor | None:
    array = code.numpy()
    found = torch.empty(k, dtype=torch.int32)
    good = rice_decode(array[:plain], array[plain:], n, low, signed, _PLACES, _ONES, found.numpy())
    return found if good else None


def warm() -> None:
    indices = torch.tensor([1, 5, 70], dtype=torch.int32)
    from_bitmap(bitmap(indices, 100))
    from_elias_fano(elias_fano(indices, 100, 5), 3, 5, 2)
    from_rice(rice(indices, 100, 4, 1), 100, 3, 4, 1, 2)
