"""The records by method: means and ranges over the seeds, and the winner."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from thinwire.tools.compare.records import Records, Run, Setting

# Without a target the winner is the fastest of those that end about as well as the baseline does.
AS_GOOD_POINTS = 0.01
AS_GOOD_PERPLEXITY = 1.02

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
_COUNTED = ("sent", "received", "target_sent")
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
    """Accuracy or perplexity."""
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
        """Seconds; the median says nothing about a method that does not communicate in every step."""
        return None if self.seconds is None or self.steps is None else self.seconds.mean / self.steps.mean


def summarise(records: Records) -> list[Summary]:
    """In the order of the records: the first is the baseline."""
    return [_summary(method, records.runs_of(method), records.setting) for method in records.methods]


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
        measure=Spread.of(getattr(run, setting.measure) for run in ended),
        reached=sum(run.target_step is not None for run in ended),
        layers={name: statistics.fmean(run.layers.get(name, 0.0) for run in ended) for name in names},
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


def winner(summaries: Sequence[Summary], setting: Setting) -> Summary | None:
    """The fastest that counts: with every seed at the target; without one, about as good as the baseline."""
    able: list[tuple[float, Summary]] = []
    for one in summaries:
        time = duration(one, setting)
        if time is not None and not one.failures and _as_good(one.measure, summaries[0].measure, setting):
            able.append((time.mean, one))
    return min(able, key=lambda each: each[0], default=(0.0, None))[1]


def _as_good(own: Spread | None, base: Spread | None, setting: Setting) -> bool:
    if setting.target is not None:
        return True
    if own is None or base is None:
        return False
    if setting.measure == "perplexity":
        return own.mean <= base.mean * AS_GOOD_PERPLEXITY
    return own.mean >= base.mean - AS_GOOD_POINTS
