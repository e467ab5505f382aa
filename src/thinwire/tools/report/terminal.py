"""The table at the end of a comparison, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from thinwire.hosts.scripts import ALONE
from thinwire.tools import units
from thinwire.tools.compare.records import Records
from thinwire.tools.report.summary import (
    AS_GOOD_PERPLEXITY,
    AS_GOOD_POINTS,
    Spread,
    Summary,
    recovers_too_little,
    summarise,
)
from thinwire.tools.report.words import gap_text, measure_text, worse_text


def header(records: Records) -> tuple[str, ...]:
    """With a target there are two columns more, and fewer details: the table fits into 100 columns.

    "inside" are bytes to workers of the same host, which do not pass its link; only with `hierarchical`.
    A script has its own values, and gives up rounds and compression for them. "of gap" is the part of the gap
    between a worker alone and the baseline that a method recovers, at equal steps.
    """
    setting = records.setting
    inside = ("inside",) if records.has_inside else ()
    costs = (
        ("sent", *inside, "rounds", "compress")
        if setting.target is None
        else ("steps", "time", "sent", *inside)
    )
    gain = ("speed-up",) if setting.baseline else ()
    gain += ("of gap",) if _has_control(records) else ()
    if setting.script is not None:
        return ("method", *records.names, "sent", *inside, "wait", "step", *gain)
    return ("method", setting.measure, *costs, "wait", "step", *gain)


def rows(records: Records) -> list[tuple[str, ...]]:
    """Means over the seeds; bytes and times are per step and worker."""
    return [_cells(one, records) for one in summarise(records)]


def warnings(records: Records) -> list[str]:
    """One line for each speed-up that cost accuracy, and for what gains too little from the other workers."""
    found = summarise(records)
    worse = [f"! {one.method}: {worse_text(one, records.setting)}" for one in found if one.worse is not None]
    little = [f"! {one.method}: {gap_text(one)}" for one in found if recovers_too_little(one)]
    return [*worse, *little, *_small_gap(records)]


def _cells(one: Summary, records: Records) -> tuple[str, ...]:
    setting = records.setting
    steps = one.steps.mean if one.steps is not None else 1.0
    gain = "-" if one.speed_up is None else f"{one.speed_up:.2f} x" + " !" * (one.worse is not None)

    def show(value: Spread | None, write: Callable[[float], str] = units.seconds) -> str:
        return "-" if value is None else write(value.mean)

    def per_step(count: float) -> str:
        return units.data(count / max(steps, 1.0))

    name = f"{one.method}: {' or '.join(one.chosen)}" if one.chosen else one.method
    sent = (
        show(one.sent, per_step),
        *((show(one.sent_inside, per_step),) if records.has_inside else ()),
    )
    target = (show(one.target_step, units.whole), show(one.target_seconds), *sent)
    details = (
        *sent,
        show(one.rounds, "{:.2g}".format),
        show(one.compress_seconds),
    )
    results = (show(one.measure, lambda value: measure_text(value, setting)),)
    if setting.script is not None:
        results = tuple(show(one.values.get(each), units.digits) for each in records.names)
        details = sent
    return (
        f"{name} (failed)" if one.failures else name,
        *results,
        *(details if setting.target is None else target),
        show(one.wait_seconds),
        show(one.step_seconds),
        *((gain,) if setting.baseline else ()),
        *((_part(one),) if _has_control(records) else ()),
    )


def _small_gap(records: Records) -> list[str]:
    """A line if a worker alone is about as good as the baseline: then parts of the gap are mostly chance."""
    gap, setting = records.control_gap(), records.setting
    if not _has_control(records) or gap is None or setting.script is not None:
        return []
    accuracy = setting.is_fraction(setting.measure)
    if gap >= (AS_GOOD_POINTS if accuracy else math.log(AS_GOOD_PERPLEXITY)):
        return []
    size = f"{100 * gap:.1f} points" if accuracy else f"{gap:.3f} nats"
    told = f"a worker alone is only {size} behind {records.baseline} here"
    return [f"{told}: which part of that a method recovers is mostly chance"]


def _has_control(records: Records) -> bool:
    return records.baseline is not None and ALONE in records.methods


def _part(one: Summary) -> str:
    return "-" if one.recovered is None else f"{100 * one.recovered:.0f} %" + " !" * recovers_too_little(one)
