"""One picture of a comparison, as SVG: the result against time, all methods, the fastest first.

It stands on a white card of its own, so it reads the same on light and dark pages, and it needs no script.
"""

from __future__ import annotations

from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.tools import units
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report import page
from thinwire.tools.report.curves import results
from thinwire.tools.report.drawing import Chart, Entry, Scale, Series
from thinwire.tools.report.palette import styles
from thinwire.tools.report.plots.training import accuracy_range
from thinwire.tools.report.summary import Summary, duration, summarise
from thinwire.tools.report.words import heading, measure_name, target_text

WIDTH = 880
BOX = LEFT, TOP, RIGHT, BOTTOM = 64, 76, 564, 396
ROW = 34


def picture(records: Records, path: Path) -> None:
    """Write the picture."""
    page.save(path, svg(records))


def svg(records: Records) -> str:
    """The picture as text."""
    setting, summaries = records.setting, summarise(records)
    curves = {one.method: results(records, one.method, setting.measure) for one in summaries}
    # A logarithmic axis has no place for zero.
    drawable = {name: [p for p in curve.points if p.seconds > 0] for name, curve in curves.items()}
    seconds = [point.seconds for points in drawable.values() for point in points]
    if not seconds:
        raise ConfigError("there are no tests in the records: nothing to draw")
    x = Scale(min(seconds) * 0.95, max(seconds) * 1.05, (LEFT, RIGHT), logarithmic=True)
    values = [point.value for points in drawable.values() for point in points]
    if setting.is_fraction(setting.measure):
        y = Scale(*accuracy_range(list(curves.values()), setting.target), (BOTTOM, TOP))
    else:
        low, high = min(values), max(values)
        y = Scale(low - 0.03 * abs(low), high + 0.03 * abs(high) or 1.0, (BOTTOM, TOP), logarithmic=low > 0)
    drawn = styles([one.method for one in summaries])
    order = sorted(summaries, key=lambda one: time.mean if (time := duration(one, setting)) else float("inf"))
    series = [
        Series(
            [(x(point.seconds), y(point.value)) for point in drawable[one.method]],
            drawn[one.method],
            marks="cross" if curves[one.method].failed else "last",
        )
        for one in reversed(order)
    ]
    legend: list[Entry] = []
    for number, one in enumerate(order):
        gain = None if one.method == one.baseline else one.speed_up
        name = one.method if len(one.method) <= 22 else one.method[:21] + "…"
        note = "" if gain is None else units.times(gain)
        place = (RIGHT + 24, TOP + 30 + ROW * number)
        legend.append(Entry(*place, name, drawn[one.method], value=_time_text(one, setting), note=note))
    return Chart(
        WIDTH,
        max(BOTTOM + 56, TOP + 50 + ROW * len(order)),
        title=f"{measure_name(setting).capitalize()} against training time",
        subtitle=f"{setting.task}, {setting.workers} workers; {heading(records)}",
        description="; ".join(f"{one.method}: {_time_text(one, setting)}" for one in order),
        box=BOX,
        x=x,
        y=y,
        x_title="training time in s",
        y_title="",
        series=series,
        legend=legend,
        legend_title="whole run" if setting.target is None else f"time to {target_text(setting)}",
        target=setting.target,
        y_label=lambda value: (
            f"{100 * value:g} %" if setting.is_fraction(setting.measure) else units.digits(value, 2)
        ),
    ).svg()


def _time_text(one: Summary, setting: Setting) -> str:
    time = duration(one, setting)
    if time is not None:
        return units.seconds(time.mean)
    return "not reached" if one.ended else "failed"
