"""Loss and accuracy over a run, against time, bytes and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools import units
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report.curves import Curve, Point, evaluations, results, training_loss
from thinwire.tools.report.palette import Style
from thinwire.tools.report.plots.common import Figure, Trace, drawn_line, figure, points, rule, short, titled
from thinwire.tools.report.words import measure_name


@dataclass(frozen=True)
class Choice:
    """One button above a plot, and what it changes in the layout."""

    key: str
    label: str
    layout: dict[str, Any]


@dataclass(frozen=True)
class Views:
    """Other data for the same traces: `columns` has, for each choice of y, one mapping per trace.

    Such a mapping has the values of "y" and "text", and those of x for each choice of x.
    """

    y: Sequence[Choice]
    x: Sequence[Choice]
    columns: Mapping[str, Sequence[Mapping[str, Sequence[Any]]]]


X = (
    Choice("seconds", "time", {"xaxis": titled("training time in s")}),
    Choice("sent", "bytes", {"xaxis": titled("sent by each worker in MB", type="log")}),
    Choice("step", "steps", {"xaxis": titled("step")}),
)


def curves(records: Records, styles: Mapping[str, Style]) -> tuple[Figure, Views]:
    """Loss and accuracy, or a script's values, by time, bytes and steps: one figure, and all views of it."""
    setting = records.setting
    if setting.script is not None:
        kinds = {
            name: {method: results(records, method, name) for method in styles} for name in records.names
        }
    else:
        kinds = {
            setting.measure: {method: evaluations(records, method, setting.measure) for method in styles},
            "test loss": {method: evaluations(records, method, "loss") for method in styles},
            "training loss": {method: training_loss(records, method) for method in styles},
        }
    banded = setting.seeds > 1
    traces = [trace for method, style in styles.items() for trace in _traces(method, style, banded)]
    columns = {
        kind: [each for curve in by_method.values() for each in _columns(curve, kind, setting, banded)]
        for kind, by_method in kinds.items()
    }
    y = [_y_choice(kind, list(by_method.values()), setting) for kind, by_method in kinds.items()]
    return figure(traces), Views(y, X, columns)


def _traces(method: str, style: Style, banded: bool) -> list[Trace]:
    """How a method looks: its range (with several seeds), its line, and the end of a failed one."""
    line = points(method, (), (), (), **drawn_line(style, 7, maxdisplayed=12))
    end = points(method, (), (), (), mode="markers")
    cross = {"width": 3, "color": style.colour}
    end["marker"] = {"symbol": "x-thin", "size": 12, "color": style.colour, "line": cross}
    end["hovertemplate"] = "<b>%{fullData.name}</b> failed here<br>%{text}<extra></extra>"
    if not banded:
        return [line, end]
    red, green, blue = (int(style.colour[at : at + 2], 16) for at in (1, 3, 5))
    band = points(method, (), (), (), mode="lines", line={"width": 0}, fill="toself", hoverinfo="skip")
    return [{**band, "fillcolor": f"rgba({red},{green},{blue},0.13)"}, line, end]


def _columns(curve: Curve, kind: str, setting: Setting, banded: bool) -> list[dict[str, list[Any]]]:
    found = curve.points
    last = found[-1:] if curve.failed else ()

    def column(at: Sequence[Point], y: Sequence[float], text: Sequence[str]) -> dict[str, list[Any]]:
        return {
            "seconds": [short(point.seconds) for point in at],
            # Bytes that nobody counted have no place on the axis.
            "sent": [short(point.sent / 1e6) or None for point in at],
            "step": [point.step for point in at],
            "y": [short(value) for value in y],
            "text": list(text),
        }

    texts = [_hover(point, kind, setting) for point in found]
    line = column(found, [point.value for point in found], texts)
    end = column(last, [point.value for point in last], texts[len(found) - len(last) :])
    if not banded:
        return [line, end]
    outline = [point.high for point in found] + [point.low for point in reversed(found)]
    return [column([*found, *reversed(found)], outline, ()), line, end]


def _hover(point: Point, kind: str, setting: Setting) -> str:
    write = units.percent if setting.is_fraction(kind) else units.digits
    value = write(point.value)
    if setting.seeds > 1:
        value += f" ({write(point.low)} to {write(point.high)})"
    sent = f", {units.data(point.sent)} sent" if point.sent > 0 else ""
    return f"{kind} {value}<br>step {point.step:,}, {units.seconds(point.seconds)}{sent}"


def _y_choice(kind: str, drawn: Sequence[Curve], setting: Setting) -> Choice:
    shapes = [rule("y", setting.target)] if kind == setting.measure and setting.target is not None else []
    title = measure_name(setting) if kind == setting.measure else kind
    if setting.is_fraction(kind):
        axis = titled(title, tickformat=".2~%", range=accuracy_range(drawn, setting.target))
    else:
        values = [point.value for curve in drawn for point in curve.points]
        axis = titled(title, type="log" if values and min(values) > 0 else "linear")
    return Choice(kind, title, {"yaxis": axis, "shapes": shapes})


def accuracy_range(drawn: Sequence[Curve], target: float | None) -> tuple[float, float]:
    """Where methods differ: every curve's end is in it, but not all of their first steps."""
    ends = [curve.points[-1].value for curve in drawn if curve.points]
    highs = [point.high for curve in drawn for point in curve.points]
    top = max([*highs, target or 0.0], default=1.0)
    low = max(0.0, min([*ends, top - 0.25]) - 0.03)
    return low, min(1.005, top + 0.02 * (top - low) + 0.005)
