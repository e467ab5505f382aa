"""Gaussian-k on the CPU: moments in one pass, then compaction passes that double as counts."""

import math
import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _collect
from thinwire.kernels.cpu._jit import F32, I32
from thinwire.kernels.cpu._sums import finite_sums
from thinwire.kernels.cpu._tensors import Source
from thinwire.kernels.cpu.selection import magnitude_bits, topk_of
from thinwire.kernels.reference.gaussian import COUNTS, LARGEST, quantile


def gaussiank(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    source = Source(x, grad)
    if k in (0, source.numel):
        return topk_of(source, k)
    return select_by_moments(source, k, finite_sums(source))


def select_by_moments(source: Source, k: int, sums: tuple[int, float, float]) -> tuple[Tensor, Tensor]:
    most = 4 * k // 3
    last: dict[float, tuple[I32, F32]] = {}  # in scratch memory, which holds one at a time

    def count(t: float) -> int:
        last.clear()
        found = _collect.survivors(source, magnitude_bits(t), most)
        if found is None:
            return most + 1  # it stopped early: too many is all that the search needs to know
        last[t] = found
        return len(found[0])

    t = search(first_threshold(*sums, k, source.numel), k, count)
    if t is None:
        return topk_of(source, k)
    if t not in last:
        count(t)
    indices, values = last[t]
    return torch.from_numpy(indices.copy()), torch.from_numpy(values.copy())


def first_threshold(count: int, total: float, squares: float, k: int, numel: int) -> float:
    """That of the reference, from sums over the `count` finite entries in double precision."""
    mean = total / max(count, 1)
    variance = max(squares - total * mean, 0.0) / max(count - 1, 1)
    return _as_float32(abs(mean) + math.sqrt(variance) * quantile(k, numel))


def search(first: float, k: int, count: Callable[[float], int]) -> float | None:
    """The search of the reference, which ends where it has found a threshold; None: take the exact top-k.

    `count` may stop counting beyond 4k/3: only which side it fell on matters there.
    """
    t = first
    enough: float | None = None  # the lowest threshold with some, but fewer than 2k/3
    high: float | None = None
    low: float | None = None
    down, up = 0.5, 1.5
    for _ in range(COUNTS):
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
    return struct.unpack("f", struct.pack("f", min(value, LARGEST)))[0]


def warm() -> None:
    x = torch.arange(-100.0, 100.0)
    for grad in (None, x):
        gaussiank(x, grad, 10)
    gaussiank(x * np.inf, None, 10)
