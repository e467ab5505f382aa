"""Runs with several seeds: means, spreads, and how far one method is behind another."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from reproductions.cohort import Recipe, Training, train
from reproductions.parts import Context
from thinwire.core.exchange import Exchange
from thinwire.tools.report.figures import Curve
from thinwire.tools.workloads import Dataset

SEEDS = (0, 1, 2)
Runs = list[Training]
"""Of one method, a run for each seed."""


def train_all(
    context: Context,
    methods: Mapping[str, tuple[str | Exchange, Recipe]],
    data: Dataset,
    what: str = "",
    *,
    seeds: Sequence[int] = SEEDS,
    looks: int = 4,
    test_rows: int = 0,
) -> dict[str, Runs]:
    """Every method with every seed, seed by seed."""
    trained = partial(train, looks=looks, test_rows=test_rows)
    found = context.each(
        {
            (label, "seed", seed): partial(trained, method, replace(recipe, seed=seed), data)
            for seed in seeds
            for label, (method, recipe) in methods.items()
        },
        what,
    )
    return {label: [found[label, "seed", seed] for seed in seeds] for label in methods}


def mean(runs: Runs, look: int = -1) -> float:
    """The test accuracy."""
    return statistics.fmean(one.accuracies[look][1] for one in runs)


def behind(runs: Runs, other: Runs, look: int = -1) -> float:
    """By how many points the other is better, on average over the seeds."""
    return 100 * (mean(other, look) - mean(runs, look))


def deviation(values: Sequence[float]) -> float:
    """Over the seeds; 0 of a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def plus_minus(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation over the seeds, in percent."""
    own = [100 * value for value in values]
    text = f"{statistics.fmean(own):.{digits}f}"
    return f"{text} ± {deviation(own):.{digits}f} %" if len(own) > 1 else f"{text} %"


def accuracy(runs: Runs, look: int = -1) -> str:
    return plus_minus([one.accuracies[look][1] for one in runs])


def chance(data: Dataset) -> float:
    """The accuracy of always naming what is most frequent in the test data."""
    counts = data.test_targets.flatten().bincount()
    return float(counts.max() / counts.sum())


def has_learned(runs: Runs, data: Dataset) -> bool:
    """Whether at least twice as many are right as by chance; nothing can be compared before that."""
    return mean(runs) >= 2 * chance(data)


def columns(runs: Runs) -> dict[str, str]:
    """For a table with a row for each method that was looked at as often as this one."""
    return {f"after {step:,} steps": "" for step, _ in runs[0].accuracies}


def cells(runs: Runs) -> list[str]:
    return [accuracy(runs, look) for look in range(len(runs[0].accuracies))]


def payload(runs: Runs) -> float:
    return statistics.fmean(one.payload for one in runs)


def last_loss(runs: Runs) -> float:
    """The training loss of the last stretch."""
    return statistics.fmean(one.losses[-1][1] for one in runs)


def loss_curves(found: Mapping[str, Runs]) -> dict[str, Curve]:
    """Of the first seed."""
    return {
        name: ([step for step, _ in own[0].losses], [value for _, value in own[0].losses])
        for name, own in found.items()
    }
