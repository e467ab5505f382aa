"""The table at the end of a comparison, for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.tools import units
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report.summary import Spread, Summary, speed_up, summarise
from thinwire.tools.report.words import measure_text


def header(setting: Setting) -> tuple[str, ...]:
    """With a target there are two columns more, and fewer details: the table fits into 100 columns."""
    if setting.target is not None:
        return ("method", setting.measure, "steps", "time", "sent", "wait", "step", "speed-up")
    costs = ("sent", "rounds", "compress", "wait", "step", "speed-up")
    return ("method", setting.measure, *costs)


def rows(records: Records) -> list[tuple[str, ...]]:
    """Means over the seeds; bytes and times are per step and worker."""
    summaries = summarise(records)
    return [_cells(one, summaries[0], records.setting) for one in summaries]


def _cells(one: Summary, base: Summary, setting: Setting) -> tuple[str, ...]:
    steps = one.steps.mean if one.steps is not None else 1.0
    gain = speed_up(one, base, setting)

    def show(value: Spread | None, write: Callable[[float], str] = units.seconds) -> str:
        return "-" if value is None else write(value.mean)

    def per_step(count: float) -> str:
        return units.data(count / max(steps, 1.0))

    name = f"{one.method}: {' or '.join(one.chosen)}" if one.chosen else one.method
    target = (show(one.target_step, units.whole), show(one.target_seconds), show(one.sent, per_step))
    details = (
        show(one.sent, per_step),
        show(one.rounds, "{:.2g}".format),
        show(one.compress_seconds),
    )
    return (
        f"{name} (failed)" if one.failures else name,
        show(one.measure, lambda value: measure_text(value, setting)),
        *(details if setting.target is None else target),
        show(one.wait_seconds),
        show(one.step_seconds),
        "-" if gain is None else f"{gain:.2f} x",
    )
