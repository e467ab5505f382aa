"""What a study prints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from thinwire.tools.gradients.fits import FAMILIES
from thinwire.tools.gradients.study import SHOWN_RATIOS, Findings


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def thresholds_table(findings: Findings) -> Table:
    """The threshold of top-k in each part of the run, and what estimates of it would select."""
    study = findings.study
    rows: list[tuple[str, ...]] = []
    for number, phase in enumerate(findings.phases):
        fits = (phase.threshold, phase.gaussian_threshold, phase.laplace_threshold)
        thresholds = [fit(study.ratio) for fit in fits]
        selected = [f"{each:.3g} ({100 * phase.share_above(each):.2f} %)" for each in thresholds]
        moments = (phase.deviation, phase.real_threshold)
        name = f"{number + 1} of {len(findings.phases)}"
        rows.append((name, *(f"{value:.3g}" for value in moments), *selected))
    title = (
        f"{study.model}: the threshold of top-k at {100 * study.ratio:g} % in each part of the run, and "
        "estimates of it with the share of entries that they would select"
    )
    return Table(title, ("part", "deviation", "top-k", "learned", "Gaussian", "Laplace"), rows)


def fits_table(studies: Iterable[Findings]) -> Table:
    """Every fit to the last part of the run, the best first."""
    rows: list[tuple[str, ...]] = []
    for each in studies:
        baseline = next((fit.log_likelihood for fit in each.fits if fit.family == next(iter(FAMILIES))), 0.0)
        for fit in sorted(each.fits, key=lambda fit: -fit.log_likelihood):
            shape = "" if math.isnan(fit.shape) else f"{fit.shape:.3g}"
            gain = f"{fit.log_likelihood - baseline:+.3f}"
            name = f"{each.study.model}, {fit.family}"
            rows.append((name, f"{fit.scale:.3g}", shape, gain, f"{fit.distance:.3f}"))
    title = (
        "fits to the entries that are not zero, last part of the run; log-likelihood per entry above that of "
        "the Gaussian, and the distance of Kolmogorov and Smirnov"
    )
    return Table(title, ("fit", "scale", "shape", "log-likelihood", "KS distance"), rows)


def loss_table(studies: Iterable[Findings]) -> Table:
    """What top-k loses at the end of the run, and the bounds."""
    rows: list[tuple[str, ...]] = []
    for each in studies:
        last = each.losses[-1]
        for ratio in SHOWN_RATIOS:
            kept, lost = last.near(ratio)
            bounds = (lost, 1 - kept, (1 - kept) ** 2)
            numbers = (f"{value:.4f}" for value in bounds)
            model = f"{each.study.model}, {last.size:,} entries"
            rows.append((model, f"{100 * kept:.3g} %", *numbers, f"{100 * lost / (1 - kept) ** 2:.1f} %"))
    title = "what top-k loses at the end of the run: ||u - top_k(u)||^2 / ||u||^2, and bounds on it"
    return Table(title, ("vector u", "k/d", "lost", "1 - k/d", "(1 - k/d)^2", "of the latter"), rows)


def tightness(studies: Iterable[Findings]) -> str:
    """How close the loss comes to the paper's bound, over all k and all parts of the run."""
    worst = {each.study.model: max(loss.worst for loss in each.losses) for each in studies}
    texts = [f"{model} {value:.3g}" for model, value in worst.items()]
    over = [model for model, value in worst.items() if value > 1]
    holds = f"it does not hold for {', '.join(over)}" if over else "it holds at every k"
    return f"The largest part of (1 - k/d)^2 that is lost, at any k: {', '.join(texts)}; {holds}."
