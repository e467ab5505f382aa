"""GSpar on the CPU: sums of the tail in one reading pass a round, then one sampling pass."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._collect import collect_tile
from thinwire.kernels.cpu._jit import F32, F64, I32, kernel
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._random import counters, word
from thinwire.kernels.cpu._simd import float_of
from thinwire.kernels.cpu._sums import rows_for, tile_sums, total_of
from thinwire.kernels.cpu._tensors import Source
from thinwire.kernels.reference.gspar import LARGEST, greedy

_TILE = 2048
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_SCALE = np.float32(2.0**31)
_CERTAIN = np.int32(2)
_SAMPLED = np.int32(1)
_LARGEST = np.float32(LARGEST)
_MOST_ROUNDS = 65


@kernel
def keep_tail(tile: F32, lam: np.float32, out: F32) -> int:
    """|x| of the finite entries with lam |x| < 1, zero for the others; how many were kept."""
    kept = np.int32(0)
    for j in range(len(tile)):
        g = abs(tile[j])
        take = (g <= _LARGEST) and (g * lam < _ONE)
        out[j] = g if take else _ZERO
    for j in range(len(tile)):
        g = abs(tile[j])
        kept += np.int32((g <= _LARGEST) and (g * lam < _ONE))
    return int(kept)


@kernel
def tail_range(x: F32, lam: np.float32, block: int, out: F64) -> None:
    """Per block (entries in the tail, the sum of their magnitudes, of their squares)."""
    scratch = np.empty(_TILE, np.float32)
    for lo in range(0, len(x), _TILE):
        hi = min(lo + _TILE, len(x))
        kept = scratch[: hi - lo]
        count = keep_tail(x[lo:hi], lam, kept)
        total, squares = tile_sums(kept)
        row = out[lo // block]
        row[0] += count
        row[1] += total
        row[2] += squares


@kernel
def draw(tile: F32, lam: np.float32, counter: np.uint32, key: np.uint32, drawn: F32) -> None:
    """2 for certain, 1 for sampled, 0 for neither, as integers in float memory."""
    for j in range(len(tile)):
        p = abs(tile[j]) * lam
        inside = p < _ONE
        limit = np.int32((p if inside else _ZERO) * _SCALE)
        taken = np.int32(word(np.uint32(counter + np.uint32(j)), key) >> np.uint32(1)) < limit
        drawn[j] = float_of((_SAMPLED if taken else np.int32(0)) if inside else _CERTAIN)


@kernel
def sample_range(
    x: F32,
    base: int,
    lam: np.float32,
    counter: np.uint32,
    key: np.uint32,
    certain: I32,
    values: F32,
    sampled: I32,
    at: I32,
) -> int:
    """Append from x on; stop where there might be no room: the position reached. `at` holds both ends."""
    drawn = np.empty(_TILE, np.float32)
    hits = np.empty(_TILE, np.int32)
    marks = np.empty(_TILE, np.float32)
    for lo in range(0, len(x), _TILE):
        hi = min(lo + _TILE, len(x))
        if at[0] + (hi - lo) > len(certain) or at[1] + (hi - lo) > len(sampled):
            return lo
        tile = x[lo:hi]
        draw(tile, lam, np.uint32(counter + np.uint32(lo)), key, drawn[: hi - lo])
        count = collect_tile(drawn[: hi - lo], 0, 0, hits, marks, 0)
        kinds = marks.view(np.int32)
        for e in range(count):
            j = hits[e]
            if kinds[e] == _CERTAIN:
                certain[at[0]] = base + lo + j
                values[at[0]] = tile[j]
                at[0] += 1
            else:
                index = base + lo + j
                sampled[at[1]] = index - 2**31 if tile[j] < 0 else index
                at[1] += 1
    return len(x)


def gspar_probabilities(x: Tensor, ratio: float, rounds: int) -> float:
    return greedy(x.numel(), ratio, rounds, lambda lam: _tail(x, lam)[:2])


def gspar_budget(x: Tensor, epsilon: float) -> float:
    """The closed form without sorting.

    Leaving entries with lam |x| >= 1 out of the tail can only raise lambda, so the tails shrink until they no
    longer change: at the lambda that the sorted form finds.
    """
    _, first, everything = _tail(x, None)
    second, lam = everything, 0.0
    for _ in range(_MOST_ROUNDS):
        if first == 0.0 or everything == 0.0:
            break
        better = min(first / (epsilon * everything + second), LARGEST)
        if not better > lam:
            break
        lam = better
        _, first, second = _tail(x, lam)
    return lam


def gspar_sample(x: Tensor, lam: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    n = x.numel()
    found: list[tuple[I32, F32, I32]] = []
    room = max(n // 64, 4 * _TILE)
    certain = scratch_array("certain", np.int32, room)
    values = scratch_array("certain", np.float32, room)
    sampled = scratch_array("sampled", np.int32, room)
    factor = np.float32(lam)

    def work(a: F32, lo: int) -> None:
        done = 0
        while done < len(a):
            at = np.zeros(2, np.int32)
            rest = a[done:]
            start = lo + done
            done += sample_range(rest, start, factor, *counters(seed, start), certain, values, sampled, at)
            found.append((certain[: at[0]].copy(), values[: at[0]].copy(), sampled[: at[1]].copy()))

    for a, _, lo in Source(x).in_order():
        work(a, lo)
    joined = [np.concatenate(parts) for parts in zip(*found, strict=True)] if found else _NONE
    return torch.from_numpy(joined[0]), torch.from_numpy(joined[1]), torch.from_numpy(joined[2])


_NONE = [np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)]


def _tail(x: Tensor, lam: float | None) -> tuple[int, float, float]:
    """(count, sum of magnitudes, sum of squares) of the finite entries with lam |x| < 1 (all for None)."""
    factor = np.float32(0.0 if lam is None else lam)

    def work(a: F32, _: F32 | None, lo: int) -> F64:
        rows = rows_for(a, 3)
        tail_range(a, factor, _pool.GRAIN, rows)
        return rows

    if x.numel() == 0:
        return 0, 0.0, 0.0
    count, total, squares = total_of(Source(x).run(work))
    return int(count), total, squares


def warm() -> None:
    x = torch.arange(-50.0, 50.0)
    gspar_sample(x, gspar_probabilities(x, 0.1, 2), 1)
    gspar_budget(x, 1.0)
