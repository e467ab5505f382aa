"""Histograms of few pieces in l1: cells of equal mass from a small sample, counts of them, merging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from thinwire.core import checks
from thinwire.distributions.counts import ExactCounts, counted
from thinwire.distributions.partition import F64, I64, Partition
from thinwire.distributions.pieces import fit_pieces
from thinwire.distributions.protocol import MEAN_MAGNITUDE, Additive, Sums, probabilities
from thinwire.distributions.raw import Raw

PILOT_PER_CELL = 8


def quantile_edges(p: F64, cells: int) -> I64:
    """Cuts into about `cells` cells of equal mass; a symbol that has a cell's mass gets one alone."""
    domain = len(p)
    cumulative = np.cumsum(p)
    targets = np.arange(1, cells) / cells * cumulative[-1]
    cuts = np.asarray(np.searchsorted(cumulative, targets, side="left"), np.int64) + 1
    heavy = np.flatnonzero(p >= 1.0 / cells)
    edges = np.unique(np.concatenate(([0, domain], cuts, heavy, heavy + 1)))
    return edges[edges <= domain].astype(np.int64)


@dataclass(frozen=True)
class QuantileCells:
    """Histograms in l1, in two rounds: where the mass is, then how much of it.

    Round 1: a few raw samples of every server give all of them the same partition into `cells` cells of about
    equal mass. Round 2: the counts of the cells are added up by an all-reduce. The referee flattens the
    cells and merges neighbours greedily until k pieces are left. A piece of the truth that begins inside
    a cell costs at most that cell's mass, 1 / cells, so an l1 error of epsilon takes k / epsilon cells.

    Interactive (a blackboard protocol): the second message depends on all messages of the first round.

    Args:
        domain: samples are in 0..domain - 1.
        pieces: k.
        cells: of the partition, k / epsilon or so.

    Reference: Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt 2017; Acharya, Diakonikolas, Li,
    Schmidt 2017 for merging.
    Differences from the paper: the protocol is built from its statement; merging compares neighbours by
    chi-squared, which bounds l1.
    """

    domain: int
    pieces: int
    cells: int

    def __post_init__(self) -> None:
        checks.whole("QuantileCells", "pieces", self.pieces, 1, self.cells)
        _ = self.pilot

    @cached_property
    def pilot(self) -> Raw:
        """Round 1."""
        return Raw(self.domain)

    @property
    def pilot_samples(self) -> int:
        """How many raw samples round 1 needs, over all servers."""
        return PILOT_PER_CELL * self.cells

    def refine(self, p: F64) -> CellCounts:
        """Round 2, from the estimate of round 1."""
        edges = quantile_edges(probabilities(p, self.domain), self.cells)
        return CellCounts(self.domain, self.pieces, tuple(edges.tolist()))

    def predicted_l1(self, n: int) -> float:
        """Noise of k pieces, and k - 1 cells that a jump cuts, half of whose mass is misplaced."""
        return MEAN_MAGNITUDE * math.sqrt(2.0 * self.pieces / n) + 0.5 * (self.pieces - 1) / self.cells


@dataclass(frozen=True)
class CellCounts(Additive):
    """Round 2 of `QuantileCells`: counts of the cells between `edges`."""

    pieces: int
    edges: tuple[int, ...]

    def __str__(self) -> str:
        return f"QuantileCells(domain={self.domain}, pieces={self.pieces}, cells={self.partition.cells})"

    @cached_property
    def partition(self) -> Partition:
        """The cells."""
        return Partition(np.array(self.edges, np.int64))

    @cached_property
    def counts(self) -> ExactCounts:
        """How cells are sent."""
        return ExactCounts(max(2, self.partition.cells))

    @property
    def bits_per_message(self) -> int:
        return self.counts.bits_per_message

    def empty(self) -> Any:
        return self.counts.empty()

    def check_count(self, n: int) -> None:
        self.counts.check_count(n)

    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Sums:
        cells = np.zeros(self.counts.domain, np.int64)
        cells[: self.partition.cells] = self.partition.masses(counted(samples, self.domain))
        return self.counts.sums_of(cells)

    def estimate_sum(self, sums: Sums) -> F64:
        masses = self._masses(sums)
        return fit_pieces(self.partition, masses, self.pieces, "l1", sums.count, exact=False).values()

    def _masses(self, sums: Sums) -> F64:
        return self.counts.estimate_sum(sums)[: self.partition.cells]

    def cell_masses(self, messages: Sequence[Sums], n: int) -> tuple[Partition, F64, F64]:
        masses = self._masses(self.added(messages))
        return self.partition, masses, masses * (1.0 - masses) / n

    def _variance(self, p: F64, n: int) -> F64:
        """Before merging."""
        masses = self.partition.masses(p)
        return self.partition.variance(p, masses * (1.0 - masses) / n)

    def predicted_l2(self, n: int) -> float:
        return 1.0 / n
