"""From messages to a distribution: the fit that the structure asks for, its error, and how well it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from thinwire.distributions.haar import HaarSketch
from thinwire.distributions.monotone import isotonic
from thinwire.distributions.partition import F64, Partition
from thinwire.distributions.pieces import fit_pieces
from thinwire.distributions.protocol import MEAN_MAGNITUDE, AnyProtocol, Messages, Sums
from thinwire.distributions.simplex import onto_simplex
from thinwire.distributions.spec import LearningSpec
from thinwire.distributions.tables import ServerCounts

# The noise is only an estimate: what exceeds it by less says nothing.
NOISE_MARGIN = 1.3
SMALLEST_MISFIT = 0.02


@dataclass(frozen=True)
class Estimate:
    """What was learned.

    - p: a distribution over the domain, with the structure asked for;
    - error: how far from the truth it is expected to be, in `norm` (l2: the root of the squared error);
    - misfit: how much of the data neither the structure nor noise explains, in the same norm; what happens
      inside a cell cannot be seen, so it is rather too small (0 without structure);
    - bits: what all servers sent together, in messages;
    - wire_bytes: what crossed this rank's interface in both directions, frames and handshake included (0 in
      one process);
    - bound: the error that no protocol can beat by more than a constant or a logarithm (see `rates`);
    - protocol, reason: what was used, and why;
    - warnings: a poor fit, for instance.
    """

    p: F64
    error: float
    misfit: float
    norm: str
    bits: int
    protocol: Any
    reason: str
    bound: float = 0.0
    wire_bytes: int = 0
    warnings: tuple[str, ...] = ()


def fitted(
    spec: LearningSpec, protocol: AnyProtocol, messages: Sequence[Messages | Sums], n: int, predicted: float
) -> tuple[F64, float, float]:
    """The distribution, its expected error, and the misfit."""
    if spec.structure == "none":
        if isinstance(protocol, ServerCounts):
            board = protocol.board(cast("Sequence[Messages]", messages))
            p = onto_simplex(board.estimate())
            return p, _root(spec, board.variance(_smoothed(p, board.variance(p).sum()))), 0.0
        p = onto_simplex(protocol.estimate(messages))
        return p, _root(spec, protocol.variance(_smoothed(p, protocol.predicted_l2(n)), n)), 0.0
    if isinstance(protocol, HaarSketch):
        values, misfit = _from_sketch(protocol, cast("Sequence[Sums]", messages), n)
    else:
        partition, masses, variance = protocol.cell_masses(messages, n)
        values, explained = _fit(spec, partition, masses, n)
        misfit = _misfit(spec, np.abs(masses - explained), variance, partition)
    return onto_simplex(values), predicted + misfit, misfit


def _smoothed(p: F64, squared: float) -> F64:
    """What p may really be if its squared error is this: symbols never seen may still exist."""
    doubt = 0.5 * len(p) * float(squared)
    return (p + doubt / len(p)) / (1.0 + doubt)


def _root(spec: LearningSpec, variance: F64) -> float:
    """The error in the norm asked for, of entries with these variances."""
    if spec.norm == "l1":
        return min(2.0, MEAN_MAGNITUDE * float(np.sqrt(variance).sum()))
    return min(math.sqrt(2.0), math.sqrt(float(variance.sum())))


def _from_sketch(protocol: HaarSketch, messages: Sequence[Sums], n: int) -> tuple[F64, float]:
    """The fit and its misfit."""
    fit, energy = protocol.fit(protocol.added(messages))
    noise = 3.0 * math.sqrt(2.0 / protocol.cols) * (energy + float((fit.values() ** 2).sum()) + 1.0 / n)
    # Terms that were found but do not fit into the pieces, and energy in terms that were not even found.
    left = max(0.0, energy - noise, fit.cost - 10.0 * protocol.predicted_l2(n))
    return fit.values(), math.sqrt(left)


def _fit(spec: LearningSpec, partition: Partition, masses: F64, n: int) -> tuple[F64, F64]:
    """The fit's density at every symbol, and its masses of the cells."""
    if spec.structure == "monotone":
        density = isotonic(masses, partition, increasing=spec.increasing)
        return np.repeat(density, partition.lengths), density * partition.lengths
    pieces = cast(int, spec.pieces)
    values = fit_pieces(partition, masses, pieces, spec.norm, n, exact=spec.norm == "l2").values()
    return values, partition.masses(values)


def _misfit(spec: LearningSpec, distance: F64, variance: F64, partition: Partition) -> float:
    """How far the fit is from the masses of the cells, beyond what their noise accounts for."""
    if spec.norm == "l1":
        noise = NOISE_MARGIN * MEAN_MAGNITUDE * float(np.sqrt(variance).sum())
        return max(0.0, float(distance.sum()) - noise)
    noise = NOISE_MARGIN * float((variance / partition.lengths).sum())
    return math.sqrt(max(0.0, float((distance**2 / partition.lengths).sum()) - noise))


def fit_warning(spec: LearningSpec, misfit: float, predicted: float) -> tuple[str, ...]:
    scale = 1.0 if spec.norm == "l1" else 1.0 / math.sqrt(spec.domain)
    if misfit <= max(predicted, SMALLEST_MISFIT * scale):
        return ()
    if spec.structure == "monotone":
        fact = f"not {'rising' if spec.increasing else 'falling'}"
        advice = f"use increasing={not spec.increasing}, or structure='none'"
    else:
        fact = f"no histogram of {spec.pieces} pieces"
        advice = "ask for more pieces, or structure='none'"
    return (
        f"poor fit: the data are {fact}; noise does not explain {misfit:.2g} of the {spec.norm} error. "
        f"p is the best approximation found; {advice}",
    )
