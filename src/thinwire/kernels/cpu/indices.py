"""Index codes on the CPU: one pass over the indices, bit by bit into bytes."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu._jit import I32, U8, kernel


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
def decode(plain: U8, low: int, found: I32) -> bool:
    """`found` holds the unary part's bit positions and becomes the indices; False if one exceeds int32."""
    mask = (1 << low) - 1
    held = np.int64(0)
    width = 0
    at = 0
    for j in range(len(found)):
        while width < low:
            held |= np.int64(plain[at]) << width
            at += 1
            width += 8
        index = ((np.int64(found[j]) - j) << low) | (held & mask)
        if index > 2147483647:
            return False
        found[j] = index
        held >>= low
        width -= low
    return True


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
    if bits_set(array[plain:], found.numpy()) != k or not decode(array[:plain], low, found.numpy()):
        return None
    return found


def warm() -> None:
    indices = torch.tensor([1, 5, 70], dtype=torch.int32)
    from_bitmap(bitmap(indices, 100))
    from_elias_fano(elias_fano(indices, 100, 5), 3, 5, 2)
