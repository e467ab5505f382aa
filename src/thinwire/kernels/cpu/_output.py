"""Writing float32 results to an output of any float type, and dividing by the number of workers."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool, _scratch
from thinwire.kernels.cpu._jit import F32, kernel
from thinwire.kernels.cpu._source import WIDEN, view


@kernel
def fill(tile: F32, value: np.float32) -> None:
    # A loop: slice assignment would not vectorise.
    for j in range(len(tile)):
        tile[j] = value


@kernel
def divide(tile: F32, workers: int) -> None:
    """tile /= workers, by a product where that gives the same bits."""
    if workers == 1:
        return
    if workers & (workers - 1) == 0:
        inverse = np.float32(1.0 / workers)
        for j in range(len(tile)):
            tile[j] *= inverse
    else:
        by = np.float32(workers)
        for j in range(len(tile)):
            tile[j] /= by


def through_float32(out: Tensor, work: Callable[[F32, int], None], grain: int) -> None:
    """work(float32 part, first position) for parts of `out`, which begin at multiples of `grain`."""
    n = out.numel()
    if out.dtype == torch.float32:
        _pool.run_cuts(lambda lo, hi: work(view(out[lo:hi]), lo), _pool.cuts(n, grain))
        return
    block = -(-WIDEN // grain) * grain
    scratch = _scratch.float32("narrowed", min(n, block))
    for lo in range(0, n, block):
        part = scratch[: min(block, n - lo)]
        work(view(part), lo)
        out[lo : lo + block].copy_(part)
