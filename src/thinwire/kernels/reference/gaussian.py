"""Gaussian-k in plain torch, and the threshold search that all backends share.

They feed the search exact counts, so all end at the same threshold.
"""

import math
import struct
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from thinwire.kernels.reference import selection

_COUNTS = 8
_LARGEST = torch.finfo(torch.float32).max


def gaussiank(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    x = selection.summed(x, grad).float()
    if k == 0 or k == x.numel():
        return selection.topk(x, None, k)
    finite = x[torch.isfinite(x)].double()
    sums = finite.numel(), float(finite.sum()), float(finite.square().sum())
    t = search(first_threshold(*sums, k, x.numel()), k, lambda t: int(selection.above(x, t).sum()))
    return selection.topk(x, None, k) if t is None else selection.threshold(x, None, t)


def first_threshold(count: int, total: float, squares: float, k: int, numel: int) -> float:
    """The magnitude that a normal distribution exceeds with probability k / numel, both tails together.

    `total` and `squares` are sums over the `count` finite entries, in double precision.
    """
    mean = total / count if count else 0.0
    variance = max(squares - total * mean, 0.0) / max(count - 1, 1)
    quantile = NormalDist().inv_cdf(1.0 - 0.5 * k / numel)
    return _as_float32(abs(mean) + math.sqrt(variance) * quantile)


def search(first: float, k: int, count: Callable[[float], int]) -> float | None:
    """Find a threshold with 2k/3 <= count <= 4k/3: bracket, then bisect geometrically, in at most 8 counts.

    The bracket opens in growing strides (1/2, 1/4, 1/16 ...): heavy tails put the first threshold far off.
    `count` may stop counting beyond 4k/3: only which side it fell on matters there. Where all counts fall
    short, the lowest threshold with at least one entry will do; None means to take the exact top-k.
    """
    t = first
    enough: float | None = None  # the lowest threshold with some, but fewer than 2k/3
    high: float | None = None
    low: float | None = None
    down, up = 0.5, 1.5
    for _ in range(_COUNTS):
        n = count(t)
        if 3 * n > 4 * k:
            low = t
        elif 3 * n >= 2 * k:
            return t
        else:
            high = t
            enough = t if n >= 1 else enough
        if low is not None and high is not None:
            t = _as_float32(math.sqrt(low) * math.sqrt(high))
        elif low is None:
            t, down = _as_float32(down * t), down * down
        else:
            t, up = _as_float32(up * t), up * up
        if t in (low, high):
            break  # neighbouring floats: no threshold lies between them
    return enough if low is None else None


def _as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", min(value, _LARGEST)))[0]
