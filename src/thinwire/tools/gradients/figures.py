"""The plots of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from thinwire.sessions.histogram import Histogram
from thinwire.tools.gradients.bound import Loss
from thinwire.tools.gradients.study import Findings
from thinwire.tools.report.figures import Curve, lines
from thinwire.tools.report.plots.common import Figure

MAGNITUDE = "magnitude of an entry"
FITS = "gradient magnitudes and fits, last quarter of the run"
BOUND = "what top-k loses, and its bounds"


def figures(findings: Findings) -> dict[str, Figure]:
    """Plots by title."""
    model, ratio = findings.study.model, findings.study.ratio
    parts = len(findings.phases)

    def by_step(*fields: str) -> dict[str, Curve]:
        steps = [step.step for step in findings.steps]
        return {field: (steps, [getattr(step, field) for step in findings.steps]) for field in fields}

    phases = {f"part {number + 1} of {parts}": _density(each) for number, each in enumerate(findings.phases)}
    losses = {f"part {number + 1} of {parts}": each for number, each in enumerate(findings.losses)}
    shares = {"gaussian_share": "Gaussian", "laplace_share": "Laplace"}
    found = {
        FITS: _fits(findings),
        "gradient magnitudes, by quarters": lines(phases, MAGNITUDE, "density", log_x=True, log_y=True),
        BOUND: _bound(losses),
        "thresholds": lines(
            by_step("real", "learned", "gaussian", "laplace"),
            "step",
            f"threshold of top-k, ratio {ratio:g}",
            log_y=True,
        ),
        "what the fitted thresholds select": lines(
            {shares[field]: curve for field, curve in by_step(*shares).items()},
            "step",
            "share that is really selected",
            log_y=True,
            horizontals={"asked for": ratio},
        ),
    }
    return {f"{model}: {title}": figure for title, figure in found.items()}


def overview(studies: Sequence[Findings]) -> dict[str, Figure]:
    """All models together: what top-k loses at the end of the run."""
    return {f"All models: {BOUND}": _bound({each.study.model: each.losses[-1] for each in studies})}


def _fits(findings: Findings) -> Figure:
    last, ratio = findings.phases[-1], findings.study.ratio
    middles, heights = _density(last)
    # Zeros are no part of the fits: their share is taken off.
    nonzero = 1 - last.small / last.total
    curves: dict[str, Curve] = {"learned": (middles, heights)}
    for fit in findings.fits:
        curves[fit.family] = (middles, [nonzero * float(y) for y in fit.density(np.array(middles))])
    thresholds = {
        f"top-k {ratio:g}: real": last.real_threshold,
        "Gaussian": last.gaussian_threshold(ratio),
        "Laplace": last.laplace_threshold(ratio),
    }
    placed = {name: at for name, at in thresholds.items() if at > 0}
    density = lines(curves, MAGNITUDE, "density", log_x=True, log_y=True, verticals=placed)
    density["data"][0] |= {"mode": "lines+markers", "line": {**density["data"][0]["line"], "shape": "hvh"}}
    if heights:
        # The learned density's range: a Gaussian's tail would squeeze everything else.
        density["layout"]["yaxis"]["range"] = [
            math.log10(min(heights)) - 0.5,
            math.log10(max(heights)) + 0.5,
        ]
    return density


def _bound(losses: dict[str, Loss]) -> Figure:
    """The measured loss by k/d, and both bounds at the places of the largest vector."""
    most = max(losses.values(), key=lambda each: each.size)
    curves: dict[str, Curve] = {"bound 1 - k/d": (most.kept, most.classic)}
    curves["bound (1 - k/d)^2"] = (most.kept, most.tight)
    curves |= {name: (each.kept, each.lost) for name, each in losses.items()}
    return lines(curves, "k/d, the share of entries that top-k keeps", "lost share of ||u||^2", log_x=True)


def _density(found: Histogram) -> tuple[list[float], list[float]]:
    """Of magnitudes, at the middles of the bins that have entries."""
    edges = Histogram.edges()
    full = [j for j, count in enumerate(found.counts) if count]
    middles = [math.sqrt(edges[j] * edges[j + 1]) for j in full]
    return middles, [found.counts[j] / found.total / (edges[j + 1] - edges[j]) for j in full]
