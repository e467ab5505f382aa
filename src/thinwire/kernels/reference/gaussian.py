"""Gaussian-k in plain torch. The search stays on the device; the host waits once, for the selection."""

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from thinwire.kernels.reference import selection

COUNTS = 8
LARGEST = torch.finfo(torch.float32).max
_ABOVE_ALL = 0x7FFFFFFF  # as the bits of a magnitude: nothing is larger, not even NaN


def gaussiank(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    x = selection.summed(x, grad).float()
    if k == 0 or k == x.numel():
        return selection.topk(x, None, k)
    indices = torch.nonzero(selection.magnitudes(x) > threshold_bits(x, k)).flatten()
    # A threshold that was found has an entry above it, so no entry means that none was found.
    return selection.take(x, indices) if indices.numel() else selection.topk(x, None, k)


def threshold_bits(x: Tensor, k: int) -> Tensor:
    """The threshold for about k entries as the bits of a float32; above all entries if there is none."""
    magnitudes = selection.magnitudes(x)
    t = search(first_threshold(x, k), k, lambda t: (magnitudes > _bits(t)).sum())
    return torch.where(t.isnan(), _ABOVE_ALL, _bits(t))


def first_threshold(x: Tensor, k: int) -> Tensor:
    """The magnitude that a normal distribution exceeds with probability k / numel, both tails together."""
    finite = torch.isfinite(x)
    exact = torch.where(finite, x, 0.0).double()
    count, total, squares = finite.sum(), exact.sum(), exact.square().sum()
    mean = total / count.clamp(min=1)
    variance = (squares - total * mean).clamp(min=0.0) / (count - 1).clamp(min=1)
    return _as_float32(mean.abs() + variance.sqrt() * quantile(k, x.numel()))


def quantile(k: int, numel: int) -> float:
    """How many deviations a normal variable exceeds with probability k / numel, both tails together."""
    return NormalDist().inv_cdf(1.0 - 0.5 * k / numel)


def search(first: Tensor, k: int, count: Callable[[Tensor], Tensor]) -> Tensor:
    """Find a threshold with 2k/3 <= count <= 4k/3: bracket, then bisect geometrically, in 8 counts.

    The bracket opens in growing strides (1/2, 1/4, 1/16 ...): heavy tails put the first threshold far off.
    Where all counts fall short, the lowest threshold with at least one entry will do; NaN means to take the
    exact top-k. All numbers are scalars on the device, and NaN stands for one that is not known yet.
    """
    t = first
    low = high = enough = found = torch.full_like(first, math.nan)
    stuck = torch.zeros_like(first, dtype=torch.bool)
    down, up = 0.5, 1.5
    for _ in range(COUNTS):
        n = count(t)
        many, few = 3 * n > 4 * k, 3 * n < 2 * k
        going = found.isnan() & ~stuck
        found = torch.where(going & ~many & ~few, t, found)
        low = torch.where(going & many, t, low)
        high = torch.where(going & few, t, high)
        enough = torch.where(going & few & (n >= 1), t, enough)
        t = torch.where(low.isnan(), down * t, torch.where(high.isnan(), up * t, low.sqrt() * high.sqrt()))
        t = _as_float32(t)
        stuck = stuck | (t == low) | (t == high)  # neighbouring floats: no threshold lies between them
        down, up = down * down, up * up
    return torch.where(found.isnan() & low.isnan(), enough, found)


def _as_float32(value: Tensor) -> Tensor:
    return value.clamp(max=LARGEST).float().double()


def _bits(t: Tensor) -> Tensor:
    return t.float().view(torch.int32)
