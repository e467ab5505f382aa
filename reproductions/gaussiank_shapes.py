"""What Gaussian-k sees while a model trains: the shape of residual + gradient, fits, counts and bounds."""

from __future__ import annotations

import math
from typing import cast

import msgspec
import torch

from reproductions.cohort import Cohort, Gradients, Recipe
from reproductions.gaussiank_selection import best_times, first_threshold, gaussian
from thinwire import kernels
from thinwire.drivers.lockstep import Lockstep
from thinwire.sessions.histogram import Histogram, measure
from thinwire.tools.gradients import Fit, Loss, fit_all, lost_by_topk
from thinwire.tools.workloads import Dataset

BINS = 81
RANGE = 4.0
"""Of the histograms, in deviations to both sides."""


class Shape(msgspec.Struct):
    """Of residual + gradient at a step.

    - histogram: the density of standardised entries; `against`: the share of entries above a histogram that
      only falls to both sides of zero, beyond chance;
    - counts: how many entries each selection takes, in k; seconds: how long it takes, at the last step.
    """

    step: int
    mean: float
    deviation: float
    kurtosis: float
    histogram: list[float]
    against: float
    fits: list[Fit]
    loss: Loss
    counts: dict[str, float]
    seconds: dict[str, float]


def shapes(recipe: Recipe, data: Dataset, looks: int, ratio: float) -> list[Shape]:
    """Of worker 0, while it trains with top-k."""
    cohort = Cohort(f"topk(ratio={ratio})", recipe, data)
    found: list[Shape] = []
    when = {max(1, round(recipe.steps * (number + 1) / looks)) - 1 for number in range(looks)}

    def watch(gradients: Gradients) -> None:
        if cohort.steps not in when:
            return
        residual = cohort.sessions[0].residuals()
        own = {name: g.flatten() for name, g in gradients[0].items() if g.numel() >= recipe.dense_below}
        u = torch.cat([g + residual[name].flatten() if name in residual else g for name, g in own.items()])
        found.append(shape_of(u, ratio, cohort.steps + 1, timed=cohort.steps + 1 == recipe.steps))

    cohort.watched(watch)
    return found


def shape_of(u: torch.Tensor, ratio: float, step: int = 0, *, timed: bool = False) -> Shape:
    exact = u.double()
    mean, deviation = float(exact.mean()), float(exact.std())
    standard = (exact - mean) / deviation
    bins = torch.histc(standard.float(), BINS, -RANGE, RANGE)
    k = max(1, int(ratio * u.numel()))
    taken = {
        "first threshold": first_threshold(u, k),
        "the authors' loop": gaussian(u, k),
        "thinwire": kernels.gaussiank(u, k)[0],
    }
    return Shape(
        step,
        mean,
        deviation,
        kurtosis=float(standard.pow(4).mean()) - 3,
        histogram=cast("list[float]", (bins / bins.sum() * BINS / (2 * RANGE)).tolist()),
        against=rises_outwards(torch.histc(u / deviation, BINS, -RANGE, RANGE)),
        fits=list(fit_all(histogram_of(u))),
        loss=lost_by_topk(u, ratio),
        counts={name: len(indices) / k for name, indices in taken.items()},
        seconds=best_times(u, k, 5) if timed else {},
    )


def rises_outwards(bins: torch.Tensor) -> float:
    """The share of entries above a histogram that only falls to both sides, beyond 3 standard errors."""
    middle = len(bins) // 2
    found = 0.0
    for side in (bins[middle:].double(), bins[: middle + 1].flip(0).double()):
        lowest = side.cummin(0).values
        found += float((side - lowest - 3 * (side + lowest).sqrt()).clamp(min=0).sum())
    return found / float(bins.sum())


def histogram_of(u: torch.Tensor) -> Histogram:
    driver = Lockstep(1)
    result: list[Histogram] = []
    driver.run([measure([u], None, driver.rank_infos[0], result)])
    return result[0]


def normal(x: float) -> float:
    return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
