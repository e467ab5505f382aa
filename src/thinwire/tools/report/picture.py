"""One picture of a comparison, as SVG: the result against time, all methods, the fastest first.

It stands on a white card of its own, so it reads the same on light and dark pages, and it needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report import drawing, numbers
from thinwire.tools.report.curves import Curve, evaluations
from thinwire.tools.report.palette import FAINT, GRID, Style, styles
from thinwire.tools.report.plots.training import accuracy_range
from thinwire.tools.report.summary import Summary, duration, speed_up, summarise
from thinwire.tools.report.words import heading, measure_name, target_text

WIDTH = 880
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 64, 76, 500, 320
NAMES = LEFT + PLOT_WIDTH + 24
ROW = 34


def picture(records: Records, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(records), encoding="utf-8")


def svg(records: Records) -> str:
    """The picture as text."""
    setting, summaries = records.setting, summarise(records)
    measure = "perplexity" if setting.measure == "perplexity" else "accuracy"
    curves = {one.method: evaluations(records, one.method, measure) for one in summaries}
    # A logarithmic axis has no place for zero.
    seconds = [point.seconds for curve in curves.values() for point in curve.points if point.seconds > 0]
    if not seconds:
        raise ConfigError("there are no tests in the records: nothing to draw")
    x = drawing.Scale(min(seconds) * 0.95, max(seconds) * 1.05, (LEFT, LEFT + PLOT_WIDTH), logarithmic=True)
    y = _y_scale(list(curves.values()), setting)
    drawn = styles([one.method for one in summaries])
    order = sorted(summaries, key=lambda one: _rank(one, setting))
    height = max(TOP + PLOT_HEIGHT + 56, TOP + 30 + ROW * len(order) + 20)
    lines = [_line(curves[one.method], drawn[one.method], x, y) for one in reversed(order)]
    title = f"{measure_name(setting).capitalize()} against training time"
    body = [
        drawing.text(LEFT - 40, 30, title, size=18, weight=650),
        drawing.text(LEFT - 40, 52, _subtitle(records), size=13, fill=FAINT),
        *_axes(x, y, setting),
        '<clipPath id="plot">'
        f'<rect x="{LEFT - 6}" y="{TOP - 6}" width="{PLOT_WIDTH + 12}" height="{PLOT_HEIGHT + 12}"/>'
        "</clipPath>",
        f'<g clip-path="url(#plot)">{"".join(lines)}</g>',
        *_names(order, summaries[0], setting, drawn),
    ]
    return drawing.card(WIDTH, height, title, _description(order, setting), body)


def _rank(one: Summary, setting: Setting) -> tuple[bool, float]:
    time = duration(one, setting)
    return time is None, time.mean if time else 0.0


def _subtitle(records: Records) -> str:
    setting = records.setting
    return f"{setting.model} on {setting.data}, {setting.workers} workers; {heading(records)}"


def _description(order: Sequence[Summary], setting: Setting) -> str:
    return "; ".join(f"{one.method}: {_time_text(one, setting)}" for one in order)


def _time_text(one: Summary, setting: Setting) -> str:
    time = duration(one, setting)
    if time is not None:
        return numbers.seconds(time.mean)
    return "failed" if not one.ended else "not reached"


def _y_scale(curves: Sequence[Curve], setting: Setting) -> drawing.Scale:
    places = (TOP + PLOT_HEIGHT, TOP)
    if setting.measure != "perplexity":
        return drawing.Scale(*accuracy_range(curves, setting.target), places)
    values = [point.value for curve in curves for point in curve.points]
    return drawing.Scale(min(values) * 0.97, max(values) * 1.03, places, logarithmic=True)


def _line(curve: Curve, style: Style, x: drawing.Scale, y: drawing.Scale) -> str:
    places = [(x(p.seconds), y(p.value)) for p in curve.points if p.seconds > 0]
    if not places:
        return ""
    found = drawing.line(places, style)
    a, b = places[-1]
    if curve.broken:
        cross = f"M{a - 6:.1f} {b - 6:.1f}l12 12m0 -12l-12 12"
        return found + f'<path d="{cross}" stroke="{style.colour}" stroke-width="3" fill="none"/>'
    return found + drawing.marker((a, b), style, 5.5)


def _axes(x: drawing.Scale, y: drawing.Scale, setting: Setting) -> list[str]:
    right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    found: list[str] = []
    for value in y.ticks():
        place = y(value)
        found.append(f'<path d="M{LEFT} {place:.1f}H{right}" stroke="{GRID}"/>')
        text = numbers.digits(value, 2) if setting.measure == "perplexity" else f"{100 * value:g} %"
        found.append(drawing.text(LEFT - 8, place + 4, text, size=12, anchor="end", fill=FAINT))
    for value in x.ticks():
        place = x(value)
        found.append(f'<path d="M{place:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
        found.append(drawing.text(place, bottom + 18, f"{value:g}", size=12, anchor="middle", fill=FAINT))
    found.append(
        drawing.text((LEFT + right) / 2, bottom + 40, "training time in s", size=13, anchor="middle")
    )
    if setting.target is not None and y.first < setting.target < y.last:
        place = y(setting.target)
        found.append(f'<path d="M{LEFT} {place:.1f}H{right}" stroke="{FAINT}" stroke-dasharray="2 3"/>')
    return found


def _names(order: Sequence[Summary], base: Summary, setting: Setting, drawn: dict[str, Style]) -> list[str]:
    """The legend: the fastest first, with its time."""
    head = "whole run" if setting.target is None else f"time to {target_text(setting)}"
    found = [drawing.text(WIDTH - 20, TOP + 4, head, size=12, anchor="end", fill=FAINT)]
    for number, one in enumerate(order):
        y, style = TOP + 30 + ROW * number, drawn[one.method]
        found.append(drawing.key(NAMES, y - 4, style))
        name = one.method if len(one.method) <= 22 else one.method[:21] + "…"
        found.append(drawing.text(NAMES + 42, y, name, size=13))
        gain = speed_up(one, base, setting)
        found.append(drawing.text(WIDTH - 20, y, _time_text(one, setting), size=13, anchor="end", weight=600))
        if gain is not None and one is not base:
            found.append(
                drawing.text(WIDTH - 20, y + 14, numbers.times(gain), size=11, anchor="end", fill=FAINT)
            )
    return found
