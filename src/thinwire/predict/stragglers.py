"""Workers whose step times vary: all of them wait for the slowest.

The time of a worker's step is log-normal: its mean is the given time, its standard deviation a given share
of it. Steps and workers are independent. The slowest of W workers is below the quantile q^(1/W) of that
distribution with the probability q.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

_NORMAL = NormalDist()
# The slowest worker is faster in one of twenty cases, and slower in one of twenty.
EARLY, USUAL, LATE = 0.05, 0.5, 0.95


class Factors(NamedTuple):
    """How many times as long as the mean step the slowest worker takes: rarely less, usually, rarely more."""

    low: float
    usual: float
    high: float


def slowest(workers: int, deviation: float, steps: int = 1) -> Factors:
    """For so many workers, which wait for each other after every `steps` steps.

    The standard deviation of a mean of `steps` steps is smaller by the root of their number.
    """
    if deviation <= 0 or workers < 1:
        return Factors(1.0, 1.0, 1.0)
    variance = math.log(1 + deviation**2 / steps)
    sigma = math.sqrt(variance)
    return Factors(*(math.exp(sigma * largest(workers, q) - variance / 2) for q in (EARLY, USUAL, LATE)))


def largest(count: int, probability: float = USUAL) -> float:
    """The largest of so many standard normal numbers is below this with the given probability."""
    # 1 - q^(1/n), without the cancellation of a difference from 1.
    above = -math.expm1(math.log(probability) / count)
    return -_NORMAL.inv_cdf(above)
