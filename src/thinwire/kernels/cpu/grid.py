"""The grid of double quantisation on the CPU: any step, 1 to 48 bits a code, float32 or float64 vectors.

A code c of b bits means (c - 2^(b-1)) * step: the grid of AsyLPG, whose step follows the distance that the
parameters have gone, where the quantiser of `quantisation.py` has one scale a bucket and four widths.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._jit import U8, kernel
from thinwire.kernels.cpu._random import word

Vector = NDArray[Any]

MAX_BITS = 48
_UNIT = 2.0**-32
_BYTE = np.uint64(255)
_EIGHT = np.uint64(8)
_ONE = np.uint64(1)


@kernel
def distances(x: Vector, centre: Vector) -> tuple[float, float, float]:
    """The square of the distance between the two, the largest |x|, and the largest |x - centre|."""
    square, largest, farthest = 0.0, 0.0, 0.0
    for j in range(len(x)):
        v = np.float64(x[j])
        away = v - np.float64(centre[j])
        square += away * away
        largest = max(largest, abs(v))
        farthest = max(farthest, abs(away))
    return square, largest, farthest


@kernel
def encode(
    x: Vector, centre: Vector, step: float, bits: int, counter: np.uint32, key: np.uint32, out: U8
) -> None:
    """Codes of x - centre (of x, if `centre` is empty), rounded at random and without bias, then packed."""
    half = 2.0 ** (bits - 1)
    highest = 2.0 * half - 1.0
    centred = len(centre) > 0
    held, width, at = np.uint64(0), 0, 0
    for j in range(len(x)):
        y = np.float64(x[j])
        if centred:
            y -= np.float64(centre[j])
        y /= step
        low = np.floor(y)
        chance = np.float64(word(np.uint32(counter + np.uint32(j)), key)) * _UNIT
        if chance < y - low:
            low += 1.0
        code = min(max(low + half, 0.0), highest)
        held |= np.uint64(code) << np.uint64(width)
        width += bits
        while width >= 8:
            out[at] = np.uint8(held & _BYTE)
            held >>= _EIGHT
            width -= 8
            at += 1
    if width:
        out[at] = np.uint8(held & _BYTE)


@kernel
def decode(packed: U8, centre: Vector, step: float, bits: int, out: Vector) -> None:
    """Undo `encode`: `packed` has ceil(bits * len(out) / 8) bytes."""
    half = 2.0 ** (bits - 1)
    mask = (_ONE << np.uint64(bits)) - _ONE
    centred = len(centre) > 0
    held, width, at = np.uint64(0), 0, 0
    for j in range(len(out)):
        while width < bits:
            held |= np.uint64(packed[at]) << np.uint64(width)
            at += 1
            width += 8
        value = (np.float64(held & mask) - half) * step
        held >>= np.uint64(bits)
        width -= bits
        out[j] = np.float64(centre[j]) + value if centred else value


@kernel
def proximal_step(x: Vector, update: Vector, full: Vector, rate: float, l1: float, l2: float) -> None:
    """x = prox(x - rate * (update + full)) of l1 |x| + l2 / 2 x^2, in place."""
    cut = rate * l1
    shrink = 1.0 + rate * l2
    for j in range(len(x)):
        v = x[j] - rate * (update[j] + full[j])
        if cut > 0.0:
            v = max(v - cut, 0.0) if v > 0.0 else min(v + cut, 0.0)
        x[j] = v / shrink


@kernel
def couple(x: Vector, y: Vector, snapshot: Vector, theta: float, total: Vector) -> None:
    """x = snapshot + theta (y - snapshot), which is added to `total`."""
    for j in range(len(x)):
        x[j] = snapshot[j] + theta * (y[j] - snapshot[j])
        total[j] += x[j]


def warm() -> None:
    for dtype in (np.float32, np.float64):
        x, nothing = np.linspace(-1, 1, 9).astype(dtype), np.empty(0, dtype)
        packed = np.zeros(5, np.uint8)
        for centre in (x, nothing):
            encode(x, centre, 0.25, 4, np.uint32(1), np.uint32(2), packed)
            decode(packed, centre, 0.25, 4, x.copy())
        distances(x, x)
        proximal_step(x.copy(), x, x, 0.1, 0.0, 0.0)
        couple(x.copy(), x, x, 0.5, np.zeros(9))
