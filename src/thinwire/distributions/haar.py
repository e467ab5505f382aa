"""Histograms of few pieces in l2: Haar wavelets in a count sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire import kernels as tensor_kernels
from thinwire.core import checks
from thinwire.distributions.counts import counted
from thinwire.distributions.hadamard import power_of_two
from thinwire.distributions.partition import Partition
from thinwire.distributions.pieces import Fit, fit_pieces
from thinwire.distributions.protocol import F64, Additive, Sums, bits_for
from thinwire.errors import PayloadError

ROWS = (1, 3, 5, 7)


def haar(x: F64) -> F64:
    """The orthonormal Haar transform; the length is a power of two. Coarse coefficients come first."""
    y = x.astype(np.float64)
    out = np.empty_like(y)
    size = len(y)
    while size > 1:
        even, odd = y[0:size:2], y[1:size:2]
        out[size // 2 : size] = (even - odd) / math.sqrt(2.0)
        y = (even + odd) / math.sqrt(2.0)
        size //= 2
    out[0] = y[0]
    return out


def inverse_haar(coefficients: F64) -> F64:
    y = coefficients[:1].astype(np.float64)
    size = 1
    while size < len(coefficients):
        detail = coefficients[size : 2 * size]
        longer = np.empty(2 * size)
        longer[0::2] = (y + detail) / math.sqrt(2.0)
        longer[1::2] = (y - detail) / math.sqrt(2.0)
        y, size = longer, 2 * size
    return y


def haar_terms(domain: int, pieces: int) -> int:
    """At most so many Haar coefficients of a histogram of `pieces` pieces are not zero.

    Besides the mean, only wavelets that a jump lies inside of: one at each scale for each of the jumps.
    """
    size = power_of_two(domain)
    jumps = pieces - 1 + (size > domain)  # beyond the domain there are zeros
    return min(size, 1 + jumps * bits_for(size))


@dataclass(frozen=True)
class HaarSketch(Additive):
    """Histograms in l2: the Haar transform of the counts, in a count sketch that adds up over servers.

    A histogram of k pieces has at most 1 + (k - 1) log2(domain) Haar coefficients that are not zero.
    Servers transform their counts and send a sketch of rows x cols sums, 32 bits each, whatever the number
    of samples and the domain; one all-reduce adds them. The referee reads the largest coefficients off the
    sum, transforms back, and finds the best k pieces by dynamic programming over the steps that are left.

    The squared error has three parts, with K the number of coefficients: sampling, K / (n domain) or so;
    what the sketch adds, K ln(domain) / (n cols), as long as cols is several times K; and how far p is from a
    histogram of k pieces.

    Args:
        domain: samples are in 0..domain - 1.
        pieces: k.
        cols: of the sketch; several times 64, because blocks of 64 neighbours share their columns.
        rows: 1, 3, 5 or 7; the median over rows is taken.
        seed: of the hashes; public.

    Reference: Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt 2017; Gilbert et al. 2002 for sketched
    wavelets.
    Differences from the paper: a count sketch with blocked hashes; the paper's protocol was not available and
    this one is built from its statement.
    """

    pieces: int
    cols: int
    rows: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("HaarSketch", "pieces", self.pieces, 1, self.domain)
        checks.whole("HaarSketch", "cols", self.cols, 64, 2**26)
        checks.one_of("HaarSketch", "rows", self.rows, ROWS)

    def empty(self) -> Any:
        return np.zeros((self.rows, self.cols), np.float32)

    @property
    def bits_per_message(self) -> int:
        return 32 * self.rows * self.cols

    @property
    def terms(self) -> int:
        """The number of Haar coefficients that are read from the sketch."""
        return haar_terms(self.domain, self.pieces)

    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Sums:
        counts = counted(samples, self.domain)
        padded = np.zeros(power_of_two(self.domain))
        padded[: self.domain] = counts
        coefficients = torch.from_numpy(haar(padded).astype(np.float32))
        table = torch.from_numpy(self.empty())
        tensor_kernels.sketch_insert(coefficients, self.rows, self.cols, self.seed, table)
        return Sums(table.numpy(), int(counts.sum()))

    def estimate_sum(self, sums: Sums) -> F64:
        return self.fit(sums)[0].values()

    def fit(self, sums: Sums) -> tuple[Fit, float]:
        """The pieces, and the part of p's energy that is neither in them nor explained by sampling."""
        if not np.isfinite(sums.table).all():
            raise PayloadError("a sketch with numbers that are not finite")
        table = torch.from_numpy(np.ascontiguousarray(sums.table / np.float32(sums.count)))
        size = power_of_two(self.domain)
        terms = min(self.terms, size)
        largest = tensor_kernels.sketch_query_topk(table, size, self.seed, terms).numpy()
        estimates = torch.empty(size)
        tensor_kernels.sketch_query(table, size, self.seed, estimates)
        coefficients = np.zeros(size)
        coefficients[largest] = estimates.numpy()[largest]
        recovered = inverse_haar(coefficients)[: self.domain]
        jumps = np.flatnonzero(np.diff(recovered)) + 1
        steps = Partition(np.concatenate(([0], jumps, [self.domain])).astype(np.int64))
        masses = recovered[steps.edges[:-1]] * steps.lengths
        fit = fit_pieces(steps, masses, self.pieces, "l2", sums.count, exact=True)
        energy = float(np.median((sums.table.astype(np.float64) / sums.count) ** 2 @ np.ones(self.cols)))
        kept = float((fit.masses**2 / fit.partition.lengths).sum())
        return fit, energy - kept - 1.0 / sums.count

    def _variance(self, p: F64, n: int) -> F64:
        """Not known exactly: the predicted error, spread evenly."""
        return np.full(self.domain, self.predicted_l2(n) / self.domain)

    def predicted_l2(self, n: int) -> float:
        """A guess. Terms shrink with their scale: about half of them matter where they collide."""
        return self._error(n, 1.0 / self.domain, 0.5 * self.terms, 4.0)

    def bound_l2(self, p: F64, n: int) -> float:
        """For a histogram p: every term that is hit loses all energy, and the terms read are the noisiest.

        The largest of so many noisy values has 2 ln(domain) times the variance of one.
        """
        return self._error(n, float((p**2).sum()), self.terms, 1.0 + 2.0 * math.log(self.domain))

    def _error(self, n: int, energy: float, colliding: float, noisiest: float) -> float:
        sampling = min(1.0, self.terms / self.domain) / n
        # Each of the terms read off the sketch brings its share of the noise, 1 / n in all; a median of rows
        # is wrong where most of them collide with another term.
        row = min(1.0, colliding / self.cols)
        needed = (self.rows + 1) // 2
        wrong = min(1.0, math.comb(self.rows, needed) * row**needed)
        median = 1.0 if self.rows == 1 else 1.57 / self.rows
        return noisiest * (sampling + median * self.terms / (self.cols * n)) + wrong * energy
