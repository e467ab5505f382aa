"""Distributions fitted to a histogram of magnitudes by maximum likelihood.

The entries are taken to be symmetric around zero. Zeros are left out, because no density has them: where a
unit is off, its gradients are exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.sessions.histogram import Histogram

Vector = np.ndarray[Any, np.dtype[np.float64]]
_TURNS = 40
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Family:
    """A density of magnitudes in units of its scale, as a logarithm; `shapes` is where its shape may lie."""

    log_density: Callable[[Vector, float], Vector]
    shapes: tuple[float, float] | None = None


def _gaussian(z: Vector, _: float) -> Vector:
    return 0.5 * math.log(2 / math.pi) - 0.5 * z**2


def _laplace(z: Vector, _: float) -> Vector:
    return -z


def _generalised(z: Vector, shape: float) -> Vector:
    """exp(-z^shape): Laplace at 1, Gaussian at 2."""
    return math.log(shape) - math.lgamma(1 / shape) - z**shape


def _student(z: Vector, freedom: float) -> Vector:
    """Student's t: a tail of z^-(1 + freedom)."""
    constant = math.lgamma(0.5 * (freedom + 1)) - math.lgamma(0.5 * freedom)
    return (
        math.log(2)
        + constant
        - 0.5 * (math.log(freedom * math.pi) + (freedom + 1) * np.log1p(z**2 / freedom))
    )


FAMILIES = {
    "Gaussian": Family(_gaussian),
    "Laplace": Family(_laplace),
    "generalised Gaussian": Family(_generalised, (0.1, 10.0)),
    "Student t": Family(_student, (0.3, 300.0)),
}


@dataclass(frozen=True)
class Fit:
    """A family with the scale and the shape (NaN if it has none) of the largest likelihood.

    - log_likelihood: per entry, in nats;
    - distance: of Kolmogorov and Smirnov, the largest difference of the two distribution functions.
    """

    family: str
    scale: float
    shape: float
    log_likelihood: float
    distance: float

    def density(self, magnitudes: Vector) -> Vector:
        return np.exp(_log_density(FAMILIES[self.family], magnitudes, self.scale, self.shape))


def fit_all(found: Histogram) -> tuple[Fit, ...]:
    """Every family, in the order of `FAMILIES`; none if all entries are zero."""
    counts = np.array(found.counts, np.float64)
    if not counts.any():
        return ()
    return tuple(_fit(name, family, counts / counts.sum()) for name, family in FAMILIES.items())


def _fit(name: str, family: Family, shares: Vector) -> Fit:
    edges = np.array(Histogram.edges())
    middles, widths = 0.5 * (edges[1:] + edges[:-1]), np.diff(edges)
    full = shares > 0
    x, weights = middles[full], shares[full]
    scales = math.log(x[0]) - 1, math.log(x[-1]) + 1

    def likelihood(log_scale: float, shape: float) -> float:
        return float(weights @ _log_density(family, x, math.exp(log_scale), shape))

    def best_scale(shape: float) -> float:
        return _maximise(lambda log_scale: likelihood(log_scale, shape), *scales)

    shape = math.nan
    if family.shapes is not None:
        low, high = (math.log(each) for each in family.shapes)
        best = _maximise(lambda s: likelihood(best_scale(math.exp(s)), math.exp(s)), low, high)
        shape = math.exp(best)
    log_scale = best_scale(shape)
    masses = np.exp(_log_density(family, middles, math.exp(log_scale), shape)) * widths
    distance = float(np.abs(np.cumsum(masses) - np.cumsum(shares)).max())
    return Fit(name, math.exp(log_scale), shape, likelihood(log_scale, shape), distance)


def _log_density(family: Family, x: Vector, scale: float, shape: float) -> Vector:
    return family.log_density(x / scale, shape) - math.log(scale)


def _maximise(function: Callable[[float], float], low: float, high: float) -> float:
    """By golden section: the place of the maximum of a function with one peak."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(_TURNS):
        if at_a < at_b:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = function(b)
        else:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = function(a)
    return 0.5 * (low + high)
