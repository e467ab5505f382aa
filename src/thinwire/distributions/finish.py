"""From messages to an answer: the fit that the structure asks for, its error, and whether it fits at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from thinwire.distributions.cells import CellCounts
from thinwire.distributions.haar import HaarSketch
from thinwire.distributions.monotone import Monotone, isotonic
from thinwire.distributions.pieces import fit_pieces
from thinwire.distributions.protocol import F64, MEAN_MAGNITUDE, AnyProtocol, Messages, Sums, estimate
from thinwire.distributions.question import Question
from thinwire.distributions.simplex import onto_simplex

# Noise is uncertain, too: what exceeds it by less says nothing.
NOISE_MARGIN = 1.3
SMALLEST_MISFIT = 0.02


@dataclass(frozen=True)
class Estimate:
    """What was learned.

    - p: a distribution over the domain, with the structure asked for;
    - error: how far from the truth it is expected to be, in `norm` (l2: the root of the squared error);
    - misfit: how much of the data neither the structure nor noise explains, in the same norm; what happens
      inside a cell cannot be seen, so it is rather too small (0 without structure);
    - bits: what all servers sent together, in messages; `wire_bytes`: what crossed this rank's interface in
    both
      directions, frames and agreement included (0 in one process);
    - protocol, reason: what was used, and why; warnings: what to mind.
    """

    p: F64
    error: float
    misfit: float
    norm: str
    bits: int
    protocol: Any
    reason: str
    wire_bytes: int = 0
    warnings: tuple[str, ...] = field(default=())


def fitted(
    question: Question, protocol: AnyProtocol, messages: Sequence[Messages | Sums], n: int, predicted: float
) -> tuple[F64, float, float]:
    """The distribution, its expected error, and the misfit."""
    if question.structure == "none":
        p = onto_simplex(estimate(protocol, messages))
        return p, _error(question, protocol, p, n), 0.0
    if question.structure == "monotone":
        p, misfit = _monotone(question, protocol, estimate(protocol, messages), n)
    else:
        p, misfit = _histogram(question, protocol, messages, n)
    return p, predicted + misfit, misfit


def _error(question: Question, protocol: AnyProtocol, p: F64, n: int) -> float:
    """Of the formula for p as estimated, a little smoothed: symbols never seen are not known to be absent."""
    doubt = 0.5 * question.domain * protocol.predicted_l2(n)
    smooth = (p + doubt / question.domain) / (1.0 + doubt)
    if question.norm == "l1":
        return min(2.0, protocol.expected_l1(smooth, n))
    return min(math.sqrt(2.0), math.sqrt(protocol.expected_l2(smooth, n)))


def _monotone(question: Question, protocol: AnyProtocol, values: F64, n: int) -> tuple[F64, float]:
    if isinstance(protocol, Monotone):
        edges, masses = protocol.edges, protocol.masses(values)
        variance = protocol.inner.variance(np.maximum(masses, 0.0), n)
    else:
        edges, masses = np.arange(question.domain + 1, dtype=np.int64), values
        variance = protocol.variance(onto_simplex(values), n)
    lengths = np.diff(edges)
    density = isotonic(masses, edges, increasing=question.increasing)
    misfit = _unexplained(question, masses, density * lengths, variance, lengths)
    return onto_simplex(np.repeat(density, lengths)), misfit


def _histogram(
    question: Question, protocol: AnyProtocol, messages: Sequence[Messages | Sums], n: int
) -> tuple[F64, float]:
    pieces = cast(int, question.pieces)
    if isinstance(protocol, HaarSketch):
        fit, energy = protocol.fit(cast("Sequence[Sums]", messages))
        noise = 3.0 * math.sqrt(2.0 / protocol.cols) * (energy + float((fit.values() ** 2).sum()) + 1.0 / n)
        # Terms that were found but do not fit into the pieces, and energy in terms that were not even found.
        left = max(0.0, energy - noise, fit.cost - 10.0 * protocol.predicted_l2(n))
        return onto_simplex(fit.values()), math.sqrt(left)
    if isinstance(protocol, CellCounts):
        sums = cast("Sequence[Sums]", messages)
        fit = protocol.fit(sums, question.norm)
        edges, masses = np.array(protocol.edges, np.int64), protocol.masses(sums)
        variance = masses * (1.0 - masses) / n
    else:
        masses = estimate(protocol, messages)
        edges = np.arange(question.domain + 1, dtype=np.int64)
        fit = fit_pieces(edges, masses, pieces, question.norm, n, exact=question.norm == "l2")
        variance = protocol.variance(onto_simplex(masses), n)
    values = fit.values()
    explained = np.add.reduceat(values, edges[:-1])
    misfit = _unexplained(question, masses, explained, variance, np.diff(edges))
    return onto_simplex(values), misfit


def _unexplained(question: Question, masses: F64, explained: F64, variance: F64, lengths: Any) -> float:
    """How far the fit is from the cells' masses, beyond what their noise accounts for."""
    distance = np.abs(masses - explained)
    if question.norm == "l1":
        return max(
            0.0, float(distance.sum()) - NOISE_MARGIN * MEAN_MAGNITUDE * float(np.sqrt(variance).sum())
        )
    squared = float((distance**2 / lengths).sum()) - NOISE_MARGIN * float((variance / lengths).sum())
    return math.sqrt(max(0.0, squared))


def fit_warning(question: Question, misfit: float, predicted: float) -> tuple[str, ...]:
    scale = 1.0 if question.norm == "l1" else 1.0 / math.sqrt(question.domain)
    if misfit <= max(predicted, SMALLEST_MISFIT * scale):
        return ()
    if question.structure == "monotone":
        way = "rising" if question.increasing else "falling"
        what, advice = f"not {way}", "turn `increasing` around, or use structure='none'"
    else:
        what, advice = f"no histogram of {question.pieces} pieces", "ask for more pieces, or structure='none'"
    return (
        f"poor fit: the data are {what}; {misfit:.2g} of {question.norm} error is left that noise does not "
        f"explain. p is the best approximation found; {advice}",
    )
