"""What happened over a run: training loss and tests, averaged over seeds, thinned out for a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.tools.compare.records import Evaluation, Records, Step

POINTS = 200
"""A curve has at most about so many; the records in the page have them all."""


@dataclass(frozen=True)
class Point:
    """The mean over seeds at one step, and the range of the value."""

    step: int
    seconds: float
    sent: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    points: tuple[Point, ...]
    broken: bool
    """Every run of it ended early."""


def evaluations(records: Records, method: str, value: str) -> Curve:
    """A figure of the evaluations: "accuracy", "perplexity" or "loss"."""
    rows = [each for each in records.evaluations if each.method == method]
    return _curve(records, method, rows, {(row.seed, row.step): float(getattr(row, value)) for row in rows})


def training_loss(records: Records, method: str) -> Curve:
    """The loss of rank 0's batches, as the mean of a fiftieth of the run around each step."""
    rows = [each for each in records.steps if each.method == method]
    width = max(1, records.setting.steps // 50)
    values: dict[tuple[int, int], float] = {}
    for seed in {row.seed for row in rows}:
        own = sorted((row for row in rows if row.seed == seed), key=lambda row: row.step)
        for number, row in enumerate(own):
            window = own[max(0, number - width // 2) : number + (width + 1) // 2]
            values[seed, row.step] = statistics.fmean(each.loss for each in window)
    return _curve(records, method, rows, values)


def smoothing(records: Records) -> int:
    """How many steps a point of `training_loss` is the mean of."""
    return max(1, records.setting.steps // 50)


def _curve(
    records: Records,
    method: str,
    rows: Sequence[Evaluation] | Sequence[Step],
    values: Mapping[tuple[int, int], float],
) -> Curve:
    runs = records.runs_of(method)
    good = {run.seed for run in runs if run.failed is None}
    seeds = good or {run.seed for run in runs}
    by_step: dict[int, list[Evaluation | Step]] = {}
    for row in rows:
        if row.seed in seeds:
            by_step.setdefault(row.step, []).append(row)
    # Only where all seeds are: a mean over fewer would jump where one of them ends.
    common = [step for step in sorted(by_step) if len(by_step[step]) == len(seeds)]
    points = [_point(step, by_step[step], values) for step in thinned(common)]
    return Curve(tuple(point for point in points if math.isfinite(point.value)), not good)


def _point(step: int, rows: Sequence[Evaluation | Step], values: Mapping[tuple[int, int], float]) -> Point:
    found = [values[row.seed, step] for row in rows]
    return Point(
        step,
        statistics.fmean(row.seconds for row in rows),
        statistics.fmean(row.sent for row in rows),
        statistics.fmean(found),
        min(found),
        max(found),
    )


def thinned(steps: Iterable[int]) -> list[int]:
    """At most about `POINTS` of them, first and last among them."""
    found = list(steps)
    stride = max(1, math.ceil(len(found) / POINTS))
    kept = found[::stride]
    return kept if not found or kept[-1] == found[-1] else [*kept, found[-1]]
