"""Histograms of few pieces in l1: cells of equal mass from a small sample, counts of them, merging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.distributions import kernels
from thinwire.distributions.counts import ExactCounts
from thinwire.distributions.pieces import Fit, fit_pieces
from thinwire.distributions.protocol import (
    CHUNK,
    F64,
    I64,
    MEAN_MAGNITUDE,
    Additive,
    Norm,
    Sums,
    check_domain,
    check_samples,
    probabilities,
)
from thinwire.distributions.raw import Raw
from thinwire.errors import ConfigError

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
    a cell costs at most that cell's mass, 1 / cells, so k / epsilon cells do for an l1 error of epsilon.

    Interactive (a blackboard protocol): the second message depends on what all wrote in the first round.

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
    model: ClassVar[str] = "blackboard"

    def __post_init__(self) -> None:
        check_domain(self.domain)
        if not 1 <= self.pieces <= self.cells:
            raise ConfigError(f"{self.cells} cells cannot be merged into {self.pieces} pieces")

    @property
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

    domain: int
    pieces: int
    edges: tuple[int, ...]
    model: ClassVar[str] = "blackboard"

    def __str__(self) -> str:
        return f"QuantileCells(domain={self.domain}, pieces={self.pieces}, cells={len(self.edges) - 1})"

    @cached_property
    def _cell_of(self) -> NDArray[np.int32]:
        return np.repeat(np.arange(len(self.edges) - 1, dtype=np.int32), np.diff(self.edges))

    @cached_property
    def _counts(self) -> ExactCounts:
        return ExactCounts(max(2, len(self.edges) - 1))

    def empty(self) -> Any:
        return self._counts.empty()

    @property
    def bits_per_message(self) -> int:
        return self._counts.bits_per_message

    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Sums:
        x = check_samples(samples, self.domain)
        counts = np.zeros(self._counts.domain, np.int64)
        cells = np.empty(min(CHUNK, len(x)), np.int64)
        for low in range(0, len(x), CHUNK):
            piece = x[low : low + CHUNK].astype(np.int64, copy=False)
            kernels.look_up(piece, self._cell_of, cells[: len(piece)])
            kernels.count(cells[: len(piece)], counts)
        self._counts.check_total(len(x))
        return Sums(counts.astype(self.empty().dtype), len(x))

    def estimate(self, messages: Sums | Sequence[Sums]) -> F64:
        return self.fit(messages).values()

    def masses(self, messages: Sums | Sequence[Sums]) -> F64:
        return self._counts.estimate(messages)[: len(self.edges) - 1]

    def fit(self, messages: Sums | Sequence[Sums], norm: Norm = "l1") -> Fit:
        masses = self.masses(messages)
        n = messages.count if isinstance(messages, Sums) else sum(part.count for part in messages)
        return fit_pieces(np.array(self.edges, np.int64), masses, self.pieces, norm, n, exact=False)

    def variance(self, p: F64, n: int) -> F64:
        """Of the flattened cells, before merging: squared bias, and a cell's variance spread over it."""
        p = probabilities(p, self.domain)
        lengths = np.diff(self.edges)
        masses = np.add.reduceat(p, np.array(self.edges[:-1]))
        flat = np.repeat(masses / lengths, lengths)
        return (p - flat) ** 2 + np.repeat(masses * (1 - masses) / n / lengths**2.0, lengths)

    def predicted_l2(self, n: int) -> float:
        return 1.0 / n
