"""A reproduction's figure as SVG, for a page: lines or points, with axes and a legend below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.report import drawing
from thinwire.tools.report.palette import FAINT, GRID, styles

WIDTH = 760
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 76, 56, 660, 320
ROW, COLUMNS, LONGEST_NAME = 22, 2, 46
MOST_POINTS = 160
"""Of a curve: more than the picture can show are averaged."""


@dataclass(frozen=True)
class Trace:
    name: str
    points: tuple[tuple[float, float], ...]
    mode: str


def svg(title: str, figure: Any) -> str | None:
    """The picture; None if nothing in the figure can be drawn as lines or points."""
    log_x, log_y = figure.layout.xaxis.type == "log", figure.layout.yaxis.type == "log"
    traces = [
        Trace(str(each.name), _points(each.x, each.y, log_x, log_y), str(each.mode or "lines"))
        for each in figure.data
        if each.type == "scatter"
    ]
    traces = [each for each in traces if each.points]
    if not traces:
        return None
    x = _scale([p[0] for t in traces for p in t.points], (LEFT, LEFT + PLOT_WIDTH), log_x)
    y = _scale([p[1] for t in traces for p in t.points], (TOP + PLOT_HEIGHT, TOP), log_y)
    drawn = styles([each.name for each in traces])
    title = title[:1].upper() + title[1:]
    body = [drawing.text(24, 32, title, size=17, weight=650)]
    body += _axes(x, y, _title(figure.layout.xaxis), _title(figure.layout.yaxis))
    for each in reversed(traces):
        places = [(x(a), y(b)) for a, b in each.points]
        if "lines" in each.mode:
            body.append(drawing.line(places, drawn[each.name]))
        if "markers" in each.mode:
            body += [drawing.marker(place, drawn[each.name], 4.5) for place in places]
        else:
            body.append(drawing.marker(places[-1], drawn[each.name], 5))
    first = TOP + PLOT_HEIGHT + 62
    for number, each in enumerate(traces):
        row, column = divmod(number, COLUMNS)
        left, top = LEFT + column * PLOT_WIDTH // COLUMNS, first + ROW * row
        name = each.name if len(each.name) <= LONGEST_NAME else each.name[: LONGEST_NAME - 1] + "…"
        body.append(drawing.key(left, top - 4, drawn[each.name], lined="lines" in each.mode))
        body.append(drawing.text(left + 42, top, name, size=12))
    height = first + ROW * math.ceil(len(traces) / COLUMNS)
    return drawing.card(WIDTH, height, title, "; ".join(each.name for each in traces), body)


def _points(xs: Any, ys: Any, log_x: bool, log_y: bool) -> tuple[tuple[float, float], ...]:
    """Those that have a place on the axes, thinned to means of neighbours."""
    pairs = [(float(a), float(b)) for a, b in zip(xs or (), ys or (), strict=True) if b is not None]
    kept = [
        (a, b)
        for a, b in pairs
        if math.isfinite(a) and math.isfinite(b) and (a > 0 or not log_x) and (b > 0 or not log_y)
    ]
    if len(kept) <= MOST_POINTS:
        return tuple(kept)
    step = math.ceil(len(kept) / MOST_POINTS)
    groups = [kept[begin : begin + step] for begin in range(0, len(kept), step)]
    return tuple((sum(a for a, _ in g) / len(g), sum(b for _, b in g) / len(g)) for g in groups)


def _scale(values: Sequence[float], places: tuple[float, float], logarithmic: bool) -> drawing.Scale:
    low, high = min(values), max(values)
    if logarithmic:
        room = (high / low) ** 0.03 if high > low else 2.0
        return drawing.Scale(low / room, high * room, places, logarithmic=True)
    room = 0.03 * (high - low) or 1.0
    return drawing.Scale(low - room, high + room, places)


def _title(axis: Any) -> str:
    return str(axis.title.text or "")


def _axes(x: drawing.Scale, y: drawing.Scale, x_title: str, y_title: str) -> list[str]:
    right, bottom = LEFT + PLOT_WIDTH, TOP + PLOT_HEIGHT
    found: list[str] = []
    for value in y.ticks():
        place = y(value)
        found.append(f'<path d="M{LEFT} {place:.1f}H{right}" stroke="{GRID}"/>')
        found.append(drawing.text(LEFT - 8, place + 4, f"{value:g}", size=12, anchor="end", fill=FAINT))
    for value in x.ticks():
        place = x(value)
        found.append(f'<path d="M{place:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
        found.append(drawing.text(place, bottom + 18, f"{value:g}", size=12, anchor="middle", fill=FAINT))
    found.append(drawing.text((LEFT + right) / 2, bottom + 38, x_title, size=13, anchor="middle"))
    middle = (TOP + bottom) / 2
    upright = drawing.text(0, 0, y_title, size=13, anchor="middle")
    return [*found, f'<g transform="translate(20 {middle:.0f}) rotate(-90)">{upright}</g>']
