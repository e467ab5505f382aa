"""The threshold search of Gaussian-k, shared by the reference and the CPU kernels.

Both feed it exact counts, so both end at the same threshold.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

COUNTS = 8
_LARGEST = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Verdict:
    """Keep all above `threshold`; `capped`: too many, keep the k largest; None: take the exact top-k."""

    threshold: float | None
    capped: bool = False


def moments_from_sums(n: int, total: float, squares: float) -> tuple[float, float]:
    """Mean and unbiased standard deviation from count, sum and sum of squares."""
    if n == 0:
        return 0.0, 0.0
    mean = total / n
    variance = max(squares - total * mean, 0.0) / max(n - 1, 1)
    return mean, math.sqrt(variance)


def first_threshold(mean: float, deviation: float, k: int, numel: int) -> float:
    """The magnitude that a normal distribution exceeds with probability k / numel, both tails together."""
    quantile = NormalDist().inv_cdf(1.0 - 0.5 * k / numel)
    return as_float32(abs(mean) + deviation * quantile)


def search(first: float, k: int, count: Callable[[float], int]) -> Verdict:
    """Find a threshold with 2k/3 <= count <= 4k/3: bracket, then bisect geometrically, in at most 8 counts.

    The bracket opens in growing strides (1/2, 1/4, 1/16 ...): heavy tails put the first threshold far off.
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
            return Verdict(t)
        else:
            high = t
            enough = t if n >= 1 else enough
        if low is not None and high is not None:
            t = as_float32(math.sqrt(low) * math.sqrt(high))
        elif low is None:
            t, down = as_float32(down * t), down * down
        else:
            t, up = as_float32(up * t), up * up
        if t in (low, high):
            break  # neighbouring floats: no threshold lies between them
    if low is not None:
        return Verdict(low, capped=True)
    return Verdict(enough)


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", min(value, _LARGEST)))[0]
