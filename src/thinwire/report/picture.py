"""One picture of a comparison, as SVG: the result against time, all methods, the fastest first.

It stands on a white card of its own, so it reads the same on light and dark pages, and it needs no script.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.compare.records import Records, Setting
from thinwire.errors import ConfigError
from thinwire.report import numbers
from thinwire.report.curves import Curve, evaluations
from thinwire.report.page import FONT, shape
from thinwire.report.palette import FAINT, GRID, INK, Style, styles
from thinwire.report.plots.training import accuracy_range
from thinwire.report.summary import Summary, duration, speed_up, summarise
from thinwire.report.words import heading, measure_name, target_text

WIDTH = 880
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 64, 76, 500, 320
NAMES = LEFT + PLOT_WIDTH + 24
ROW = 34


@dataclass(frozen=True)
class Scale:
    """From a value to a place on the card; `places` are two, for the first and the last value."""

    first: float
    last: float
    places: tuple[float, float]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        first, last = self.first, self.last
        if self.logarithmic:
            value, first, last = math.log(value), math.log(first), math.log(last)
        part = (value - first) / (last - first)
        return self.places[0] + part * (self.places[1] - self.places[0])

    def ticks(self) -> list[float]:
        return _decades(self.first, self.last) if self.logarithmic else _even(self.first, self.last)


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
    x = Scale(min(seconds) * 0.95, max(seconds) * 1.05, (LEFT, LEFT + PLOT_WIDTH), logarithmic=True)
    y = _y_scale(list(curves.values()), setting)
    drawn = styles([one.method for one in summaries])
    order = sorted(summaries, key=lambda one: _rank(one, setting))
    height = max(TOP + PLOT_HEIGHT + 56, TOP + 30 + ROW * len(order) + 20)
    lines = [_line(curves[one.method], drawn[one.method], x, y) for one in reversed(order)]
    title = f"{measure_name(setting).capitalize()} against training time"
    body = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="#fff" '
        f'stroke="{GRID}"/>',
        _text(LEFT - 40, 30, title, size=18, weight=650),
        _text(LEFT - 40, 52, _subtitle(records), size=13, fill=FAINT),
        *_axes(x, y, setting),
        '<clipPath id="plot">'
        f'<rect x="{LEFT - 6}" y="{TOP - 6}" width="{PLOT_WIDTH + 12}" height="{PLOT_HEIGHT + 12}"/>'
        "</clipPath>",
        f'<g clip-path="url(#plot)">{"".join(lines)}</g>',
        *_names(order, summaries[0], setting, drawn),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" '
        f'font-family="{html.escape(FONT)}" role="img"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(_description(order, setting))}</desc>{''.join(body)}</svg>\n"
    )


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


def _y_scale(curves: Sequence[Curve], setting: Setting) -> Scale:
    places = (TOP + PLOT_HEIGHT, TOP)
    if setting.measure != "perplexity":
        return Scale(*accuracy_range(curves, setting.target), places)
    values = [point.value for curve in curves for point in curve.points]
    return Scale(min(values) * 0.97, max(values) * 1.03, places, logarithmic=True)


def _line(curve: Curve, style: Style, x: Scale, y: Scale) -> str:
    places = [(x(p.seconds), y(p.value)) for p in curve.points if p.seconds > 0]
    if not places:
        return ""
    dash = "" if style.dash == "solid" else f' stroke-dasharray="{style.dash.replace("px", "")}"'
    way = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    look = f'fill="none" stroke="{style.colour}" stroke-width="2.2" stroke-linejoin="round"{dash}'
    found = f'<path d="{way}" {look}/>'
    a, b = places[-1]
    if curve.broken:
        cross = f"M{a - 6:.1f} {b - 6:.1f}l12 12m0 -12l-12 12"
        return found + f'<path d="{cross}" stroke="{style.colour}" stroke-width="3" fill="none"/>'
    return found + f'<path d="{shape(style.marker, a, b, 5.5)}" fill="{style.colour}" stroke="#fff"/>'


def _axes(x: Scale, y: Scale, setting: Setting) -> list[str]:
    right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    found: list[str] = []
    for value in y.ticks():
        place = y(value)
        found.append(f'<path d="M{LEFT} {place:.1f}H{right}" stroke="{GRID}"/>')
        text = numbers.digits(value, 2) if setting.measure == "perplexity" else f"{100 * value:g} %"
        found.append(_text(LEFT - 8, place + 4, text, size=12, anchor="end", fill=FAINT))
    for value in x.ticks():
        place = x(value)
        found.append(f'<path d="M{place:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
        found.append(_text(place, bottom + 18, f"{value:g}", size=12, anchor="middle", fill=FAINT))
    found.append(_text((LEFT + right) / 2, bottom + 40, "training time in s", size=13, anchor="middle"))
    if setting.target is not None and y.first < setting.target < y.last:
        place = y(setting.target)
        found.append(f'<path d="M{LEFT} {place:.1f}H{right}" stroke="{FAINT}" stroke-dasharray="2 3"/>')
    return found


def _names(order: Sequence[Summary], base: Summary, setting: Setting, drawn: dict[str, Style]) -> list[str]:
    """The legend: the fastest first, with its time."""
    head = "whole run" if setting.target is None else f"time to {target_text(setting)}"
    found = [_text(WIDTH - 20, TOP + 4, head, size=12, anchor="end", fill=FAINT)]
    for number, one in enumerate(order):
        y, style = TOP + 30 + ROW * number, drawn[one.method]
        dash = "" if style.dash == "solid" else f' stroke-dasharray="{style.dash.replace("px", "")}"'
        found.append(f'<path d="M{NAMES} {y - 4}h34" stroke="{style.colour}" stroke-width="2.2"{dash}/>')
        found.append(
            f'<path d="{shape(style.marker, NAMES + 17, y - 4, 5)}" fill="{style.colour}" stroke="#fff"/>'
        )
        name = one.method if len(one.method) <= 22 else one.method[:21] + "…"
        found.append(_text(NAMES + 42, y, name, size=13))
        gain = speed_up(one, base, setting)
        found.append(_text(WIDTH - 20, y, _time_text(one, setting), size=13, anchor="end", weight=600))
        if gain is not None and one is not base:
            found.append(_text(WIDTH - 20, y + 14, numbers.times(gain), size=11, anchor="end", fill=FAINT))
    return found


def _text(
    x: float, y: float, text: str, *, size: int, anchor: str = "start", weight: int = 400, fill: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{html.escape(text)}</text>'
    )


def _decades(first: float, last: float) -> list[float]:
    """1, 2, 5, 10, 20 ... in between; fewer of each decade where there are many decades."""
    many = math.log10(last / first) > 3
    found = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        for factor in ((1,) if many else (1, 2, 5))
    ]
    return [value for value in found if first <= value <= last]


def _even(first: float, last: float) -> list[float]:
    """About six round values in between."""
    rough = (last - first) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [
        round(number * step, 10) for number in range(math.ceil(first / step), math.floor(last / step) + 1)
    ]
