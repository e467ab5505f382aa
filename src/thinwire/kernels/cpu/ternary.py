"""TernGrad's codes on the CPU: one pass for the sums and the maximum, one for the codes."""

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._codes import largest_bits, scale_from_bits
from thinwire.kernels.cpu._jit import F32, F64, kernel
from thinwire.kernels.cpu._sums import TILE, rows_for, tile_sums, total_of
from thinwire.kernels.cpu._tensors import Source
from thinwire.kernels.cpu.quantisation import encode, large_scale
from thinwire.kernels.reference.ternary import clipped_scale


@kernel
def sums_and_largest(x: F32, block: int, out: F64) -> int:
    """Per block (sum, sum of squares); the largest magnitude as an integer."""
    top = np.int32(0)
    for lo in range(0, len(x), TILE):
        tile = x[lo : min(lo + TILE, len(x))]
        total, squares = tile_sums(tile)
        row = out[lo // block]
        row[0] += total
        row[1] += squares
        top = max(top, largest_bits(tile))
    return int(top)


def ternary_quantise(x: Tensor, clip_sigma: float | None, seed: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    packed = torch.empty((n + 3) // 4, dtype=torch.uint8)
    scale = torch.tensor([_scale(x, clip_sigma)], dtype=torch.float32)
    encode(x, scale, 2, max(n, 1), seed, packed, clipped=True)
    return packed, scale


def _scale(x: Tensor, clip_sigma: float | None) -> float:
    if x.numel() == 0:
        return 0.0
    if clip_sigma is None:
        return float(large_scale(Source(x), l2=False))

    def work(a: F32, _: F32 | None, lo: int) -> tuple[int, F64]:
        rows = rows_for(a, 2)
        return sums_and_largest(a, _pool.GRAIN, rows), rows

    parts = Source(x).run(work)
    largest = float(scale_from_bits(max(top for top, _ in parts)))
    if math.isnan(largest):
        return math.nan
    total, squares = total_of([rows for _, rows in parts])
    return clipped_scale(x.numel(), largest, total, squares, clip_sigma)


def warm() -> None:
    ternary_quantise(torch.arange(-50.0, 50.0), 2.5, 1)
    ternary_quantise(torch.arange(-50.0, 50.0), None, 1)
