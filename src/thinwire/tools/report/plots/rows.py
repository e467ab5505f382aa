"""Plots with one row per name, from top to bottom: the parts of a step, and the bytes of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.tools import units
from thinwire.tools.compare.records import Setting
from thinwire.tools.report.palette import COMPRESS, COMPUTE, GRID, INK, NETWORK, PAPER, Style
from thinwire.tools.report.plots.common import (
    Figure,
    Trace,
    decades,
    dots,
    figure,
    plain,
    points,
    rule,
    titled,
)
from thinwire.tools.report.summary import Summary

LAYERS = 16
"""How many layers get a row, the largest ones."""

PARTS = (
    ("compute", "compute_seconds", COMPUTE, ""),
    ("compression", "compress_seconds", COMPRESS, "/"),
    ("network", "wait_seconds", NETWORK, "x"),
)


def height(figure: Figure) -> int:
    return 90 + 48 * len(figure["layout"]["annotations"])


def _rows(data: Sequence[Trace], names: Sequence[str], **layout: Any) -> Figure:
    """The names stand above the rows, so that a phone has room for the bars."""
    label = {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "yshift": 18,
        "yanchor": "middle",
        "showarrow": False,
        "font": {"size": 12, "color": INK},
        "align": "left",
    }
    annotations = [{**label, "text": plain(name), "y": number} for number, name in enumerate(names)]
    yaxis = {"range": [len(names) - 0.4, -0.75], "showticklabels": False, "ticks": "", "showgrid": False}
    return figure(data, yaxis={**yaxis, "fixedrange": True}, annotations=annotations, **layout)


def split(summaries: Sequence[Summary]) -> Figure | None:
    """Compute, compression and network per step as bars that overlap; the measured step as a mark."""
    known = [(one, one.mean_step) for one in summaries if one.mean_step is not None]
    if not known:
        return None

    def bars(kind: str, name: str, values: Sequence[float], **look: Any) -> Trace:
        texts = [
            f"<b>{plain(one.method)}</b><br>{name} {units.seconds(value)}"
            for (one, _), value in zip(known, values, strict=True)
        ]
        place = {"x": [1e3 * value for value in values], "y": list(range(len(known)))}
        hover = {"text": texts, "hovertemplate": "%{text}<extra></extra>"}
        return {"type": kind, "name": name, **place, **hover, **look}

    data: list[Trace] = []
    for name, field, colour, shape in PARTS:
        pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": PAPER, "size": 8, "solidity": 0.2}
        look = {"orientation": "h", "width": 0.36, "textposition": "none"}
        values = [getattr(one, field).mean for one, _ in known]
        data.append(bars("bar", name, values, marker={"color": colour, "pattern": pattern}, **look))
    mark = {"symbol": "line-ns", "size": 13, "line": {"width": 3, "color": INK}, "color": INK}
    data.append(bars("scatter", "measured step", [step for _, step in known], mode="markers", marker=mark))
    return _rows(
        data,
        [one.method for one, _ in known],
        barmode="stack",
        xaxis=titled("ms per step", rangemode="tozero"),
        showlegend=True,
        legend={"y": 1.0, "itemclick": False, "itemdoubleclick": False},
        margin={"l": 8, "r": 16, "t": 40, "b": 8},
    )


def layer_rows(setting: Setting, summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Labels, and the parameters that each row adds up: the largest ones alone, the rest together."""
    known = {name for one in summaries for name in one.layers}
    names = [name for name in dict.fromkeys([*setting.layers, *sorted(known)]) if name in known]

    def size(name: str) -> int:
        return math.prod(setting.layers.get(name, ()))

    def label(name: str) -> str:
        shape = setting.layers.get(name)
        return name if shape is None else f"{name}  ({' × '.join(map(str, shape))})"

    if len(names) <= LAYERS:
        return [(label(name), [name]) for name in names]
    large = set(sorted(names, key=lambda name: -size(name))[: LAYERS - 1])
    rest = [name for name in names if name not in large]
    return [*((label(n), [n]) for n in names if n in large), (f"the other {len(rest)} together", rest)]


def layers(setting: Setting, summaries: Sequence[Summary], styles: Mapping[str, Style]) -> Figure:
    """Payload per step: one row per layer, one marker per method."""
    rows = layer_rows(setting, summaries)
    data: list[Trace] = []
    for one in summaries:
        values = [sum(one.layers.get(name, 0.0) for name in names) for _, names in rows]
        texts = [
            f"{plain(label)}<br>{units.data(value)} per step"
            for (label, _), value in zip(rows, values, strict=True)
        ]
        places = [value or None for value in values]
        data.append(points(one.method, places, range(len(rows)), texts, **dots(styles[one.method], 10)))
    everything = [value for trace in data for value in trace["x"] if value]
    return _rows(
        data,
        [label for label, _ in rows],
        xaxis=decades(everything, units.data, "payload per step"),
        shapes=[rule("y", number, width=1, dash="solid", color=GRID) for number in range(len(rows))],
    )
