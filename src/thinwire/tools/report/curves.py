"""How a run went: training loss and evaluations, averaged over seeds, thinned out for a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.tools.compare.records import Evaluation, Records, Step
from thinwire.tools.compare.records import Values as Recorded

POINTS = 200
"""A curve has about this many points at most; the records in the page have all of them."""

Values = Mapping[tuple[int, int], float | None]
"""By seed and step."""


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
    failed: bool
    """Every run of it ended early."""


def evaluations(records: Records, method: str, value: str) -> Curve:
    """A result of the evaluations: "accuracy", "perplexity" or "loss"."""
    rows = [each for each in records.evaluations if each.method == method]
    return _curve(records, method, rows, {(row.seed, row.step): getattr(row, value) for row in rows})


def results(records: Records, method: str, name: str) -> Curve:
    """The measure, or one of a script's own values."""
    if records.setting.script is None:
        return evaluations(records, method, name)
    rows = [each for each in records.values if each.method == method and name in each.values]
    # Of several at the same step the last one counts.
    latest = {(row.seed, row.step): row for row in rows}
    values = {key: row.values[name] for key, row in latest.items()}
    return _curve(records, method, list(latest.values()), values)


def training_loss(records: Records, method: str) -> Curve:
    """The loss of rank 0's batches, as the mean of a fiftieth of the run around each step."""
    rows = [each for each in records.steps if each.method == method]
    width = smoothing(records)
    values: dict[tuple[int, int], float | None] = {}
    for seed in {row.seed for row in rows}:
        own = sorted((row for row in rows if row.seed == seed), key=lambda row: row.step)
        for number, row in enumerate(own):
            window = [each.loss for each in own[max(0, number - width // 2) : number + (width + 1) // 2]]
            known = [loss for loss in window if loss is not None]
            values[seed, row.step] = statistics.fmean(known) if len(known) == len(window) else None
    return _curve(records, method, rows, values)


def smoothing(records: Records) -> int:
    """How many steps a point of `training_loss` is the mean of."""
    return max(1, records.setting.steps // 50)


def _curve(
    records: Records,
    method: str,
    rows: Sequence[Evaluation] | Sequence[Step] | Sequence[Recorded],
    values: Values,
) -> Curve:
    runs = records.runs_of(method)
    ended = {run.seed for run in runs if run.failed is None}
    seeds = ended or {run.seed for run in runs}
    by_step: dict[int, list[Evaluation | Step | Recorded]] = {}
    for row in rows:
        if row.seed in seeds:
            by_step.setdefault(row.step, []).append(row)
    # Only steps that all seeds have: a mean over fewer would jump where one of them ends.
    common = [step for step in sorted(by_step) if len(by_step[step]) == len(seeds)]
    points = [_point(step, by_step[step], values) for step in thinned(common)]
    return Curve(tuple(point for point in points if point is not None), not ended)


def _point(step: int, rows: Sequence[Evaluation | Step | Recorded], values: Values) -> Point | None:
    """None if a value is not a finite number."""
    found = [value for row in rows if (value := values[row.seed, step]) is not None and math.isfinite(value)]
    if len(found) < len(rows):
        return None
    seconds = statistics.fmean(row.seconds for row in rows)
    sent = statistics.fmean(row.sent for row in rows)
    return Point(step, seconds, sent, statistics.fmean(found), min(found), max(found))


def thinned(steps: Sequence[int]) -> list[int]:
    """About `POINTS` of them at most, first and last included."""
    kept = list(steps[:: max(1, math.ceil(len(steps) / POINTS))])
    return kept if not steps or kept[-1] == steps[-1] else [*kept, steps[-1]]
