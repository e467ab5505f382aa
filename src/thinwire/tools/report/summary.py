"""What the records say, method by method: means and ranges over the seeds, and who won."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinwire.tools.compare.records import Records, Run, Setting

# Without a target the winner is the fastest of those that end about as well as the baseline does.
AS_GOOD_POINTS = 0.01
AS_GOOD_PERPLEXITY = 1.02


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        """None where any of the values is missing, or there are none."""
        found = list(values)
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return None
        return Spread(statistics.fmean(known), min(known), max(known))


@dataclass(frozen=True)
class Summary:
    """One method. Figures are of the runs that ended; None where there is nothing to say."""

    method: str
    seeds: int
    failures: tuple[Run, ...]
    measure: Spread | None
    steps: Spread | None
    seconds: Spread | None
    step_seconds: Spread | None
    compute_seconds: Spread | None
    compress_seconds: Spread | None
    wait_seconds: Spread | None
    sent: Spread | None
    received: Spread | None
    rounds: Spread | None
    payload: Spread | None
    target_step: Spread | None
    target_seconds: Spread | None
    target_sent: Spread | None
    reached: int
    """How many seeds reached the target."""
    layers: dict[str, float]
    interface_sent: Spread | None

    @property
    def ended(self) -> int:
        return self.seeds - len(self.failures)

    @property
    def mean_step(self) -> float | None:
        """Seconds; the median says nothing of a method that does not talk in every step."""
        return None if self.seconds is None or self.steps is None else self.seconds.mean / self.steps.mean


def measured(run: Run, setting: Setting) -> float:
    return run.perplexity if setting.measure == "perplexity" else run.accuracy


def summarise(records: Records) -> list[Summary]:
    """In the order of the records: the first is what the others are measured against."""
    return [_summary(method, records.runs_of(method), records.setting) for method in records.methods]


def _summary(method: str, runs: Sequence[Run], setting: Setting) -> Summary:
    good = [run for run in runs if run.failed is None]
    # What does not go through thinwire is counted by the interface only, and not at all where there is none.
    counted = [run for run in good if run.sent > 0 or setting.workers == 1]
    metered = [run for run in good if run.payload > 0]

    def over(pick: Callable[[Run], float | None], among: Sequence[Run] = good) -> Spread | None:
        return Spread.of(pick(run) for run in among)

    return Summary(
        method,
        len(runs),
        tuple(run for run in runs if run.failed is not None),
        over(lambda run: measured(run, setting)),
        over(lambda run: run.steps),
        over(lambda run: run.seconds),
        over(lambda run: run.step_seconds),
        over(lambda run: run.compute_seconds),
        over(lambda run: run.compress_seconds),
        over(lambda run: run.wait_seconds),
        over(lambda run: run.sent, counted),
        over(lambda run: run.received, counted),
        over(lambda run: run.rounds, metered),
        over(lambda run: run.payload, metered),
        over(lambda run: run.target_step),
        over(lambda run: run.target_seconds),
        over(lambda run: run.target_sent, counted),
        sum(run.target_step is not None for run in good),
        _mean_layers(good),
        over(lambda run: run.interface_sent),
    )


def _mean_layers(runs: Sequence[Run]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run.layers)
    return {name: statistics.fmean(run.layers.get(name, 0.0) for run in runs) for name in names}


def speed_up(one: Summary, baseline: Summary, setting: Setting) -> float | None:
    """How many times sooner than the baseline: to the target where there is one, over all steps otherwise."""
    mine, base = duration(one, setting), duration(baseline, setting)
    return None if mine is None or base is None or mine.mean <= 0 else base.mean / mine.mean


def duration(one: Summary, setting: Setting) -> Spread | None:
    """What speed-ups compare."""
    return one.seconds if setting.target is None else one.target_seconds


def traffic(one: Summary, setting: Setting) -> Spread | None:
    """Bytes sent in that time."""
    return one.sent if setting.target is None else one.target_sent


def winner(summaries: Sequence[Summary], setting: Setting) -> Summary | None:
    """The fastest that counts: with every seed at the target; without one, about as good as the baseline."""
    able = [one for one in summaries if not one.failures and duration(one, setting) is not None]
    if setting.target is None:
        base = next((one.measure for one in summaries), None)
        if base is None:
            return None
        able = [one for one in able if one.measure is not None and _as_good(one.measure, base, setting)]
    return min(able, key=lambda one: _seconds(one, setting), default=None)


def _seconds(one: Summary, setting: Setting) -> float:
    found = duration(one, setting)
    assert found is not None
    return found.mean


def _as_good(own: Spread, base: Spread, setting: Setting) -> bool:
    if setting.measure == "perplexity":
        return own.mean <= base.mean * AS_GOOD_PERPLEXITY
    return own.mean >= base.mean - AS_GOOD_POINTS
