"""Signs of residual + gradient on the CPU: two reading passes, the second of which writes the residual.

Kernels go from bucket to bucket: number k begins at `begin_of(k)`, where a byte of bits begins, too.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._codes import copy_bytes
from thinwire.kernels.cpu._jit import F32, U8, U64, kernel
from thinwire.kernels.cpu._memory import addresses, float32_at, uint8_at
from thinwire.kernels.cpu._simd import LANES, add_choice64
from thinwire.kernels.cpu._tensors import divide, fill, summed, view
from thinwire.kernels.cpu.sign import pack_and_sum
from thinwire.kernels.reference.sign_feedback import scales_in

_TILE = 4096
_WORDS = _TILE // LANES
_ONE = np.uint64(1)
_ZERO = np.float32(0.0)


@kernel
def begin_of(k: int, bucket: int, share: int) -> int:
    each = (share + bucket - 1) // bucket
    return k // each * share + k % each * bucket


@kernel
def end_of(k: int, bucket: int, share: int, numel: int) -> int:
    each = (share + bucket - 1) // bucket
    return min(begin_of(k, bucket, share) + bucket, (k // each + 1) * share, numel)


@kernel
def add_decoded(tile: F32, first: int, code: U8, scale: np.float32, words: U64) -> None:
    """tile += the code of the entries that begin with `first`, a multiple of 8."""
    size = (len(tile) + 7) // 8
    copy_bytes(words.view(np.uint8)[:size], code[first // 8 : first // 8 + size])
    whole = len(tile) // LANES
    for b in range(whole):
        add_choice64(tile, b * LANES, words[b], scale, -scale)
    for j in range(whole * LANES, len(tile)):
        bit = (words[whole] >> np.uint64(j - whole * LANES)) & _ONE
        tile[j] += scale if bit != 0 else -scale


@kernel
def pack_range(a: F32, b: F32, lo: int, hi: int, bucket: int, share: int, packed: U8, means: F32) -> None:
    """The bits and means of a + b in buckets lo .. hi."""
    scratch, sums = np.empty(_TILE, np.float32), np.empty((1, 3))
    for k in range(lo, hi):
        begin, end = begin_of(k, bucket, share), end_of(k, bucket, share, len(a))
        sums[:] = 0
        for at in range(begin, end, _TILE):
            stop = min(at + _TILE, end)
            tile = summed(a, b, at, stop, scratch)
            pack_and_sum(tile, packed[at // 8 : (stop + 7) // 8], True, _TILE, sums)
        means[k] = (sums[0, 0] - sums[0, 1]) / (end - begin)


@kernel
def subtract_tile(a: F32, b: F32, scale: np.float32) -> None:
    for j in range(len(a)):
        value = a[j] + b[j]
        a[j] = value - (scale if value >= 0 else -scale)


@kernel
def commit_range(a: F32, b: F32, lo: int, hi: int, bucket: int, share: int, scales: F32) -> None:
    """a += b, minus the signs of the sum times the scales, in buckets lo .. hi."""
    for k in range(lo, hi):
        begin, end = begin_of(k, bucket, share), end_of(k, bucket, share, len(a))
        subtract_tile(a[begin:end], b[begin:end], scales[k])


@kernel
def mix_tile(total: F32, others: int, own: F32) -> None:
    """total = own / W + (total / others) (others / W)."""
    divide(total, others)
    part, by = np.float32(others / (others + 1)), np.float32(others + 1)
    for j in range(len(total)):
        total[j] = own[j] / by + total[j] * part


@kernel
def again_range(
    a: F32, b: F32, lo: int, hi: int, bucket: int, codes: U64, scales: U64, mean: F32, packed: U8, means: F32
) -> None:
    """The mean of a + b and what the others sent, its bits and means, in buckets lo .. hi."""
    n, others = len(a), len(codes)
    scratch, words = np.empty(_TILE, np.float32), np.empty(_WORDS + 1, np.uint64)
    sums = np.empty((1, 3))
    for k in range(lo, hi):
        begin, end = k * bucket, min((k + 1) * bucket, n)
        sums[:] = 0
        for at in range(begin, end, _TILE):
            stop = min(at + _TILE, end)
            tile = mean[at:stop]
            fill(tile, _ZERO)
            for w in range(others):
                scale = float32_at(scales[w], k + 1)[k]
                add_decoded(tile, at, uint8_at(codes[w], (n + 7) // 8), scale, words)
            mix_tile(tile, others, summed(a, b, at, stop, scratch))
            pack_and_sum(tile, packed[at // 8 : (stop + 7) // 8], True, _TILE, sums)
        means[k] = (sums[0, 0] - sums[0, 1]) / (end - begin)


@kernel
def lost_tile(x: F32, scale: np.float32, factor: np.float32, out: F32) -> None:
    for j in range(len(out)):
        value = x[j]
        out[j] = (value - (scale if value >= 0 else -scale)) * factor


@kernel
def lost_range(x: F32, lo: int, hi: int, bucket: int, scales: F32, factor: np.float32, out: F32) -> None:
    for k in range(lo, hi):
        begin, end = k * bucket, min((k + 1) * bucket, len(x))
        lost_tile(x[begin:end], scales[k], factor, out[begin:end])


@kernel
def join_range(out: F32, lo: int, hi: int, bucket: int, share: int, codes: U64, scales: U64) -> None:
    """Buckets lo .. hi of all stretches, decoded."""
    words = np.empty(_WORDS + 1, np.uint64)
    size, each = (min(share, len(out)) + 7) // 8, (share + bucket - 1) // bucket
    for k in range(lo, hi):
        owner, column = k // each, k % each
        begin, end = begin_of(k, bucket, share), end_of(k, bucket, share, len(out))
        code, scale = uint8_at(codes[owner], size), float32_at(scales[owner], column + 1)[column]
        for at in range(begin, end, _TILE):
            tile = out[at : min(at + _TILE, end)]
            fill(tile, _ZERO)
            add_decoded(tile, at - owner * share, code, scale, words)


def _run(numel: int, buckets: int, work: Callable[[int, int], None]) -> None:
    """work(first bucket, last) in as many threads as so many entries are worth."""
    threads = len(_pool.cuts(numel))
    if threads == 1:
        work(0, buckets)
        return
    ends = [buckets * part // threads for part in range(threads + 1)]
    _pool.run(lambda part: work(ends[part], ends[part + 1]), threads)


def _coded(numel: int, count: int) -> tuple[Tensor, Tensor]:
    """Room for bits and means."""
    return torch.empty((numel + 7) // 8, dtype=torch.uint8), torch.empty(count)


def feedback_signs(residual: Tensor, grad: Tensor, bucket: int, share: int) -> tuple[Tensor, Tensor]:
    n, a, b = residual.numel(), view(residual), view(grad.float())
    packed, means = _coded(n, scales_in(n, bucket, share))
    bits, to = packed.numpy(), means.numpy()
    _run(n, len(to), lambda lo, hi: pack_range(a, b, lo, hi, bucket, share, bits, to))
    return packed, means


def commit_signs(residual: Tensor, grad: Tensor, scales: Tensor, bucket: int, share: int) -> None:
    a, b, each = view(residual), view(grad.float()), view(scales)
    _run(len(a), len(each), lambda lo, hi: commit_range(a, b, lo, hi, bucket, share, each))


def signs_again(
    residual: Tensor, grad: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    n, a, b = residual.numel(), view(residual), view(grad.float())
    mean = torch.empty(n)
    again, means = _coded(n, -(-n // bucket))
    codes, each = addresses(packed), addresses(scales)
    m, bits, to = mean.numpy(), again.numpy(), means.numpy()
    _run(n, len(to), lambda lo, hi: again_range(a, b, lo, hi, bucket, codes, each, m, bits, to))
    return mean, again, means


def lost_by_signs(x: Tensor, scales: Tensor, bucket: int, factor: float, out: Tensor) -> None:
    a, each, to = view(x), view(scales), view(out)
    _run(len(a), len(each), lambda lo, hi: lost_range(a, lo, hi, bucket, each, np.float32(factor), to))


def signs_joined(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, share: int, out: Tensor
) -> None:
    n = out.numel()
    wide = out if out.dtype == torch.float32 else torch.empty(n)
    to, codes, each = view(wide), addresses(packed), addresses(scales)
    count = scales_in(n, bucket, share)
    _run(n, count, lambda lo, hi: join_range(to, lo, hi, bucket, share, codes, each))
    if wide is not out:
        out.copy_(wide)


def warm() -> None:
    residual, grad = torch.zeros(100), torch.arange(-50.0, 50.0)
    packed, means = feedback_signs(residual, grad, _TILE, 104)
    mean, again, scales = signs_again(residual, grad, [packed], [means], _TILE)
    commit_signs(residual, grad, means, _TILE, 104)
    lost_by_signs(mean, scales, _TILE, 2.0, residual)
    signs_joined([again], [scales], _TILE, 104, residual)
