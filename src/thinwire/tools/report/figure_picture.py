"""A figure of `lines` as SVG, for pages without scripts: lines or points, with axes and a legend below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thinwire.tools.report.drawing import Chart, Entry, Scale, Series
from thinwire.tools.report.palette import styles

WIDTH = 760
BOX = LEFT, TOP, RIGHT, BOTTOM = 76, 56, 736, 376
ROW, COLUMNS, LONGEST_NAME = 22, 2, 44
MOST_POINTS = 160
"""Of a curve: more than the picture can show are averaged."""


def svg(title: str, figure: Any) -> str | None:
    """The picture; None if nothing in the figure can be drawn as lines or points."""
    x_axis, y_axis = figure["layout"]["xaxis"], figure["layout"]["yaxis"]
    log_x, log_y = x_axis.get("type") == "log", y_axis.get("type") == "log"
    curves = {
        str(each["name"]): (_points(each["x"], each["y"], log_x, log_y), str(each["mode"]))
        for each in figure["data"]
    }
    if "range" in y_axis:  # where the figure is cut off
        low, high = (10.0**end if log_y else end for end in y_axis["range"])
        curves = {name: (tuple(p for p in c if low <= p[1] <= high), m) for name, (c, m) in curves.items()}
    curves = {name: curve for name, curve in curves.items() if curve[0]}
    if not curves:
        return None
    x = _scale([point[0] for points, _ in curves.values() for point in points], (LEFT, RIGHT), log_x)
    y = _scale([point[1] for points, _ in curves.values() for point in points], (BOTTOM, TOP), log_y)
    drawn = styles(list(curves))
    series = [
        Series([(x(a), y(b)) for a, b in points], drawn[name], "lines" in mode, _marks(mode))
        for name, (points, mode) in curves.items()
    ]
    legend: list[Entry] = []
    for number, (name, (_, mode)) in enumerate(curves.items()):
        row, column = divmod(number, COLUMNS)
        place = (LEFT + column * (RIGHT - LEFT) // COLUMNS, BOTTOM + 68 + ROW * row)
        shown = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        legend.append(Entry(*place, shown, drawn[name], "lines" in mode))
    return Chart(
        WIDTH,
        BOTTOM + 68 + ROW * math.ceil(len(curves) / COLUMNS),
        title=title[:1].upper() + title[1:],
        subtitle="",
        description="; ".join(curves),
        box=BOX,
        x=x,
        y=y,
        x_title=x_axis["title"]["text"],
        y_title=y_axis["title"]["text"],
        series=series[::-1],
        legend=legend,
    ).svg()


def _marks(mode: str) -> Any:
    return "all" if "markers" in mode else "last"


def _points(xs: Any, ys: Any, log_x: bool, log_y: bool) -> tuple[tuple[float, float], ...]:
    """Those that have a place on the axes, thinned to means of neighbours."""
    pairs = [(float(a), float(b)) for a, b in zip(xs, ys, strict=True) if b is not None]
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


def _scale(values: Sequence[float], places: tuple[float, float], logarithmic: bool) -> Scale:
    low, high = min(values), max(values)
    if logarithmic:
        room = (high / low) ** 0.03 if high > low else 2.0
        return Scale(low / room, high * room, places, logarithmic=True)
    room = 0.03 * (high - low) or 1.0
    return Scale(low - room, high + room, places)
