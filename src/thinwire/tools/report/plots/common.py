"""What the plots share.

Plots are dictionaries, as Plotly takes them. Text from records goes through `plain`, because Plotly reads
some HTML in it. Every trace has the method as its `meta`: by that the legend shows and hides it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.tools import units
from thinwire.tools.report.palette import FAINT, LOOK, PAPER, Style

Trace = dict[str, Any]
Figure = dict[str, Any]

HOVER = "<b>%{fullData.name}</b><br>%{text}<extra></extra>"


def figure(data: Sequence[Trace], **layout: Any) -> Figure:
    """A plot without a legend of its own: the page has one for all plots."""
    return {"data": list(data), "layout": {"template": LOOK, "showlegend": False, **layout}}


def points(method: str, x: Sequence[Any], y: Sequence[Any], text: Sequence[str], **look: Any) -> Trace:
    """A method's points; `text` appears under the mouse. Looks are `drawn_line` or `dots`."""
    common = {"type": "scatter", "name": plain(method), "meta": method, "hovertemplate": HOVER}
    return {**common, "x": list(x), "y": list(y), "text": list(text), **look}


def drawn_line(style: Style, size: int, **marker: Any) -> Trace:
    return {
        "mode": "lines+markers",
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"color": style.colour, "symbol": style.marker, "size": size, **marker},
    }


def dots(style: Style, size: int, **marker: Any) -> Trace:
    """Markers with an edge, so that they do not merge."""
    edge = {"width": 1, "color": PAPER}
    look = {"color": style.colour, "symbol": style.marker, "size": size, "line": edge, **marker}
    return {"mode": "markers", "marker": look}


def plain(text: str) -> str:
    return html.escape(text)


def short(value: float) -> float:
    """Six digits are plenty on a screen, and keep the page small."""
    return float(f"{value:.6g}")


def rule(axis: str, value: float, **line: Any) -> dict[str, Any]:
    """A dotted line across the plot."""
    other = "x" if axis == "y" else "y"
    return {
        "type": "line",
        "layer": "below",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": FAINT, "width": 1.5, "dash": "2px,3px", **line},
    }


def titled(text: str, **axis: Any) -> dict[str, Any]:
    return {"title": {"text": text}, **axis}


def decades(values: Sequence[float], write: Callable[[float], str], title: str) -> dict[str, Any]:
    """A logarithmic axis with round numbers in words; more of them where there are few decades."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    factors = (1, 2, 5) if high / low < 5 else (1, 3) if high / low < 50 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    labels = [units.rounded(write(tick)) for tick in ticks]
    return titled(title, type="log", tickvals=ticks, ticktext=labels, tickangle=0)
