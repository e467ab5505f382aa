"""One-bit codes on the CPU: 64 comparisons become one 64-bit word, and back."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._codes import copy_bytes
from thinwire.kernels.cpu._jit import F32, F64, U8, U64, kernel, reordering
from thinwire.kernels.cpu._memory import addresses, uint8_at
from thinwire.kernels.cpu._simd import LANES, add_choice64, nonnegative64, signed_sums64, signed_sums_pack64
from thinwire.kernels.cpu._sums import rows_for, total_of
from thinwire.kernels.cpu._tensors import Source, divide, fill, through_float32

_TILE = 4096
_WORDS = _TILE // LANES
_ONE = np.uint64(1)


@kernel
def pack_signs(x: F32, packed: U8, words: U64) -> None:
    """The bits of all of x into ceil(len / 8) bytes."""
    for lo in range(0, len(x), _TILE):
        hi = min(lo + _TILE, len(x))
        tile = x[lo:hi]
        whole = len(tile) // LANES
        for w in range(whole):
            words[w] = nonnegative64(tile, w * LANES)
        if whole * LANES < len(tile):
            last = np.uint64(0)
            for j in range(whole * LANES, len(tile)):
                if tile[j] >= 0:
                    last |= _ONE << np.uint64(j - whole * LANES)
            words[whole] = last
        size = (len(tile) + 7) // 8
        copy_bytes(packed[lo // 8 : lo // 8 + size], words.view(np.uint8)[:size])


@kernel
def pack_and_sum(x: F32, packed: U8, pack: bool, block: int, out: F64) -> None:
    """Signs, and per block (sum of entries >= 0, sum of the others, how many are >= 0)."""
    words = np.empty(_WORDS, np.uint64)
    for lo in range(0, len(x), _TILE):
        hi = min(lo + _TILE, len(x))
        tile = x[lo:hi]
        row = out[lo // block]
        whole = len(tile) // LANES
        if pack:
            signed_sums_pack64(tile, whole, row, words)
        else:
            signed_sums64(tile, whole, row, words)
        last = np.uint64(0)
        for j in range(whole * LANES, len(tile)):
            positive = tile[j] >= 0
            row[0 if positive else 1] += tile[j]
            row[2] += positive
            last |= np.uint64(positive) << np.uint64(j - whole * LANES)
        if pack:
            if whole < _WORDS:
                words[whole] = last
            size = (len(tile) + 7) // 8
            copy_bytes(packed[lo // 8 : lo // 8 + size], words.view(np.uint8)[:size])


@reordering
def scale_range(x: F32, bucket: int, scales: F32) -> None:
    """The sum of squares by the sum of magnitudes, of every bucket."""
    for b in range(len(scales)):
        tile = x[b * bucket : (b + 1) * bucket]
        total, squares = 0.0, 0.0
        for j in range(len(tile)):
            value = np.float64(tile[j])
            total += abs(value)
            squares += value * value
        scales[b] = 0.0 if total == 0 else squares / total


@kernel
def mean_range(
    out: F32, base: int, numel: int, packed: U64, plus: F32, minus: F32, bucket: int, workers: int
) -> None:
    """out = the mean over workers of plus or minus by the bit; base is a multiple of a tile.

    `plus` and `minus` have a row per worker and a column per bucket, which is a number of whole tiles.
    """
    words = np.empty(_WORDS + 1, np.uint64)
    for lo in range(0, len(out), _TILE):
        hi = min(lo + _TILE, len(out))
        tile = out[lo:hi]
        fill(tile, np.float32(0.0))
        size = (len(tile) + 7) // 8
        first = (base + lo) // 8
        whole = len(tile) // LANES
        column = (base + lo) // bucket
        for w in range(workers):
            high, low = plus[w, column], minus[w, column]
            copy_bytes(
                words.view(np.uint8)[:size], uint8_at(packed[w], (numel + 7) // 8)[first : first + size]
            )
            for b in range(whole):
                add_choice64(tile, b * LANES, words[b], high, low)
            for j in range(whole * LANES, len(tile)):
                bit = (words[whole] >> np.uint64(j - whole * LANES)) & _ONE
                tile[j] += high if bit != 0 else low
        divide(tile, workers)


@kernel
def majority_range(packed: U64, size: int, lo: int, hi: int, workers: int, out: U8) -> None:
    """Bytes lo .. hi of the majority, by adding bits with carries in planes of words."""
    planes_needed = 1
    while (1 << planes_needed) <= workers:
        planes_needed += 1
    planes = np.empty((planes_needed, _WORDS), np.uint64)
    carry = np.empty(_WORDS, np.uint64)
    more = np.empty(_WORDS, np.uint64)
    wanted = (workers + 1) // 2
    width = _WORDS * 8
    for at in range(lo, hi, width):
        end = min(at + width, hi)
        planes[:, :] = 0
        for w in range(workers):
            copy_bytes(carry.view(np.uint8)[: end - at], uint8_at(packed[w], size)[at:end])
            for p in range(planes_needed):
                plane = planes[p]
                for j in range(_WORDS):
                    both = plane[j] & carry[j]
                    plane[j] ^= carry[j]
                    carry[j] = both
        # count >= wanted, from the highest plane down: `more` decided, `carry` still equal
        for j in range(_WORDS):
            more[j] = np.uint64(0)
            carry[j] = ~np.uint64(0)
        for p in range(planes_needed - 1, -1, -1):
            plane = planes[p]
            if (wanted >> p) & 1:
                for j in range(_WORDS):
                    carry[j] &= plane[j]
            else:
                for j in range(_WORDS):
                    more[j] |= carry[j] & plane[j]
                    carry[j] &= ~plane[j]
        for j in range(_WORDS):
            more[j] |= carry[j]
        copy_bytes(out[at - lo : end - lo], more.view(np.uint8)[: end - at])


def sign_pack(x: Tensor) -> Tensor:
    packed = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)
    to = packed.numpy()

    def work(a: F32, _: F32 | None, lo: int) -> None:
        pack_signs(a, to[lo // 8 : (lo + len(a) + 7) // 8], np.empty(_WORDS, np.uint64))

    Source(x).run(work)
    return packed


def sign_pack_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)
    plus, minus, _ = sums_by_sign(x, packed)
    return packed, torch.tensor([(plus - minus) / max(x.numel(), 1)], dtype=torch.float64)


def sign_scales(x: Tensor, bucket: int) -> Tensor:
    scales = torch.empty(-(-x.numel() // bucket))
    to = scales.numpy()

    def work(a: F32, _: F32 | None, lo: int) -> None:
        first = lo // bucket
        scale_range(a, bucket, to[first : first - (-len(a) // bucket)])

    Source(x).run(work, bucket * max(1, _pool.GRAIN // bucket))
    return scales


def sign_pack_means(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    packed = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)
    sums = np.zeros((-(-x.numel() // bucket), 3))
    to = packed.numpy()

    def work(a: F32, _: F32 | None, lo: int) -> None:
        first = lo // bucket
        rows = sums[first : first - (-len(a) // bucket)]
        pack_and_sum(a, to[lo // 8 : (lo + len(a) + 7) // 8], True, bucket, rows)

    Source(x).run(work, math.lcm(_pool.GRAIN, bucket))
    means = torch.empty(len(sums))
    counts = np.full(len(sums), float(bucket))
    counts[-1:] = x.numel() - bucket * (len(sums) - 1)
    means.numpy()[:] = (sums[:, 0] - sums[:, 1]) / counts
    return packed, means


def onebit_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)
    return packed, torch.tensor(means_by_sign(x, packed), dtype=torch.float32)


def means_by_sign(x: Tensor, packed: Tensor | None) -> tuple[float, float]:
    plus, minus, count = sums_by_sign(x, packed)
    others = x.numel() - count
    return plus / count if count else 0.0, minus / others if others else 0.0


def sums_by_sign(x: Tensor, packed: Tensor | None) -> tuple[float, float, int]:
    """(sum of the entries >= 0, sum of the others, how many are >= 0), and the bits if asked for."""
    to = np.empty(0, np.uint8) if packed is None else packed.numpy()

    def work(a: F32, _: F32 | None, lo: int) -> F64:
        rows = rows_for(a, 3)
        mine = to if packed is None else to[lo // 8 : (lo + len(a) + 7) // 8]
        pack_and_sum(a, mine, packed is not None, _pool.GRAIN, rows)
        return rows

    if x.numel() == 0:
        return 0.0, 0.0, 0
    plus, minus, count = total_of(Source(x).run(work))
    return plus, minus, int(count)


def onebit_mean(packed: Sequence[Tensor], pairs: Sequence[Tensor], numel: int, out: Tensor) -> None:
    both = torch.stack(list(pairs)).numpy()
    _mean(addresses(packed), both[:, :1].copy(), both[:, 1:].copy(), max(numel, 1), numel, out)


def sign_means(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, numel: int, out: Tensor
) -> None:
    high = torch.stack(list(scales)).numpy()
    _mean(addresses(packed), high, -high, bucket, numel, out)


def _mean(codes: U64, high: F32, low: F32, bucket: int, numel: int, out: Tensor) -> None:
    def work(part: F32, lo: int) -> None:
        mean_range(part, lo, numel, codes, high, low, bucket, len(codes))

    through_float32(out, work)


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    size = (numel + 7) // 8
    majority = torch.empty(size, dtype=torch.uint8)
    codes, to = addresses(packed), majority.numpy()

    def work(lo: int, hi: int) -> None:
        majority_range(codes, size, lo, hi, len(packed), to[lo:hi])

    _pool.run_cuts(work, _pool.cuts(size))
    if numel % 8:
        to[-1] &= (1 << (numel % 8)) - 1  # padding is zero, whatever the votes' padding was
    return majority


def warm() -> None:
    x = torch.arange(-50.0, 50.0)
    packed, _ = sign_pack_mean(x)
    sign_means([packed], [sign_pack_means(x, _TILE)[1]], _TILE, 100, torch.empty(100))
    sign_pack(x)
    sign_scales(x, 64)
    onebit_mean([packed, packed], [torch.ones(2)] * 2, 100, torch.empty(100))
    sign_majority([packed, packed], 100)
