"""LAQ on the CPU: one pass for the radius, one for the codes, one for the update or the last two at once."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._codes import TILE, pack_tile, scale_from_bits, unpack_tile
from thinwire.kernels.cpu._jit import F32, F64, U8, kernel
from thinwire.kernels.cpu._simd import LANES, bits_of
from thinwire.kernels.cpu._simd_codes import add_decoded64, encode_difference64
from thinwire.kernels.cpu._sums import rows_for, tile_sums, total_of
from thinwire.kernels.cpu._tensors import Source, view
from thinwire.kernels.reference.laq import TINY_STEP

T = TypeVar("T")

_MAGNITUDE = np.int32(0x7FFFFFFF)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TINY = np.float32(TINY_STEP)


@kernel
def largest_difference(grad: F32, last: F32) -> int:
    """max |grad - last| as an integer; NaN above infinity."""
    top = np.int32(0)
    for j in range(len(grad)):
        top = max(top, bits_of(grad[j] - last[j]) & _MAGNITUDE)
    return int(top)


@kernel
def encode_difference(
    grad: F32, last: F32, radius: np.float32, step: np.float32, bits: int, update: bool, packed: U8
) -> None:
    """All codes of the range, which begins with a byte; with `update` the state moves at once."""
    done = 0
    if step > _TINY and in_blocks(bits):
        done = len(grad) - len(grad) % LANES
        encode_blocks(grad[:done], last[:done], radius, step, bits, update, packed)
    codes = np.empty(TILE, np.uint8)
    scratch = np.empty(TILE // 8, np.uint64)
    top = np.float32((1 << bits) - 1)
    for lo in range(done, len(grad), TILE):
        hi = min(lo + TILE, len(grad))
        g, q = grad[lo:hi], last[lo:hi]
        # Never negative, since no difference exceeds the radius: cutting off is rounding down.
        if step > _TINY:
            inverse = _ONE / step
            for j in range(len(g)):
                codes[j] = np.uint8(np.int32(min(((g[j] - q[j]) + radius) * inverse + _HALF, top)))
        else:
            for j in range(len(g)):
                codes[j] = np.uint8(np.int32(min(((g[j] - q[j]) + radius) / step + _HALF, top)))
        if update:
            move(q, codes, radius, step)
        pack_tile(codes, hi - lo, bits, scratch, packed[lo * bits // 8 : (hi * bits + 7) // 8])


@kernel
def move(last: F32, codes: U8, radius: np.float32, step: np.float32) -> None:
    for j in range(len(last)):
        last[j] += np.float32(codes[j]) * step - radius


@kernel
def encode_blocks(
    grad: F32, last: F32, radius: np.float32, step: np.float32, bits: int, update: bool, packed: U8
) -> None:
    """Whole blocks of 64, from memory to packed codes without a stop in between."""
    if bits == 8:
        for at in range(0, len(grad), LANES):
            encode_difference64(8, grad, last, at, radius, step, update, packed, at)
    elif bits == 4:
        for at in range(0, len(grad), LANES):
            encode_difference64(4, grad, last, at, radius, step, update, packed, at // 2)
    elif bits == 2:
        for at in range(0, len(grad), LANES):
            encode_difference64(2, grad, last, at, radius, step, update, packed, at // 4)
    else:
        for at in range(0, len(grad), LANES):
            encode_difference64(1, grad, last, at, radius, step, update, packed, at // 8)


@kernel
def in_blocks(bits: int) -> bool:
    """Whether codes of this width are made and read in blocks of 64; the others go by tiles."""
    return bits in (1, 2, 4, 8)


@kernel
def apply_difference(last: F32, packed: U8, radius: np.float32, step: np.float32, bits: int) -> None:
    done = 0
    if in_blocks(bits):
        done = len(last) - len(last) % LANES
        apply_blocks(last[:done], packed, radius, step, bits)
    codes = np.empty(TILE, np.uint8)
    scratch = np.empty(TILE // 8, np.uint64)
    for lo in range(done, len(last), TILE):
        hi = min(lo + TILE, len(last))
        unpack_tile(packed[lo * bits // 8 : (hi * bits + 7) // 8], hi - lo, bits, scratch, codes)
        move(last[lo:hi], codes, radius, step)


@kernel
def apply_blocks(last: F32, packed: U8, radius: np.float32, step: np.float32, bits: int) -> None:
    """`apply_difference` of whole blocks of 64."""
    if bits == 8:
        for at in range(0, len(last), LANES):
            add_decoded64(8, last, at, packed, at, step, radius)
    elif bits == 4:
        for at in range(0, len(last), LANES):
            add_decoded64(4, last, at, packed, at // 2, step, radius)
    elif bits == 2:
        for at in range(0, len(last), LANES):
            add_decoded64(2, last, at, packed, at // 4, step, radius)
    else:
        for at in range(0, len(last), LANES):
            add_decoded64(1, last, at, packed, at // 8, step, radius)


@kernel
def squared_distance(a: F32, b: F32, scratch: F32) -> float:
    difference = scratch[: len(a)]
    for j in range(len(a)):
        difference[j] = a[j] - b[j]
    return tile_sums(difference)[1]


@kernel
def norms_range(
    grad: F32, last: F32, packed: U8, radius: np.float32, step: np.float32, bits: int, block: int, out: F64
) -> None:
    """Per block (squared distance from the last state to the new one, from the gradient to the new one)."""
    codes = np.empty(TILE, np.uint8)
    scratch = np.empty(TILE // 8, np.uint64)
    new = np.empty(TILE, np.float32)
    spare = np.empty(TILE, np.float32)
    for lo in range(0, len(last), TILE):
        hi = min(lo + TILE, len(last))
        tile, old = new[: hi - lo], last[lo:hi]
        unpack_tile(packed[lo * bits // 8 : (hi * bits + 7) // 8], hi - lo, bits, scratch, codes)
        if radius > 0:
            for j in range(len(tile)):
                tile[j] = old[j] + (np.float32(codes[j]) * step - radius)
        else:
            for j in range(len(tile)):
                tile[j] = old[j]
        row = out[lo // block]
        row[0] += squared_distance(tile, old, spare)
        row[1] += squared_distance(grad[lo:hi], tile, spare)


def laq_quantise(grad: Tensor, last: Tensor, bits: int, update: bool) -> tuple[Tensor, float]:
    n = last.numel()
    packed = torch.empty((bits * n + 7) // 8, dtype=torch.uint8)
    tops = _run(grad, last, lambda g, q, _: largest_difference(g, q))
    radius = np.float32(scale_from_bits(max(tops, default=0)))  # Numba hands float32 back as a double
    if not radius > 0:
        return packed.zero_(), float(radius)
    step, to = _step(radius, bits), packed.numpy()

    def work(g: F32, q: F32, lo: int) -> None:
        mine = to[lo * bits // 8 : ((lo + len(q)) * bits + 7) // 8]
        encode_difference(g, q, radius, step, bits, update, mine)

    _run(grad, last, work)
    return packed, float(radius)


def laq_apply(last: Tensor, packed: Tensor, radius: float, bits: int) -> None:
    if radius == 0.0:
        return
    r = np.float32(radius)
    step, codes = _step(r, bits), packed.numpy()

    def work(lo: int, hi: int) -> None:
        mine = codes[lo * bits // 8 : (hi * bits + 7) // 8]
        apply_difference(view(last)[lo:hi], mine, r, step, bits)

    _pool.run_cuts(work, _pool.cuts(last.numel()))


def laq_norms(grad: Tensor, last: Tensor, packed: Tensor, radius: float, bits: int) -> tuple[float, float]:
    r = np.float32(radius)
    step, codes = _step(r, bits), packed.numpy()

    def work(g: F32, q: F32, lo: int) -> F64:
        rows = rows_for(q, 2)
        mine = codes[lo * bits // 8 : ((lo + len(q)) * bits + 7) // 8]
        norms_range(g, q, mine, r, step, bits, _pool.GRAIN, rows)
        return rows

    if last.numel() == 0:
        return 0.0, 0.0
    innovation, error = total_of(_run(grad, last, work))
    return innovation, error


def _run(grad: Tensor, last: Tensor, work: Callable[[F32, F32, int], T]) -> list[T]:
    return Source(grad).run(lambda a, b, lo: work(a, view(last)[lo : lo + len(a)], lo))


def _step(radius: np.float32, bits: int) -> np.float32:
    """2 tau R, formed as in the reference. A radius from the wire may be as large as a float32 can be."""
    with np.errstate(over="ignore"):
        return np.float32(2.0) * (radius / np.float32(2**bits - 1))


def warm() -> None:
    grad, last = torch.arange(-50.0, 50.0), torch.zeros(100)
    packed, radius = laq_quantise(grad, last, 4, False)
    laq_norms(grad, last, packed, radius, 4)
    laq_apply(last, packed, radius, 4)
