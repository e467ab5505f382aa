"""Line plots, and a page of figures under headings: one HTML file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.tools.report import page
from thinwire.tools.report.palette import styles
from thinwire.tools.report.plots.common import Figure, Trace, drawn_line, figure, rule, titled

Curve = tuple[Sequence[float], Sequence[float]]
LOGARITHMIC = {"type": "log", "exponentformat": "power"}


def lines(
    curves: Mapping[str, Curve],
    x: str,
    y: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
    only_markers: bool = False,
    verticals: Mapping[str, float] | None = None,
    horizontals: Mapping[str, float] | None = None,
) -> Figure:
    """A Plotly figure with one line per named curve; colours, dashes and markers tell them apart.

    Args:
        verticals: dotted lines at these places, with their names; `horizontals` likewise.
    """
    drawn = styles(list(curves))
    mode = "markers" if only_markers else "lines+markers" if markers else "lines"
    data: list[Trace] = []
    for name, (xs, ys) in curves.items():
        look = {**drawn_line(drawn[name], 7), "mode": mode}
        data.append({"type": "scatter", "name": name, "x": list(xs), "y": list(ys), **look})
    marks = [("x", *each, log_x) for each in (verticals or {}).items()]
    marks += [("y", *each, log_y) for each in (horizontals or {}).items()]
    return figure(
        data,
        showlegend=True,
        xaxis=titled(x, **(LOGARITHMIC if log_x else {})),
        yaxis=titled(y, **(LOGARITHMIC if log_y else {})),
        shapes=[rule(axis, at) for axis, _, at, _ in marks],
        annotations=[_label(*mark) for mark in marks],
    )


def _label(axis: str, name: str, at: float, logarithmic: bool) -> dict[str, Any]:
    """The name at the end of a dotted line."""
    look: dict[str, Any] = {"text": name, "showarrow": False}
    # On a logarithmic axis Plotly places annotations by the exponent, unlike everything else.
    place = math.log10(at) if logarithmic else at
    if axis == "x":
        look |= {"textangle": -90, "xanchor": "left", "yanchor": "top"}
        return {**look, "x": place, "y": 1, "yref": "paper"}
    look |= {"xanchor": "right", "yanchor": "bottom"}
    return {**look, "y": place, "x": 1, "xref": "paper"}


def write_figures(path: Path, title: str, figures: Mapping[str, Figure], **more: Any) -> None:
    """Write the page. `more`: `claims` and `tables` (with title, header and rows) and `notes`."""
    context = {"claims": (), "tables": (), "notes": (), **more}
    context |= {"title": title, "figures": figures, "plots": bool(figures)}
    page.save(path, page.render("figures.html.j2", **context))
