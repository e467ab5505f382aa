"""Step times on other links and with other numbers of workers, from `thinwire.predict` and the records.

Operations and bytes come from the method's own code, as it chooses them on the link of the runs; its work is
scaled so that it takes as long as in the recorded runs; compute time is that of the method's own runs. What
an operation costs besides the link is what the steps of all methods took longer than predicted without it. So
a report made on another machine still describes the machines that were compared. Where a prediction for the
runs themselves is far from what was measured, `why` says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.hosts.scripts import ALONE
from thinwire.net.costs import Link
from thinwire.predict import BreakEven, Overheads, PeriodicProfile, Profile, Sites, break_even_of, profiles
from thinwire.tools import units
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report.summary import Summary

BANDWIDTHS = tuple(10e6 / 8 * 10 ** (number / 8) for number in range(4 * 8 + 1))
"""10 Mbit/s to 100 Gbit/s, in bytes."""
WORKERS = (2, 4, 8, 16, 64, 256, 1024)
UNLIMITED = 125e6
"""Bytes per second of the link in the plot of worker counts if the runs had none: 1 Gbit/s."""
STAND_INS = {"pytorch": "dense", "pytorch-fp16": "fp16"}
"""PyTorch's own methods, predicted as the method of thinwire that moves the same bytes."""
CONTRADICTED = 0.25
"""A prediction that differs more from its own measurement comes with a reason."""


@dataclass(frozen=True)
class Prediction:
    """Of one method: seconds per step by `BANDWIDTHS`, and by `WORKERS` on `link_of(setting)`."""

    method: str
    by_bandwidth: tuple[float, ...]
    by_workers: tuple[float, ...]
    break_even: BreakEven
    here: float | None
    """On the link of the runs; None if that had no limit."""
    measured: float | None = None
    """A step of the runs: the median, or the mean for a method that does not communicate in every step."""
    why: str | None = None
    """Why the two differ, if they do by more than `CONTRADICTED`."""


@dataclass(frozen=True)
class Forecast:
    predictions: tuple[Prediction, ...]
    missing: dict[str, str]
    """Methods that cannot be predicted, and why."""
    operation: float = 0.0
    """Seconds of an operation besides the link, by the runs."""


def link_of(setting: Setting) -> Link:
    """The link for worker counts."""
    return Link(_latency(setting), setting.bandwidth or UNLIMITED)


def _latency(setting: Setting) -> float:
    return setting.latency if setting.latency > 0 else Link().latency


def forecast(records: Records, summaries: Sequence[Summary]) -> Forecast:
    """Predict every method that can be predicted; break-even is against the first of these."""
    setting = records.setting
    found: dict[str, dict[int, Profile | PeriodicProfile]] = {}
    missing: dict[str, str] = {}
    for one in summaries:
        try:
            found[one.method] = _profiles(one, setting)
        except ConfigError as error:
            # What is wrong, without the advice on how to call it instead.
            missing[one.method] = str(error).partition(": ")[0]
    timed = [Timed(one, found[one.method]) for one in summaries if one.method in found]
    over = Overheads(operation=operation_seconds(timed, setting))
    made = tuple(_prediction(one, timed[0], setting, over) for one in timed)
    return Forecast(made, missing, over.operation)


@dataclass(frozen=True)
class Timed:
    """The runs of one method, and its profiles by the number of workers."""

    runs: Summary
    profiles: dict[int, Profile | PeriodicProfile]

    @property
    def compute(self) -> float:
        """Of a step of its runs."""
        return self.runs.compute_seconds.mean if self.runs.compute_seconds else 0.0

    def measured(self, setting: Setting) -> float | None:
        """A step of the runs."""
        if isinstance(self.profiles[setting.workers], PeriodicProfile):
            return self.runs.mean_step
        return None if self.runs.step_seconds is None else self.runs.step_seconds.mean


def operation_seconds(timed: Sequence[Timed], setting: Setting) -> float:
    """What an operation costs besides the link: by how much steps are longer than without it, by operation.

    The median over the methods. A method that was faster than predicted counts as none.
    """
    if setting.bandwidth is None:
        return 0.0
    found: list[float] = []
    for one in timed:
        own, step = one.profiles[setting.workers], one.measured(setting)
        if step is not None and own.rounds:
            free = own.step_seconds(link_of(setting), one.compute, cores=_cores(setting))
            found.append(max(0.0, step - free) / own.rounds)
    return statistics.median(found) if found else 0.0


def _cores(setting: Setting) -> float:
    return math.inf if setting.cores is None else setting.cores


def _profiles(one: Summary, setting: Setting) -> dict[int, Profile | PeriodicProfile]:
    if one.method == ALONE:
        raise ConfigError("a worker without the others sends nothing")
    method = one.chosen[0] if one.chosen else STAND_INS.get(one.method, one.method)
    found = profiles(method, setting.layers, sorted({setting.workers, *WORKERS}), link_of(setting))
    played = found[setting.workers].compression_seconds
    if one.compress_seconds is None or played <= 0 or one.compress_seconds.mean <= 0:
        return found
    factor = one.compress_seconds.mean / played
    return {count: own.scaled(factor) for count, own in found.items()}


def _prediction(one: Timed, baseline: Timed, setting: Setting, over: Overheads) -> Prediction:
    latency, link, cores = _latency(setting), link_of(setting), _cores(setting)
    own = one.profiles[setting.workers]

    def seconds(bandwidth: float) -> float:
        return own.step_seconds(Sites(Link(latency, bandwidth), over), one.compute, cores=cores)

    here = None if setting.bandwidth is None else seconds(setting.bandwidth)
    measured = one.measured(setting)
    return Prediction(
        one.runs.method,
        tuple(seconds(bandwidth) for bandwidth in BANDWIDTHS),
        tuple(
            one.profiles[count].step_seconds(Sites(link, over), one.compute, cores=cores) for count in WORKERS
        ),
        break_even_of(
            own,
            baseline.profiles[setting.workers],
            one.compute,
            dense_compute=baseline.compute,
            latency=latency,
            cores=cores,
            overheads=over,
        ),
        here,
        measured,
        None if here is None or measured is None else reason(one, here, measured, setting, over),
    )


def reason(one: Timed, here: float, measured: float, setting: Setting, over: Overheads) -> str | None:
    """Why a prediction is far from its own measurement; None if it is not."""
    if abs(here / measured - 1) <= CONTRADICTED:
        return None
    own, runs = one.profiles[setting.workers], one.runs
    sent = runs.sent.mean / runs.steps.mean if runs.sent and runs.steps else None
    if sent is not None and not 0.8 <= sent / max(1.0, own.sent_bytes) <= 1.25:
        return (
            f"the runs sent {units.data(sent)} per step, and the prediction is for "
            f"{units.data(own.sent_bytes)}: its bytes depend on the data"
        )
    waited = runs.wait_seconds.mean if runs.wait_seconds else 0.0
    charged = own.link_seconds(link_of(setting)) + own.rounds * over.operation
    if here < measured and waited > (1 + CONTRADICTED) * charged:
        return (
            f"its operations took {units.seconds(waited)} per step, and the prediction charges "
            f"{units.seconds(charged)}: the workers waited for each other or for a core"
        )
    if here > measured and waited < charged / (1 + CONTRADICTED):
        return (
            f"its operations took {units.seconds(waited)} per step, and the prediction charges "
            f"{units.seconds(charged)}, by the median of all methods"
        )
    worked = runs.compress_seconds.mean if runs.compress_seconds else 0.0
    return (
        f"computing ({units.seconds(one.compute)}), compression ({units.seconds(worked)}) and operations "
        f"({units.seconds(waited)}) overlapped {'more' if here > measured else 'less'} than predicted"
    )
