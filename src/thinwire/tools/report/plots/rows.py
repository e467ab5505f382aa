"""Plots with one row for each name, from top to bottom: the parts of a step, and the bytes of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report import numbers
from thinwire.tools.report.page import layout
from thinwire.tools.report.palette import COMPRESS, COMPUTE, GRID, INK, NETWORK, PAPER, Style
from thinwire.tools.report.plots.common import HOVER, decades, plain, rule
from thinwire.tools.report.summary import Summary

LAYERS = 16
"""So many layers are shown one by one, the largest."""


PARTS = (
    ("compute", "compute_seconds", COMPUTE, ""),
    ("compression", "compress_seconds", COMPRESS, "/"),
    ("network", "wait_seconds", NETWORK, "x"),
)


def height(count: int) -> int:
    return 90 + 48 * count


def _rows(names: Sequence[str], **changes: Any) -> dict[str, Any]:
    """Rows from top to bottom; their names stand above them, so that a phone has room for the bars."""
    annotations = [
        {
            "text": plain(name),
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": number,
            "yshift": 18,
            "yanchor": "middle",
            "showarrow": False,
            "font": {"size": 12, "color": INK},
            "align": "left",
        }
        for number, name in enumerate(names)
    ]
    yaxis = {"range": [len(names) - 0.4, -0.75], "showticklabels": False, "ticks": "", "showgrid": False}
    return layout(yaxis={**yaxis, "fixedrange": True}, annotations=annotations, **changes)


def split(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Compute, compression and network a step as bars; the measured step as a mark, for they overlap."""
    rows = [one for one in summaries if one.mean_step is not None]
    steps = [one.mean_step for one in rows if one.mean_step is not None]
    data: list[dict[str, Any]] = []
    for name, field, colour, pattern in PARTS:
        values = [getattr(one, field).mean for one in rows]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": [1e3 * value for value in values],
                "y": list(range(len(rows))),
                "width": 0.36,
                "marker": {
                    "color": colour,
                    "pattern": {
                        "shape": pattern,
                        "fillmode": "overlay",
                        "fgcolor": PAPER,
                        "size": 8,
                        "solidity": 0.2,
                    },
                },
                "text": [
                    f"<b>{plain(one.method)}</b><br>{name} {numbers.seconds(v)}"
                    for one, v in zip(rows, values, strict=True)
                ],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured step",
            "x": [1e3 * step for step in steps],
            "y": list(range(len(rows))),
            "marker": {"symbol": "line-ns", "size": 13, "line": {"width": 3, "color": INK}, "color": INK},
            "text": [
                f"<b>{plain(one.method)}</b><br>measured step {numbers.seconds(step)}"
                for one, step in zip(rows, steps, strict=True)
            ],
            "hovertemplate": "%{text}<extra></extra>",
        }
    )
    look = _rows(
        [one.method for one in rows],
        barmode="stack",
        xaxis={"title": {"text": "ms a step", "standoff": 8}, "rangemode": "tozero"},
        showlegend=True,
        legend={
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0,
            "itemclick": False,
            "itemdoubleclick": False,
        },
    )
    look["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    return {"data": data, "layout": look}


def layer_rows(setting: Setting, summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """Labels, and the parameters that each row adds up: the largest ones alone, the rest together."""
    sizes = {name: math.prod(shape) for name, shape in setting.layers}
    known = [name for one in summaries for name in one.layers]
    names = [name for name in dict.fromkeys([*sizes, *known]) if name in set(known)]
    if len(names) <= LAYERS:
        return [(_layer_label(name, setting), [name]) for name in names]
    large = set(sorted(names, key=lambda name: -sizes.get(name, 0))[: LAYERS - 1])
    rest = [name for name in names if name not in large]
    shown = [(_layer_label(name, setting), [name]) for name in names if name in large]
    return [*shown, (f"the other {len(rest)} together", rest)]


def _layer_label(name: str, setting: Setting) -> str:
    shape = dict(setting.layers).get(name)
    return name if shape is None else f"{name}  ({' × '.join(map(str, shape))})"


def layers(records: Records, summaries: Sequence[Summary], styles: Mapping[str, Style]) -> dict[str, Any]:
    """Payload a step by layer: one row a layer, one marker a method."""
    rows = layer_rows(records.setting, summaries)
    data: list[dict[str, Any]] = []
    for one in summaries:
        if not one.layers:
            continue
        style = styles[one.method]
        values = [sum(one.layers.get(name, 0.0) for name in names) for _, names in rows]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(one.method),
                "meta": one.method,
                "x": [value or None for value in values],
                "y": list(range(len(rows))),
                "marker": {
                    "color": style.colour,
                    "symbol": style.marker,
                    "size": 10,
                    "line": {"width": 1, "color": PAPER},
                },
                "text": [
                    f"{plain(label)}<br>{numbers.data(value)} a step"
                    for (label, _), value in zip(rows, values, strict=True)
                ],
                "hovertemplate": HOVER,
            }
        )
    everything = [value for trace in data for value in trace["x"] if value]
    look = _rows([label for label, _ in rows], xaxis=decades(everything, numbers.data, "payload a step"))
    look["shapes"] = [rule("y", number, width=1, dash="solid", color=GRID) for number in range(len(rows))]
    return {"data": data, "layout": look}
