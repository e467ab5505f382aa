"""The records by method: means and ranges over the seeds, and the winner."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.hosts.scripts import ALONE
from thinwire.methods.registry import parse
from thinwire.tools.compare.records import Records, Run, Setting
from thinwire.tools.compare.settings import NOT_METHODS

# A result within this of the baseline's is as good. Without a target only such methods can win, and the
# speed-up of one that is clearly worse carries a warning.
AS_GOOD_POINTS = 0.01
AS_GOOD_PERPLEXITY = 1.02
"""Also for a script's own values, by their size."""
LEAST_RECOVERED = 0.5
"""Of the gap between a worker alone and the baseline: a periodic or delayed method with less cannot win."""

_ENDED = (
    "steps",
    "seconds",
    "step_seconds",
    "compute_seconds",
    "compress_seconds",
    "wait_seconds",
    "target_step",
    "target_seconds",
    "interface_sent",
)
_COUNTED = ("sent", "sent_inside", "received", "target_sent")
_METERED = ("rounds", "payload")


class Spread(msgspec.Struct, frozen=True):
    """A value over several seeds."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        """None if any of the values is missing, or there are none."""
        found = list(values)
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return None
        return Spread(statistics.fmean(known), min(known), max(known))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One method. Values are those of the runs that ended, named as in `Run`; None where there is none."""

    method: str
    chosen: list[str]
    """What `auto` chose, with all its seeds; empty for all others."""
    seeds: int
    failures: list[Run]
    measure: Spread | None
    """Accuracy, perplexity, or a script's own."""
    values: dict[str, Spread]
    """All values of a script at its end, by name."""
    steps: Spread | None
    seconds: Spread | None
    step_seconds: Spread | None
    compute_seconds: Spread | None
    compress_seconds: Spread | None
    wait_seconds: Spread | None
    sent: Spread | None
    sent_inside: Spread | None
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
    baseline: str | None
    """What the speed-up is against."""
    speed_up: float | None
    worse: float | None
    """How far the result is clearly worse than the baseline's: in points, or as a ratio."""
    recovered: float | None
    """The part of the gap between a worker alone and the baseline that it closes, at equal steps."""

    @property
    def ended(self) -> int:
        return self.seeds - len(self.failures)

    @property
    def mean_step(self) -> float | None:
        """Seconds; the median says nothing about a method that does not communicate in every step."""
        return None if self.seconds is None or self.steps is None else self.seconds.mean / self.steps.mean


def summarise(records: Records) -> list[Summary]:
    """In the order of the records: the baseline is the first, if there is one."""
    found = [_summary(method, records.runs_of(method), records.setting) for method in records.methods]
    if records.baseline is None:
        return found
    return [_against(one, found[0], records) for one in found]


def _against(one: Summary, base: Summary, records: Records) -> Summary:
    setting = records.setting
    return replace(
        one,
        baseline=base.method,
        speed_up=speed_up(one, base, setting),
        worse=clearly_worse(one, base, setting),
        recovered=records.recovered(one.method),
    )


def _summary(method: str, runs: Sequence[Run], setting: Setting) -> Summary:
    ended = [run for run in runs if run.failed is None]
    # PyTorch's own methods are counted by the interface only, and not at all outside of a lab.
    counted = [run for run in ended if run.sent > 0 or setting.workers == 1]
    metered = [run for run in ended if run.payload > 0]
    spreads = {
        name: Spread.of(getattr(run, name) for run in among)
        for names, among in ((_ENDED, ended), (_COUNTED, counted), (_METERED, metered))
        for name in names
    }
    names = dict.fromkeys(name for run in ended for name in run.layers)
    return Summary(
        method=method,
        chosen=list(dict.fromkeys(run.chosen for run in runs if run.chosen is not None)),
        seeds=len(runs),
        failures=[run for run in runs if run.failed is not None],
        measure=Spread.of(setting.result(run) for run in ended),
        values={
            name: spread
            for name in dict.fromkeys(name for run in ended for name in run.values)
            if (spread := Spread.of(run.values.get(name) for run in ended)) is not None
        },
        reached=sum(run.target_step is not None for run in ended),
        layers={name: statistics.fmean(run.layers.get(name, 0.0) for run in ended) for name in names},
        baseline=None,
        speed_up=None,
        worse=None,
        recovered=None,
        **spreads,
    )


def speed_up(one: Summary, baseline: Summary, setting: Setting) -> float | None:
    """How many times sooner than the baseline: to the target if there is one, over all steps otherwise."""
    mine, base = duration(one, setting), duration(baseline, setting)
    return None if mine is None or base is None or mine.mean <= 0 else base.mean / mine.mean


def duration(one: Summary, setting: Setting) -> Spread | None:
    """What speed-ups compare."""
    return one.seconds if setting.target is None else one.target_seconds


def traffic(one: Summary, setting: Setting) -> Spread | None:
    """Bytes sent in that time."""
    return one.sent if setting.target is None else one.target_sent


def clearly_worse(one: Summary, base: Summary, setting: Setting) -> float | None:
    """How far a result is worse than the baseline's: more than is as good, and with every seed than with any.

    Points of accuracy as a fraction, or the ratio of perplexities or of a script's own values. None if it is
    not clearly worse. Runs with a target end at the same result.
    """
    mine, theirs = one.measure, base.measure
    if mine is None or theirs is None or _as_good(mine, theirs.mean, setting):
        return None
    clearly = mine.high < theirs.low if setting.higher_is_better else mine.low > theirs.high
    if not clearly:
        return None
    if setting.is_fraction(setting.measure):
        return theirs.mean - mine.mean
    return mine.mean / theirs.mean if theirs.mean else None


def winner(summaries: Sequence[Summary], setting: Setting) -> Summary | None:
    """The fastest that counts: with every seed at the target; without one, about as good as the baseline.

    Without a baseline: about as good as the best result. A worker alone is a control and cannot win, nor can
    a periodic or delayed method that recovers less than half of the gap between it and the baseline.
    """
    compared = summaries[:1] if setting.baseline else summaries
    results = [one.measure.mean for one in compared if one.measure is not None]
    standard = (max if setting.higher_is_better else min)(results, default=None)
    able: list[tuple[float, Summary]] = []
    for one in summaries:
        time = duration(one, setting)
        if one.method == ALONE or recovers_too_little(one):
            continue
        if time is not None and not one.failures and _as_good(one.measure, standard, setting):
            able.append((time.mean, one))
    return min(able, key=lambda each: each[0], default=(0.0, None))[1]


def recovers_too_little(one: Summary) -> bool:
    """Whether a periodic or delayed method gains too little from the other workers."""
    if one.recovered is None or one.recovered >= LEAST_RECOVERED:
        return False
    # The choices of `auto` are exchanges without a delay, and so are PyTorch's own methods.
    method = None if one.method in NOT_METHODS else parse(one.method)
    return isinstance(method, Schedule) or (isinstance(method, Exchange) and method.traits.delayed)


def _as_good(own: Spread | None, standard: float | None, setting: Setting) -> bool:
    if setting.target is not None or not setting.measure:  # a script without values is judged by its time
        return True
    if own is None or standard is None:
        return False
    if setting.is_fraction(setting.measure):
        return own.mean >= standard - AS_GOOD_POINTS
    margin = (AS_GOOD_PERPLEXITY - 1) * abs(standard)
    return own.mean >= standard - margin if setting.higher_is_better else own.mean <= standard + margin
