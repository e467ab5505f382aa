"""Piecewise constant fits: greedy merging and dynamic programming over neighbouring segments.

A segment has a length and a mass. Merging a run of segments into one piece costs

    "l2":  sum_i l_i (d_i - d)^2           d_i = m_i / l_i, d the piece's density
    "l1":  sum_i l_i (d_i - d)^2 / d_i     chi-squared, which bounds the square of the l1 distance

Both are differences of sums over the run, so a run's cost is read off prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.core import checks
from thinwire.distributions.partition import F64, I64, Partition
from thinwire.distributions.protocol import Norm

# Dynamic programming takes pieces x segments^2 steps; above this many segments greedy merging comes first.
EXACT_BELOW = 800
_INFINITE = np.inf


@dataclass(frozen=True)
class Fit:
    """The pieces, their masses, and what the fit costs against the segments."""

    partition: Partition
    masses: F64
    cost: float

    def values(self) -> F64:
        """The density at every symbol."""
        return self.partition.spread(self.masses)


class _Costs:
    """Costs of runs of segments, by prefix sums."""

    def __init__(self, lengths: I64, masses: F64, norm: Norm, floor: float) -> None:
        weight = np.maximum(masses, floor) if norm == "l1" else None
        self.length = _prefix(lengths.astype(np.float64))
        self.mass = _prefix(masses if weight is None else weight)
        self.square = _prefix(
            masses**2 / lengths if weight is None else lengths.astype(np.float64) ** 2 / weight
        )
        self.norm = norm

    def of(self, begin: I64, end: I64) -> F64:
        length = self.length[end] - self.length[begin]
        mass = self.mass[end] - self.mass[begin]
        square = self.square[end] - self.square[begin]
        if self.norm == "l2":
            return np.maximum(square - mass**2 / length, 0.0)
        return np.maximum(square * (mass / length) ** 2 - mass, 0.0)


def _prefix(values: F64) -> F64:
    return np.concatenate(([0.0], np.cumsum(values)))


def fit_pieces(segments: Partition, masses: F64, pieces: int, norm: Norm, n: int, *, exact: bool) -> Fit:
    """At most `pieces` pieces out of the segments.

    Greedy merging in rounds (pair neighbours, keep apart the pairs that would cost most) takes near-linear
    time; from `EXACT_BELOW` segments on, neighbours are merged one by one, or, if `exact`, the cheapest cut
    of all is found by dynamic programming. `n`: samples behind the masses; empty segments count as half a
    sample.
    """
    checks.whole("fit_pieces", "pieces", pieces, 1)
    masses = np.maximum(masses, 0.0)
    costs = _Costs(segments.lengths, masses, norm, 0.5 / n)
    cuts = np.arange(segments.cells + 1, dtype=np.int64)
    while len(cuts) - 1 > max(EXACT_BELOW, 8 * pieces):
        cuts = _merge_round(cuts, costs, max(EXACT_BELOW // 4, 2 * pieces))
    if len(cuts) - 1 > pieces:
        cuts = _cheapest(cuts, costs, pieces) if exact else _merge_singly(cuts, costs, pieces)
    total = _prefix(masses)
    cost = float(costs.of(cuts[:-1], cuts[1:]).sum())
    return Fit(Partition(segments.edges[cuts]), total[cuts[1:]] - total[cuts[:-1]], cost)


def _merge_round(cuts: I64, costs: _Costs, apart: int) -> I64:
    """Pair neighbours; all but the `apart` dearest pairs become one segment each."""
    pairs = (len(cuts) - 1) // 2
    price = costs.of(cuts[0 : 2 * pairs : 2], cuts[2 : 2 * pairs + 1 : 2])
    keep = np.ones(len(cuts), bool)
    middles = 2 * np.arange(pairs) + 1
    keep[middles] = False
    keep[middles[np.argpartition(price, pairs - apart)[pairs - apart :]]] = True
    return cuts[keep]


def _merge_singly(cuts: I64, costs: _Costs, pieces: int) -> I64:
    """Merge the two neighbours whose union costs least more than they do, until so many are left."""
    while len(cuts) - 1 > pieces:
        own = costs.of(cuts[:-1], cuts[1:])
        rise = costs.of(cuts[:-2], cuts[2:]) - own[:-1] - own[1:]
        cuts = np.delete(cuts, int(np.argmin(rise)) + 1)
    return cuts


def _cheapest(cuts: I64, costs: _Costs, pieces: int) -> I64:
    """The cut into at most `pieces` runs that costs least of all."""
    size = len(cuts)
    if size > 2 * EXACT_BELOW:
        return _merge_singly(cuts, costs, pieces)
    with np.errstate(divide="ignore", invalid="ignore"):  # runs that end before they begin
        price = costs.of(cuts[:, None], cuts[None, :])
    price[np.tril_indices(size)] = _INFINITE
    best: F64 = price[0].copy()
    chosen: list[I64] = []
    for _ in range(pieces - 1):
        candidates: F64 = best[:, None] + price
        last: I64 = candidates.argmin(0)
        reached: F64 = candidates[last, np.arange(size)]
        stay: NDArray[np.bool_] = best <= reached
        chosen.append(np.where(stay, -1, last))
        best = np.where(stay, best, reached)
    ends = [size - 1]
    for choice in reversed(chosen):
        if choice[ends[-1]] >= 0:
            ends.append(int(choice[ends[-1]]))
    return cuts[np.array([0, *reversed([end for end in ends if end > 0])])]
