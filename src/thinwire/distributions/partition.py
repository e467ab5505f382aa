"""The domain cut into cells of neighbouring symbols."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """Cell j has the symbols edges[j] .. edges[j + 1] - 1."""

    edges: I64

    @staticmethod
    def of_symbols(domain: int) -> Partition:
        """A cell for each symbol."""
        return Partition(np.arange(domain + 1, dtype=np.int64))

    @property
    def cells(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def lengths(self) -> I64:
        return np.diff(self.edges)

    @cached_property
    def cell_of(self) -> NDArray[np.int32]:
        """The cell of every symbol."""
        return np.repeat(np.arange(self.cells, dtype=np.int32), self.lengths)

    def masses(self, values: NDArray[Number]) -> NDArray[Number]:
        return np.add.reduceat(values, self.edges[:-1])

    def spread(self, masses: F64) -> F64:
        """The masses, spread evenly over their cells."""
        return np.repeat(masses / self.lengths, self.lengths)

    def flattened(self, p: F64) -> F64:
        """p, with the mean of its cell in place of each entry."""
        return self.spread(self.masses(p))

    def variance(self, p: F64, of_masses: F64) -> F64:
        """Expected squared errors of estimated masses that are spread: bias, and the masses' variance."""
        of_symbols = of_masses / self.lengths.astype(np.float64) ** 2
        return (p - self.flattened(p)) ** 2 + np.repeat(of_symbols, self.lengths)
