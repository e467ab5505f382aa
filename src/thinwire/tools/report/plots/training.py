"""Loss and accuracy over a run, against time, bytes and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report import numbers
from thinwire.tools.report.curves import Curve, Point, evaluations, training_loss
from thinwire.tools.report.page import Choice, Views, layout
from thinwire.tools.report.palette import Style
from thinwire.tools.report.plots.common import HOVER, plain, rule, short
from thinwire.tools.report.words import measure_name

BROKEN = {"symbol": "x-thin", "size": 12, "line": {"width": 3}}


X_CHOICES = (Choice("seconds", "time"), Choice("sent", "bytes"), Choice("step", "steps"))
X_TITLES = {"seconds": "training time in s", "sent": "sent by each worker in MB", "step": "step"}
X_UNITS = {"seconds": 1.0, "sent": 1e6, "step": 1.0}


def curves(records: Records, styles: Mapping[str, Style]) -> tuple[dict[str, Any], Views]:
    """Loss and accuracy against time, bytes and steps: one figure, and the other views of it."""
    setting = records.setting
    measure = "perplexity" if setting.measure == "perplexity" else "accuracy"
    kinds = {
        measure: (measure_name(setting), {m: evaluations(records, m, measure) for m in styles}),
        "test": ("test loss", {m: evaluations(records, m, "loss") for m in styles}),
        "train": ("training loss", {m: training_loss(records, m) for m in styles}),
    }
    shelf = _Shelf()
    banded = setting.seeds > 1
    views: dict[str, dict[str, Any]] = {}
    for key, (title, by_method) in kinds.items():
        for choice in X_CHOICES:
            traces: list[dict[str, int]] = []
            for curve in by_method.values():
                traces += _curve_traces(curve, choice.key, key, setting, shelf, banded)
            views[f"{key}|{choice.key}"] = {
                "traces": traces,
                "layout": _curve_layout(key, title, choice.key, by_method, setting),
            }
    first = views[f"{measure}|{X_CHOICES[0].key}"]
    drawn = [trace for method, style in styles.items() for trace in _curve_looks(method, style, banded)]
    for trace, numbered in zip(drawn, first["traces"], strict=True):
        trace.update({name: shelf.arrays[number] for name, number in numbered.items()})
    figure = {"data": drawn, "layout": _nested(layout(xaxis={}, yaxis={}), first["layout"])}
    y_choices = [Choice(key, title) for key, (title, _) in kinds.items()]
    return figure, Views(y_choices, X_CHOICES, shelf.arrays, views)


class _Shelf:
    """Arrays that several views share."""

    def __init__(self) -> None:
        self.arrays: list[list[Any]] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def place(self, values: Sequence[Any]) -> int:
        key = tuple(values)
        if key not in self._known:
            self._known[key] = len(self.arrays)
            self.arrays.append(list(values))
        return self._known[key]


def _curve_looks(method: str, style: Style, banded: bool) -> list[dict[str, Any]]:
    """How a method's traces look: its range (with several seeds), its line, and the end of failed ones."""
    common = {"type": "scatter", "name": plain(method), "meta": method}
    line = {
        **common,
        "mode": "lines+markers",
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"color": style.colour, "symbol": style.marker, "size": 7, "maxdisplayed": 12},
        "hovertemplate": HOVER,
    }
    end = {
        **common,
        "mode": "markers",
        "marker": {**BROKEN, "color": style.colour, "line": {"width": 3, "color": style.colour}},
        "hovertemplate": "<b>%{fullData.name}</b> failed here<br>%{text}<extra></extra>",
    }
    if not banded:
        return [line, end]
    band = {
        **common,
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": _faded(style.colour),
        "hoverinfo": "skip",
    }
    return [band, line, end]


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"


def _curve_traces(
    curve: Curve, x: str, kind: str, setting: Setting, shelf: _Shelf, banded: bool
) -> list[dict[str, int]]:
    # Bytes that nobody counted are no place on an axis.
    points = [point for point in curve.points if x != "sent" or point.sent > 0 or setting.workers == 1]
    at = [short(getattr(point, x) / X_UNITS[x]) for point in points]
    values = [short(point.value) for point in points]
    texts = [_hover(point, kind, setting) for point in points]
    last = slice(-1, None) if curve.broken else slice(0, 0)
    line = {"x": shelf.place(at), "y": shelf.place(values), "text": shelf.place(texts)}
    end = {
        "x": shelf.place(at[last]),
        "y": shelf.place(values[last]),
        "text": shelf.place(texts[last]),
    }
    if not banded:
        return [line, end]
    outline = [short(point.high) for point in points] + [short(point.low) for point in reversed(points)]
    band = {
        "x": shelf.place([*at, *reversed(at)]),
        "y": shelf.place(outline),
        "text": shelf.place([]),
    }
    return [band, line, end]


def _hover(point: Point, kind: str, setting: Setting) -> str:
    def text(value: float) -> str:
        return numbers.percent(value) if kind == "accuracy" else numbers.digits(value)

    value = text(point.value)
    if setting.seeds > 1:
        value += f" ({text(point.low)} to {text(point.high)})"
    name = {"test": "test loss", "train": "training loss"}.get(kind, kind)
    sent = f", {numbers.data(point.sent)} sent" if point.sent > 0 else ""
    return f"{name} {value}<br>step {point.step:,}, {numbers.seconds(point.seconds)}{sent}"


def _curve_layout(
    kind: str, title: str, x: str, by_method: Mapping[str, Curve], setting: Setting
) -> dict[str, Any]:
    values = [point.value for curve in by_method.values() for point in curve.points]
    logarithmic = kind != "accuracy" and bool(values) and min(values) > 0
    found: dict[str, Any] = {
        "xaxis.title.text": X_TITLES[x],
        "xaxis.type": "log" if x == "sent" else "linear",
        "xaxis.autorange": True,
        "yaxis.title.text": title,
        "yaxis.tickformat": ".2~%" if kind == "accuracy" else "",
        "yaxis.type": "log" if logarithmic else "linear",
        "yaxis.dtick": None,
    }
    if kind == "accuracy":
        found["yaxis.range"] = accuracy_range(list(by_method.values()), setting.target)
    else:
        found["yaxis.autorange"] = True
    shapes: list[dict[str, Any]] = []
    if setting.target is not None and kind in ("accuracy", "perplexity"):
        shapes.append(rule("y", setting.target))
    found["shapes"] = shapes
    return found


def accuracy_range(curves: Sequence[Curve], target: float | None) -> tuple[float, float]:
    """Where methods differ: every curve's end is in it, but not all of their first steps."""
    ends = [curve.points[-1].value for curve in curves if curve.points]
    highs = [point.high for curve in curves for point in curve.points]
    top = max([*highs, target or 0.0], default=1.0)
    low = max(0.0, min([*ends, top - 0.25]) - 0.03)
    return low, min(1.005, top + 0.02 * (top - low) + 0.005)


def _nested(base: dict[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Put "xaxis.title.text": ... where it belongs."""
    for path, value in dotted.items():
        *way, last = path.split(".")
        place = base
        for name in way:
            place[name] = dict(place.get(name, {}))
            place = place[name]
        place[last] = value
    return base
