"""Random rotation on the CPU: every block is turned while it is in the first-level cache."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, I64, U32, kernel
from thinwire.kernels.cpu._random import counters, word
from thinwire.kernels.cpu._simd import LANES
from thinwire.kernels.cpu._simd_transforms import (
    WIDTH,
    butterfly2,
    butterfly4,
    butterfly8,
    flip64,
    hadamard64,
    signed_hadamard64,
)
from thinwire.kernels.cpu._tensors import view
from thinwire.kernels.reference.rotation import round_seeds, round_widths, scale_of


@kernel
def signs_at(counter: np.uint32, place: int, key: np.uint32) -> np.uint64:
    """64 sign bits, for the entries from `place` on, a multiple of 32."""
    at = np.uint32(counter + np.uint32(place // 32))
    high = np.uint64(word(np.uint32(at + np.uint32(1)), key))
    return np.uint64(word(at, key)) | (high << np.uint64(32))


@kernel
def flip(source: F32, tile: F32, place: int, counter: np.uint32, key: np.uint32, scale: np.float32) -> None:
    """tile = D source scale, entry by entry; the signs of this block begin at `place`."""
    for j in range(len(tile)):
        bits = word(np.uint32(counter + np.uint32((place + j) // 32)), key)
        scaled = source[j] * scale
        tile[j] = -scaled if (bits >> np.uint32((place + j) % 32)) & np.uint32(1) else scaled


@kernel
def short_levels(tile: F32) -> None:
    """The transform of fewer than 64 entries."""
    half = 1
    while half < len(tile):
        for low in range(len(tile)):
            if not low & half:
                a, b = tile[low], tile[low + half]
                tile[low], tile[low + half] = a + b, a - b
        half *= 2


@kernel
def far_levels(tile: F32, width: int) -> None:
    """The levels of entries that are 64 and more apart, in stretches of `width`."""
    stride = LANES
    while stride < width:
        radix = min(8, width // stride)
        for lo in range(0, len(tile), radix * stride):
            for at in range(lo, lo + stride, WIDTH):
                if radix == 8:
                    butterfly8(tile, at, stride)
                elif radix == 4:
                    butterfly4(tile, at, stride)
                else:
                    butterfly2(tile, at, stride)
        stride *= radix


@kernel
def turn(
    source: F32, tile: F32, place: int, counter: np.uint32, key: np.uint32, width: int, scale: np.float32
) -> None:
    """tile = H D source, with H on stretches of `width`."""
    if len(tile) < LANES:
        flip(source, tile, place, counter, key, scale)
        short_levels(tile)
        return
    for at in range(0, len(tile), LANES):
        signed_hadamard64(source, at, tile, at, signs_at(counter, place + at, key), scale)
    far_levels(tile, width)


@kernel
def turn_range(source: F32, out: F32, first: int, block: int, keys: U32, widths: I64, scales: F32) -> None:
    """out = R source for whole blocks, of which this is the first; two keys for each round."""
    for lo in range(0, len(out), block):
        tile, place = out[lo : lo + block], (first + lo // block) * block
        turn(source[lo : lo + block], tile, place, keys[0], keys[1], widths[0], scales[0])
        turn(tile, tile, place, keys[2], keys[3], widths[1], scales[1])


@kernel
def turn_back_range(
    source: F32, out: F32, first: int, block: int, keys: U32, widths: I64, scales: F32
) -> None:
    """out = R^T source = D H D H source, with what the second round has first."""
    both = np.float32(scales[0] * scales[1])
    for lo in range(0, len(out), block):
        given, tile, place = source[lo : lo + block], out[lo : lo + block], (first + lo // block) * block
        if block < LANES:
            for j in range(block):
                tile[j] = given[j]
            short_levels(tile)
        else:
            for at in range(0, block, LANES):
                hadamard64(given, at, tile, at)
            far_levels(tile, widths[1])
        turn(tile, tile, place, keys[2], keys[3], widths[0], both)
        if block < LANES:
            flip(tile, tile, place, keys[0], keys[1], np.float32(1.0))
        else:
            for at in range(0, block, LANES):
                flip64(tile, at, signs_at(keys[0], place + at, keys[1]))


class Turning(NamedTuple):
    """What kernels need to know of a rotation."""

    block: int
    keys: U32
    widths: I64
    scales: F32

    @staticmethod
    def of(seed: int, block: int) -> "Turning":
        keys = [counters(each, 0) for each in round_seeds(seed)]
        widths = round_widths(block)
        scales = [scale_of(width) for width in widths]
        return Turning(
            block, np.array(keys, np.uint32).flatten(), np.array(widths), np.array(scales, np.float32)
        )


def rotate(x: Tensor, seed: int, block: int, out: Tensor) -> None:
    """The block that ends with the tensor first, then the regular ones."""
    n, how = x.numel(), Turning.of(seed, block)
    source, to = _source(x, out), view(out)
    whole = regular = n - n % block
    if n > whole:  # it overlaps the last regular block, which is turned in place after it
        regular -= block
        to[regular:] = source[regular:]
        turn_range(to[n - block :], to[n - block :], whole // block, *how)
        turn_range(to[regular:whole], to[regular:whole], regular // block, *how)
    _run(turn_range, source[:regular], to[:regular], how)


def rotate_back(x: Tensor, seed: int, block: int, out: Tensor) -> None:
    n, how = x.numel(), Turning.of(seed, block)
    source, to = _source(x, out), view(out)
    whole = n - n % block
    to[whole:] = source[whole:]
    _run(turn_back_range, source[:whole], to[:whole], how)
    if n > whole:
        turn_back_range(to[n - block :], to[n - block :], whole // block, *how)


def _source(x: Tensor, out: Tensor) -> F32:
    """The entries as float32; others are widened in `out`."""
    if x.dtype == torch.float32:
        return view(x)
    out.copy_(x)
    return view(out)


def _run(work: Callable[..., None], source: F32, to: F32, how: Turning) -> None:
    """Regular blocks, from the first on."""

    def part(lo: int, hi: int) -> None:
        work(source[lo:hi], to[lo:hi], lo // how.block, *how)

    _pool.run_cuts(part, _pool.cuts(len(to)))


def warm() -> None:
    x = torch.arange(200.0)
    for block in (16, 128):
        rotate(x, 1, block, x)
        rotate_back(x, 1, block, x)
