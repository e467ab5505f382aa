"""Plots of reproductions, all drawn alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Curve = tuple[Sequence[float], Sequence[float]]


def lines(
    curves: Mapping[str, Curve],
    x: str,
    y: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
    only_markers: bool = False,
) -> Any:
    """A Plotly figure with one line for each named curve; colours, dashes and markers tell them apart."""
    import plotly.graph_objects as go

    from thinwire.tools.report.palette import styles

    figure = go.Figure()
    drawn = styles(list(curves))
    for name, (xs, ys) in curves.items():
        style = drawn[name]
        figure.add_trace(
            go.Scatter(
                x=list(xs),
                y=list(ys),
                name=name,
                mode="markers" if only_markers else "lines+markers" if markers else "lines",
                line={"color": style.colour, "dash": style.dash, "width": style.width},
                marker={"symbol": style.marker, "size": 7},
            )
        )
    figure.update_xaxes(title=x, type="log" if log_x else "linear")
    figure.update_yaxes(title=y, type="log" if log_y else "linear")
    figure.update_layout(template="plotly_white", legend={"orientation": "h", "y": -0.2}, margin={"t": 30})
    return figure
