"""Stochastic quantisation on the CPU: scales and codes of a few buckets at a time, within the cache."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._codes import (
    TILE,
    encode_range,
    largest_bits,
    run_scale,
    scale_from_bits,
    scale_from_squares,
    squares,
    unpack_tile,
)
from thinwire.kernels.cpu._jit import F32, U8, U64, kernel
from thinwire.kernels.cpu._memory import addresses, float32_at, uint8_at
from thinwire.kernels.cpu._random import counters
from thinwire.kernels.cpu._simd import LANES
from thinwire.kernels.cpu._simd_codes import sum_decoded64
from thinwire.kernels.cpu._tensors import Source, divide, fill, through_float32, view
from thinwire.kernels.reference.quantisation import buckets

_FUSED = 1 << 11  # entries whose scales and codes are made together
_ONE = np.float32(1.0)


@kernel
def scales_range(x: F32, bucket: int, l2: bool, scales: F32) -> None:
    for which in range(len(scales)):
        scales[which] = run_scale(x[which * bucket : (which + 1) * bucket], l2)


@kernel
def quantise_range(
    x: F32,
    bits: int,
    bucket: int,
    l2: bool,
    span: int,
    counter: np.uint32,
    key: np.uint32,
    scales: F32,
    packed: U8,
) -> None:
    """Whole buckets: `span` entries (a multiple of the bucket and of 64) get scales, then codes."""
    for lo in range(0, len(x), span):
        hi = min(lo + span, len(x))
        part = x[lo:hi]
        mine = scales[lo // bucket : (hi + bucket - 1) // bucket]
        scales_range(part, bucket, l2, mine)
        begin = np.uint32(counter + np.uint32(lo // 2))
        to = packed[lo * bits // 8 : (hi * bits + 7) // 8]
        encode_range(part, 0, mine, bits, bucket, begin, key, to, False)


@kernel
def decode_run(codes: U8, scale: np.float32, bits: int, add: bool, out: F32) -> None:
    """(code - s) * (scale / s), in this order: zeros stay exact."""
    s = np.float32((1 << (bits - 1)) - 1) if bits > 1 else np.float32(1.0)
    step = scale / s
    if bits == 1:
        step_twice = np.float32(2.0)
        for j in range(len(out)):
            v = (np.float32(codes[j]) * step_twice - s) * step
            out[j] = out[j] + v if add else v
    elif add:
        for j in range(len(out)):
            out[j] += (np.float32(codes[j]) - s) * step
    else:
        for j in range(len(out)):
            out[j] = (np.float32(codes[j]) - s) * step


@kernel
def decode_range(
    out: F32,
    base: int,
    numel: int,
    packed: U64,
    scales: U64,
    workers: int,
    bits: int,
    bucket: int,
) -> None:
    """out = the mean of entries base .. base + len(out) (base a multiple of 8); lengths have been checked."""
    codes = np.empty(TILE, np.uint8)
    scratch = np.empty(TILE // 8, np.uint64)
    for lo in range(0, len(out), TILE):
        hi = min(lo + TILE, len(out))
        tile = out[lo:hi]
        if workers > 1:
            fill(tile, np.float32(0.0))
        for w in range(workers):
            from_bytes = uint8_at(packed[w], (bits * numel + 7) // 8)
            all_scales = float32_at(scales[w], (numel + bucket - 1) // bucket)
            first = (base + lo) * bits // 8
            unpack_tile(from_bytes[first:], hi - lo, bits, scratch, codes)
            at = lo
            while at < hi:
                which = (base + at) // bucket
                end = min(hi, (which + 1) * bucket - base)
                run = codes[at - lo : end - lo]
                decode_run(run, all_scales[which], bits, workers > 1, tile[at - lo : end - lo])
                at = end
        divide(tile, workers)


@kernel
def decode_blocks(
    out: F32, base: int, numel: int, packed: U64, scales: U64, workers: int, bits: int, bucket: int
) -> None:
    """`decode_range` for buckets that are multiples of 64 (or one for all) and whole blocks of 64 entries."""
    steps = np.empty(workers, np.float32)
    s = np.float32((1 << (bits - 1)) - 1) if bits > 1 else _ONE
    exact = workers & (workers - 1) == 0  # the inverse is a power of two as well
    factor = np.float32(1.0 / workers) if exact else _ONE
    at = 0
    while at < len(out):
        which = (base + at) // bucket
        end = min(len(out), (which + 1) * bucket - base, at + TILE)
        for w in range(workers):
            steps[w] = float32_at(scales[w], (numel + bucket - 1) // bucket)[which] / s
        for block in range(at, end, LANES):
            byte = (base + block) * bits // 8
            if bits == 8:
                sum_decoded64(8, out, block, packed, byte, steps, workers, factor)
            elif bits == 4:
                sum_decoded64(4, out, block, packed, byte, steps, workers, factor)
            elif bits == 2:
                sum_decoded64(2, out, block, packed, byte, steps, workers, factor)
            else:
                sum_decoded64(1, out, block, packed, byte, steps, workers, factor)
        if not exact:
            divide(out[at:end], workers)
        at = end


def quantise(x: Tensor, bits: int, bucket: int, norm: str, seed: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    packed = torch.empty((bits * n + 7) // 8, dtype=torch.uint8)
    scales = torch.empty(buckets(n, bucket), dtype=torch.float32)
    # Ranges must begin both with a bucket and with a byte.
    unit = math.lcm(bucket, 64)
    if unit > _pool.GRAIN:
        wide = x.float()
        _scale_buckets(wide, bucket, norm == "l2", scales)
        encode(wide, scales, bits, bucket, seed, packed)
        return packed, scales
    span = unit * max(1, _FUSED // unit)
    to, to_scales = packed.numpy(), view(scales)

    def work(a: F32, _: F32 | None, lo: int) -> None:
        hi = lo + len(a)
        part, mine = to[lo * bits // 8 : (hi * bits + 7) // 8], to_scales[lo // bucket : buckets(hi, bucket)]
        quantise_range(a, bits, bucket, norm == "l2", span, *counters(seed, lo // 2), mine, part)

    Source(x).run(work, span * max(1, _pool.GRAIN // span))
    return packed, scales


def encode(
    x: Tensor, scales: Tensor, bits: int, bucket: int, seed: int, packed: Tensor, clipped: bool = False
) -> None:
    """The codes alone, for scales that are known; `clipped` if entries may exceed their scale."""
    to, known = packed.numpy(), view(scales)

    def work(a: F32, _: F32 | None, lo: int) -> None:
        mine = to[lo * bits // 8 : ((lo + len(a)) * bits + 7) // 8]
        encode_range(a, lo, known, bits, bucket, *counters(seed, lo // 2), mine, clipped)

    Source(x).run(work)


def _scale_buckets(x: Tensor, bucket: int, l2: bool, scales: Tensor) -> None:
    if bucket <= _pool.GRAIN:
        scales_range(view(x), bucket, l2, view(scales))
        return
    for which, lo in enumerate(range(0, x.numel(), bucket)):
        scales[which] = float(large_scale(Source(x[lo : lo + bucket]), l2))


def large_scale(source: Source, l2: bool) -> np.float32:
    """The scale of one bucket that is large enough for several threads."""
    if not l2:
        return scale_from_bits(max(source.run(lambda a, b, _: largest_bits(a)), default=0))

    def work(a: F32, _: F32 | None, lo: int) -> list[float]:
        return [squares(a[j : j + _pool.GRAIN]) for j in range(0, len(a), _pool.GRAIN)]

    return scale_from_squares(sum(part for parts in source.run(work) for part in parts))


def dequantise_mean(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bits: int, bucket: int, numel: int, out: Tensor
) -> None:
    codes, factors = addresses(packed), addresses(scales)

    def work(part: F32, lo: int) -> None:
        whole = len(part) - len(part) % LANES if bucket % LANES == 0 or bucket >= numel else 0
        if whole:
            decode_blocks(part[:whole], lo, numel, codes, factors, len(packed), bits, bucket)
        if whole < len(part):
            decode_range(part[whole:], lo + whole, numel, codes, factors, len(packed), bits, bucket)

    through_float32(out, work)


def warm() -> None:
    x = torch.arange(-50.0, 50.0)
    for norm in ("max", "l2"):
        packed, scales = quantise(x, 4, 10, norm, 1)
        large_scale(Source(x), norm == "l2")
        _scale_buckets(x, 10, norm == "l2", scales)
    encode(x, scales, 4, 10, 1, packed)
    dequantise_mean([packed, packed], [scales, scales], 4, 10, 100, torch.empty(100))
    packed, scales = quantise(x, 4, 100, "max", 1)
    dequantise_mean([packed, packed], [scales, scales], 4, 100, 100, torch.empty(100))
