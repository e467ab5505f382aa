"""Top-k by chunks on the CPU: one pass; each chunk is added, searched and cleared while it is in the cache.

The k-th magnitude of one chunk, lowered a little, is the guess for the next: few entries pass it, and the
exact k are found among those.
"""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _accumulate, _pool
from thinwire.kernels.cpu._collect import collect_tile
from thinwire.kernels.cpu._jit import F32, I32, kernel
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._simd import LANES, accumulate64, lowest_bit
from thinwire.kernels.cpu._tensors import Source, summed
from thinwire.kernels.cpu.selection import empty_selection

_MAGNITUDE = np.int32(0x7FFFFFFF)
# In bits of a float32: some percent lower for the next chunk; half, where too few entries passed.
_LOWER = 0x000C0000
_HALF = 0x00800000
_TRIES = 3
_ONE = np.uint64(1)


@kernel
def limit_of(magnitudes: I32, k: int, least: int) -> tuple[int, int]:
    """A limit that at least k of these reach, and how many do: k of them, or more only among equals.

    None is below `least`. The range is halved until exactly k are left, without branches on the data.
    """
    most = np.int32(0)
    for j in range(len(magnitudes)):
        most = max(most, magnitudes[j])
    lo = np.int64(least)
    hi = np.int64(most) + 1
    reach = len(magnitudes)
    while hi - lo > 1 and reach != k:
        middle = lo + (hi - lo) // 2
        limit = np.int32(middle)
        count = np.int32(0)
        for j in range(len(magnitudes)):
            count += np.int32(magnitudes[j] >= limit)
        if count >= k:
            lo = middle
            reach = int(count)
        else:
            hi = middle
    return int(lo), reach


@kernel
def take_chunk(
    tile: F32,
    base: int,
    k: int,
    guess: int,
    found: int,
    places: I32,
    passed: F32,
    magnitudes: I32,
    indices: I32,
    values: F32,
    clear: bool,
) -> int:
    """The k largest of a tile, in order, zeroed in it with `clear`. Returns the guess for the next tile.

    `found` entries, which have been collected, are above the guess.
    """
    tries = 0
    while found < k:
        tries += 1
        guess = max(guess - _HALF, -1) if tries < _TRIES else -1
        found = collect_tile(tile, 0, guess, places, passed, 0)
    bits = passed.view(np.int32)
    for j in range(found):
        magnitudes[j] = bits[j] & _MAGNITUDE
    limit, reach = limit_of(magnitudes[:found], k, guess + 1)
    surplus = reach - k  # equals of the limit beyond the k-th; the last ones are left out
    if surplus:
        for j in range(found - 1, -1, -1):
            if magnitudes[j] == limit and surplus:
                magnitudes[j] = -1
                surplus -= 1
    at = 0
    for j in range(found):  # compacted in place, without a branch
        places[at] = places[j]
        passed[at] = passed[j]
        at += int(magnitudes[j] >= limit)
    for j in range(k):
        indices[j] = base + places[j]
        values[j] = passed[j]
    if clear:
        for j in range(k):
            tile[places[j]] = 0.0
    return max(limit - _LOWER, -1)


@kernel
def take_chunks(
    a: F32,
    b: F32 | None,
    base: int,
    k: int,
    last: int,
    chunk: int,
    scratch: F32,
    places: I32,
    passed: F32,
    magnitudes: I32,
    indices: I32,
    values: F32,
) -> None:
    """From a range that begins with a chunk; only the last one of the tensor is short."""
    guess = 0x7F7FFFFF
    at = 0
    for lo in range(0, len(a), chunk):
        hi = min(lo + chunk, len(a))
        count = k if hi - lo == chunk else last
        tile = summed(a, b, lo, hi, scratch)
        found = collect_tile(tile, 0, guess, places, passed, 0)
        to, what = indices[at : at + count], values[at : at + count]
        guess = take_chunk(tile, base + lo, count, guess, found, places, passed, magnitudes, to, what, False)
        at += count


@kernel
def accumulate_range(
    residual: F32,
    grad: F32,
    undo: F32 | None,
    swap: bool,
    lo: int,
    hi: int,
    above: int,
    places: I32,
    passed: F32,
) -> int:
    """residual += grad from lo to hi, and `collect_tile` of the sums in the same pass; places from lo."""
    full = hi - (hi - lo) % LANES
    at = 0
    for block in range(lo, full, LANES):
        if swap:
            mask = accumulate64(residual, grad, grad, block, np.int32(above))
        else:
            mask = accumulate64(residual, grad, undo, block, np.int32(above))
        while mask != 0:
            j = block + lowest_bit(mask)
            places[at] = j - lo
            passed[at] = residual[j]
            at += 1
            mask &= mask - _ONE
    rest = residual[full:hi]
    _accumulate.accumulate_tile(rest, grad[full:hi], _accumulate.part(undo, full, hi), swap)
    return collect_tile(rest, full - lo, above, places, passed, at)


@kernel
def accumulate_chunks(
    residual: F32,
    grad: F32,
    undo: F32 | None,
    swap: bool,
    base: int,
    k: int,
    last: int,
    chunk: int,
    places: I32,
    passed: F32,
    magnitudes: I32,
    indices: I32,
    values: F32,
) -> None:
    """residual += grad, and the largest of each chunk move out of it."""
    guess = 0x7F7FFFFF
    at = 0
    for lo in range(0, len(residual), chunk):
        hi = min(lo + chunk, len(residual))
        count = k if hi - lo == chunk else last
        tile = residual[lo:hi]
        found = accumulate_range(residual, grad, undo, swap, lo, hi, guess, places, passed)
        to, what = indices[at : at + count], values[at : at + count]
        guess = take_chunk(tile, base + lo, count, guess, found, places, passed, magnitudes, to, what, True)
        at += count


def chunk_topk(x: Tensor, grad: Tensor | None, k: int, last: int, chunk: int) -> tuple[Tensor, Tensor]:
    indices, values = _room(x.numel(), k, last, chunk)

    def work(a: F32, b: F32 | None, lo: int) -> None:
        where = _share(lo, len(a), k, chunk)
        scratch = scratch_array("chunk", np.float32, chunk)
        take_chunks(
            a, b, lo, k, last, chunk, scratch, *_passed(chunk), indices.numpy()[where], values.numpy()[where]
        )

    Source(x, grad).run(work, _grain(chunk))
    return indices, values


def feedback_chunk_topk(
    residual: Tensor, grad: Tensor, k: int, last: int, chunk: int, undo: Tensor | None
) -> tuple[Tensor, Tensor]:
    indices, values = _room(residual.numel(), k, last, chunk)

    def work(r: F32, g: F32, u: F32 | None, swap: bool, lo: int) -> None:
        where = _share(lo, len(r), k, chunk)
        accumulate_chunks(
            r, g, u, swap, lo, k, last, chunk, *_passed(chunk), indices.numpy()[where], values.numpy()[where]
        )

    _accumulate.run(residual, grad, undo, work, _grain(chunk))
    return indices, values


def _room(n: int, k: int, last: int, chunk: int) -> tuple[Tensor, Tensor]:
    return empty_selection((-(-n // chunk) - 1) * k + last if n else 0)


def _share(lo: int, length: int, k: int, chunk: int) -> slice:
    """Where the entries of a range go; every chunk before it gave k."""
    return slice(lo // chunk * k, (lo // chunk + -(-length // chunk)) * k)


def _passed(chunk: int) -> tuple[I32, F32, I32]:
    """Memory of this thread for the entries of a chunk that pass the guess."""
    return (
        scratch_array("places", np.int32, chunk),
        scratch_array("passed", np.float32, chunk),
        scratch_array("magnitudes", np.int32, chunk),
    )


def _grain(chunk: int) -> int:
    return chunk * max(1, _pool.GRAIN // chunk)


def warm() -> None:
    x = torch.arange(-100.0, 100.0)
    for grad in (None, x):
        chunk_topk(x, grad, 3, 2, 64)
    for undo in (None, torch.empty(200), x):
        feedback_chunk_topk(x.clone(), x, 3, 2, 64, undo)
