"""Monotone distributions: the cells of Birge's partition instead of symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.distributions import kernels
from thinwire.distributions.grouping import Grouping
from thinwire.distributions.protocol import (
    F64,
    I64,
    MEAN_MAGNITUDE,
    Coded,
    Messages,
    bits_for,
    check_domain,
    probabilities,
)
from thinwire.distributions.raw import Raw
from thinwire.errors import ConfigError


def birge_edges(domain: int, epsilon: float) -> I64:
    """Cells of lengths floor((1 + epsilon)^j), j = 0, 1, ...: known without a look at the data."""
    edges = [0]
    length = 1.0
    while edges[-1] < domain:
        edges.append(min(domain, edges[-1] + int(length)))
        length *= 1.0 + epsilon
    return np.array(edges, np.int64)


@dataclass(frozen=True)
class Monotone(Coded):
    """Monotone distributions by Birge's oblivious partition: a sample becomes the number of its cell.

    A monotone p is within O(epsilon) in l1 of what it becomes if each of the T = O(log(epsilon domain) /
    epsilon) cells is flattened, so T cells are all that must be learned: ceil(log2 T) bits a sample, and
    O(T / epsilon^2) samples, where symbols would take log2(domain) bits and O(domain / epsilon^2) samples.

    `estimate` is the flattened estimate, unbiased for the flattened p; `fitted` is the nearest monotone one.

    Args:
        domain: samples are in 0..domain - 1.
        epsilon: how much longer each cell is than the one before.
        bits: of a message; with fewer than ceil(log2 T) the cells are learned by `Grouping`. 0: enough.
        increasing: p rises instead of falling.

    Reference: Birge 1987; Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt 2017.
    Differences from the paper: the isotonic fit, and grouping for small messages.
    """

    domain: int
    epsilon: float
    bits: int = 0
    increasing: bool = False

    def __post_init__(self) -> None:
        check_domain(self.domain)
        if not 0.0 < self.epsilon <= 1.0:
            raise ConfigError(f"epsilon must be in (0, 1], not {self.epsilon!r}")
        if self.bits and not 1 <= self.bits <= bits_for(self.cells):
            raise ConfigError(f"bits must be 0 or in 1..{bits_for(self.cells)}, not {self.bits!r}")

    @cached_property
    def edges(self) -> I64:
        edges = birge_edges(self.domain, self.epsilon)
        return self.domain - edges[::-1] if self.increasing else edges

    @property
    def cells(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def _cell_of(self) -> NDArray[np.int32]:
        return np.repeat(np.arange(self.cells, dtype=np.int32), np.diff(self.edges))

    @cached_property
    def inner(self) -> Raw | Grouping:
        """How cells are told."""
        if self.bits in {0, bits_for(self.cells)}:
            return Raw(max(self.cells, 2))
        return Grouping(self.cells, self.bits)

    @property
    def bits_per_message(self) -> int:
        return self.inner.bits_per_message

    @property
    def code_limit(self) -> int:
        return self.inner.code_limit

    @property
    def smallest(self) -> int:
        return self.inner.smallest

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        cells = np.empty_like(out)
        kernels.look_up(x, self._cell_of, cells)
        self.inner.codes(cells, first, key, out)

    def begin(self, parts: Sequence[Messages]) -> Any:
        return self.inner.begin(parts)

    def tally(self, codes: I64, first: int, into: Any) -> None:
        self.inner.tally(codes, first, into)

    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64:
        return self.flattened(self.inner.finish(tally, parts)[: self.cells])

    def flattened(self, masses: F64) -> F64:
        lengths = np.diff(self.edges)
        return np.repeat(masses / lengths, lengths)

    def masses(self, values: F64) -> F64:
        return np.add.reduceat(values, self.edges[:-1])

    def variance(self, p: F64, n: int) -> F64:
        """Squared bias of flattening, and the variance of the cell's mass spread over it."""
        p = probabilities(p, self.domain)
        masses = self.masses(p)
        lengths = np.diff(self.edges)
        spread = self.inner.variance(masses, n) / lengths.astype(np.float64) ** 2
        return (p - self.flattened(masses)) ** 2 + np.repeat(spread, lengths)

    def predicted_l2(self, n: int) -> float:
        return self.inner.predicted_l2(n)

    def predicted_l1(self, n: int) -> float:
        """Noise of the cells' masses, and flattening: epsilon / 4 of the mass where p falls like 1 / x."""
        return MEAN_MAGNITUDE * math.sqrt(self.cells * self.inner.predicted_l2(n)) + self.epsilon / 4.0


def isotonic(masses: F64, edges: I64, *, increasing: bool) -> F64:
    """The monotone density nearest to these masses of cells, in l2 over the symbols; one for each cell."""
    lengths = np.diff(edges).astype(np.float64)
    density = masses / lengths
    out = np.empty_like(density)
    if increasing:
        kernels.pool_adjacent(density[::-1].copy(), lengths[::-1].copy(), out)
        return out[::-1]
    kernels.pool_adjacent(density, lengths, out)
    return out
