"""Step times on other links and with other numbers of workers, from `thinwire.predict` and the records.

Operations and bytes come from the method's own code; its work is scaled so that it takes as long as in the
recorded runs; compute time is that of the method's own runs. So a report made on another machine still
describes the machines that were compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.errors import ConfigError
from thinwire.hosts.scripts import ALONE
from thinwire.net.costs import Link
from thinwire.predict import BreakEven, Job, Profile, break_even_of, profiles
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report.summary import Summary

BANDWIDTHS = tuple(10e6 / 8 * 10 ** (number / 8) for number in range(4 * 8 + 1))
"""10 Mbit/s to 100 Gbit/s, in bytes."""
WORKERS = (2, 4, 8, 16, 64, 256, 1024)
UNLIMITED = 125e6
"""Bytes per second of the link in the plot of worker counts if the runs had none: 1 Gbit/s."""
STAND_INS = {"pytorch": "dense", "pytorch-fp16": "fp16"}
"""PyTorch's own methods, predicted as the method of thinwire that moves the same bytes."""


@dataclass(frozen=True)
class Prediction:
    """Of one method: seconds per step by `BANDWIDTHS`, and by `WORKERS` on `link_of(setting)`."""

    method: str
    by_bandwidth: tuple[float, ...]
    by_workers: tuple[float, ...]
    break_even: BreakEven
    here: float | None
    """On the link of the runs; None if that had no limit."""


@dataclass(frozen=True)
class Forecast:
    predictions: tuple[Prediction, ...]
    missing: dict[str, str]
    """Methods that cannot be predicted, and why."""


def link_of(setting: Setting) -> Link:
    """The link for worker counts."""
    return Link(_latency(setting), setting.bandwidth or UNLIMITED)


def _latency(setting: Setting) -> float:
    return setting.latency if setting.latency > 0 else Link().latency


def forecast(records: Records, summaries: Sequence[Summary]) -> Forecast:
    """Predict every method that can be predicted; break-even is against the first of these."""
    setting = records.setting
    found: dict[str, dict[int, Profile]] = {}
    missing: dict[str, str] = {}
    for one in summaries:
        try:
            found[one.method] = _profiles(one, setting)
        except ConfigError as error:
            # What is wrong, without the advice on how to call it instead.
            missing[one.method] = str(error).partition(": ")[0]
    computes = {one.method: one.compute_seconds.mean if one.compute_seconds else 0.0 for one in summaries}
    timed = [Timed(method, own, computes[method]) for method, own in found.items()]
    return Forecast(tuple(_prediction(one, timed[0], setting) for one in timed), missing)


@dataclass(frozen=True)
class Timed:
    """The profiles of one method by the number of workers, and the compute time of a step of its runs."""

    method: str
    profiles: dict[int, Profile]
    compute: float


def _profiles(one: Summary, setting: Setting) -> dict[int, Profile]:
    if one.method == ALONE:
        raise ConfigError("a worker without the others sends nothing")
    method = one.chosen[0] if one.chosen else STAND_INS.get(one.method, one.method)
    found = profiles(method, setting.layers, sorted({setting.workers, *WORKERS}))
    played = found[setting.workers].compression_seconds
    if one.compress_seconds is None or played <= 0 or one.compress_seconds.mean <= 0:
        return found
    factor = one.compress_seconds.mean / played
    return {count: scaled(own, factor) for count, own in found.items()}


def scaled(own: Profile, factor: float) -> Profile:
    """The same operations with all work `factor` times as long."""

    def job(one: Job) -> Job:
        rounds = tuple(replace(each, work=each.work * factor) for each in one.rounds)
        return replace(one, rounds=rounds, closing=one.closing * factor, finish=one.finish * factor)

    steps = tuple(tuple(job(one) for one in jobs) for jobs in own.steps)
    return replace(own, steps=steps, reconciliation=job(own.reconciliation) if own.reconciliation else None)


def _prediction(one: Timed, baseline: Timed, setting: Setting) -> Prediction:
    latency, link = _latency(setting), link_of(setting)
    here = one.profiles[setting.workers]

    def seconds(bandwidth: float) -> float:
        return here.step_seconds(Link(latency, bandwidth), one.compute)

    return Prediction(
        one.method,
        tuple(seconds(bandwidth) for bandwidth in BANDWIDTHS),
        tuple(one.profiles[count].step_seconds(link, one.compute) for count in WORKERS),
        break_even_of(
            here,
            baseline.profiles[setting.workers],
            one.compute,
            dense_compute=baseline.compute,
            latency=latency,
        ),
        None if setting.bandwidth is None else seconds(setting.bandwidth),
    )
