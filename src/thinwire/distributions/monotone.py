"""Monotone distributions: the cells of Birge's partition instead of symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thinwire.core import checks
from thinwire.distributions import kernels
from thinwire.distributions.grouping import Grouping
from thinwire.distributions.partition import F64, I64, Partition
from thinwire.distributions.protocol import MEAN_MAGNITUDE, Coded, Messages, bits_for
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

    `estimate` is unbiased for the flattened p; `isotonic` finds the nearest monotone one.

    Args:
        domain: samples are in 0..domain - 1.
        epsilon: how much longer each cell is than the one before.
        bits: of a message; with fewer than ceil(log2 T) the cells are learned by `Grouping`. 0: enough.
        increasing: p rises instead of falling.

    Reference: Birge 1987; Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt 2017.
    Differences from the paper: the isotonic fit, and grouping for small messages.
    """

    epsilon: float
    bits: int = 0
    increasing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.epsilon <= 1.0:
            raise ConfigError(f"Monotone: epsilon must be a number in (0, 1], not {self.epsilon!r}")
        checks.whole("Monotone", "bits", self.bits, 0, bits_for(self.cells))

    @cached_property
    def partition(self) -> Partition:
        """The cells, which get longer with the symbol."""
        edges = birge_edges(self.domain, self.epsilon)
        return Partition(self.domain - edges[::-1] if self.increasing else edges)

    @property
    def cells(self) -> int:
        """The number of cells."""
        return self.partition.cells

    @cached_property
    def inner(self) -> Raw | Grouping:
        """How cells are sent."""
        if self.bits in {0, bits_for(self.cells)}:
            return Raw(self.cells)
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

    @property
    def tally_size(self) -> int:
        return self.inner.tally_size

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        cells = np.empty_like(out)
        kernels.look_up(x, self.partition.cell_of, cells)
        self.inner.codes(cells, first, key, out)

    def add(self, codes: I64, first: int, tally: I64) -> None:
        self.inner.add(codes, first, tally)

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        return self.partition.spread(self.inner.finish(tally, parts))

    def cell_masses(self, messages: Sequence[Messages], n: int) -> tuple[Partition, F64, F64]:
        masses = self.partition.masses(self.estimate(messages))
        return self.partition, masses, self.inner.variance(np.maximum(masses, 0.0), n)

    def _variance(self, p: F64, n: int) -> F64:
        return self.partition.variance(p, self.inner.variance(self.partition.masses(p), n))

    def predicted_l2(self, n: int) -> float:
        return self.inner.predicted_l2(n)

    def predicted_l1(self, n: int) -> float:
        """Noise of the cells' masses, and flattening: epsilon / 4 of the mass where p falls like 1 / x."""
        return MEAN_MAGNITUDE * math.sqrt(self.cells * self.inner.predicted_l2(n)) + self.epsilon / 4.0


def isotonic(masses: F64, partition: Partition, *, increasing: bool) -> F64:
    """The monotone density nearest to these masses of cells, in l2 over the symbols; one for each cell."""
    lengths = partition.lengths.astype(np.float64)
    way = slice(None, None, -1 if increasing else 1)
    density = masses[way] / lengths[way]
    out = np.empty_like(density)
    kernels.pool_adjacent(density, lengths[way].copy(), out)
    return out[way]
