"""residual += gradient, tile by tile, with the old residual kept where the caller asked for it."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._collect import TILE, collect_tile, count_tile
from thinwire.kernels.cpu._jit import F32, F64, I32, kernel
from thinwire.kernels.cpu._memory import scratch_tensor
from thinwire.kernels.cpu._simd import LANES, accumulate64, lowest_bit
from thinwire.kernels.cpu._sums import tile_moments
from thinwire.kernels.cpu._tensors import WIDEN, view

T = TypeVar("T")
_ONE = np.uint64(1)

Step = Callable[[F32, F32, F32 | None, bool, int], T]
"""work(residual, gradient, undo or None, whether the gradient itself receives the old residual, position)."""


@kernel
def accumulate_tile(residual: F32, grad: F32, undo: F32 | None, swap: bool) -> None:
    # Three loops, because a gradient that is also the undo must be one array to the compiler: as two it would
    # find them overlapping and fall back to one entry at a time.
    if swap:
        for j in range(len(residual)):
            old = residual[j]
            residual[j] = old + grad[j]
            grad[j] = old
    elif undo is not None:
        for j in range(len(residual)):
            old = residual[j]
            residual[j] = old + grad[j]
            undo[j] = old
    else:
        for j in range(len(residual)):
            residual[j] += grad[j]


@kernel
def accumulate_clearing(residual: F32, grad: F32, clear: F32 | None) -> None:
    """Accumulate and zero `clear` in one pass; None means the gradient itself."""
    if clear is None:
        for j in range(len(residual)):
            residual[j] += grad[j]
            grad[j] = 0.0
    else:
        for j in range(len(residual)):
            residual[j] += grad[j]
            clear[j] = 0.0


@kernel
def part(array: F32 | None, lo: int, hi: int) -> F32 | None:
    if array is None:
        return None
    return array[lo:hi]


@kernel
def accumulate(residual: F32, grad: F32, undo: F32 | None, swap: bool) -> None:
    for lo in range(0, len(residual), TILE):
        hi = min(lo + TILE, len(residual))
        accumulate_tile(residual[lo:hi], grad[lo:hi], part(undo, lo, hi), swap)


@kernel
def accumulate_taking(
    residual: F32,
    grad: F32,
    undo: F32 | None,
    swap: bool,
    base: int,
    above: int,
    indices: I32,
    values: F32,
    at: int,
) -> tuple[int, int]:
    """Accumulate and move every sum above out of the residual, while it is in the cache.

    Returns (the new end, the position reached): stops where the room might not suffice.
    """
    n = len(residual)
    for lo in range(0, n, LANES):
        if at + LANES > len(indices):
            return at, lo
        if lo + LANES > n:
            hi = n
            accumulate_tile(residual[lo:hi], grad[lo:hi], part(undo, lo, hi), swap)
            end = collect_tile(residual[lo:hi], base + lo, above, indices, values, at)
            for e in range(at, end):
                residual[indices[e] - base] = 0.0
            return end, n
        if swap:
            mask = accumulate64(residual, grad, grad, lo, np.int32(above))
        else:
            mask = accumulate64(residual, grad, undo, lo, np.int32(above))
        while mask != 0:
            j = lo + lowest_bit(mask)
            indices[at] = base + j
            values[at] = residual[j]
            residual[j] = 0.0
            at += 1
            mask &= mask - _ONE
    return at, n


@kernel
def accumulate_counting(residual: F32, grad: F32, undo: F32 | None, swap: bool, above: int) -> int:
    total = 0
    for lo in range(0, len(residual), TILE):
        hi = min(lo + TILE, len(residual))
        tile = residual[lo:hi]
        accumulate_tile(tile, grad[lo:hi], part(undo, lo, hi), swap)
        total += count_tile(tile, above)
    return total


@kernel
def accumulate_moments(residual: F32, grad: F32, undo: F32 | None, swap: bool, block: int, out: F64) -> None:
    """Accumulate, and sum what comes out: one row (finite entries, sum, squares) per block."""
    for lo in range(0, len(residual), TILE):
        hi = min(lo + TILE, len(residual))
        tile = residual[lo:hi]
        accumulate_tile(tile, grad[lo:hi], part(undo, lo, hi), swap)
        n, s, q = tile_moments(tile)
        row = out[lo // block]
        row[0] += n
        row[1] += s
        row[2] += q


@kernel
def put_back(residual: F32, indices: I32, values: F32) -> None:
    for j in range(len(indices)):
        residual[indices[j]] = values[j]


@kernel
def zero_at(residual: F32, indices: I32) -> None:
    for j in range(len(indices)):
        residual[indices[j]] = 0.0


@kernel
def accumulate_zeroing(residual: F32, grad: F32, base: int, indices: I32) -> None:
    """Accumulate and zero the given (ascending) entries of the whole tensor that lie in this range."""
    at = np.searchsorted(indices, base)
    for lo in range(0, len(residual), TILE):
        hi = min(lo + TILE, len(residual))
        tile = residual[lo:hi]
        accumulate_tile(tile, grad[lo:hi], None, False)
        while at < len(indices) and indices[at] < base + hi:
            tile[indices[at] - base - lo] = 0.0
            at += 1


def direct(grad: Tensor) -> bool:
    return grad.dtype == torch.float32


def swapped(grad: Tensor, undo: Tensor | None) -> bool:
    """Whether the old residual is to replace the gradient in its own memory."""
    return undo is not None and direct(grad) and undo.data_ptr() == grad.data_ptr()


def run(
    residual: Tensor, grad: Tensor, undo: Tensor | None, work: Step[T], grain: int = _pool.GRAIN
) -> list[T]:
    """Run `work` over ranges of all three tensors that together make the whole, in order.

    Ranges begin at multiples of `grain`.
    """
    swap = swapped(grad, undo)

    def views(lo: int, hi: int, wide: Tensor) -> T:
        kept = None if undo is None or swap else view(undo)[lo:hi]
        return work(view(residual)[lo:hi], view(wide), kept, swap, lo)

    n = residual.numel()
    if direct(grad):
        return _pool.run_cuts(lambda lo, hi: views(lo, hi, grad[lo:hi]), _pool.cuts(n, grain))
    block = grain * max(1, WIDEN // grain)
    scratch = scratch_tensor("widened gradient", min(n, block))
    results: list[T] = []
    for lo in range(0, n, block):
        hi = min(lo + block, n)
        results.append(views(lo, hi, scratch[: hi - lo].copy_(grad[lo:hi])))
    return results
