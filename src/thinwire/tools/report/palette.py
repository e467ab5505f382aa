"""Colours, dashes and markers that people tell apart, whatever colours they see, and in grey print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BASELINE = "#1a1a1a"
"""Of the method that the others are compared with."""

COLOURS = ("#1f6fd0", "#e8590c", "#009e73", "#cc6aa3", "#882255", "#332288")
"""At least 3:1 on white, and far apart for all common kinds of colour vision: a test holds them to it."""

DASHES = ("6px,3px", "2px,3px", "9px,3px,2px,3px", "14px,4px", "9px,3px,2px,3px,2px,3px")
MARKERS = ("circle", "square", "diamond", "triangle-up", "star", "triangle-down", "triangle-left", "cross")

COMPUTE, COMPRESS, NETWORK = "#5b7083", "#e8a33d", "#1f6fd0"
"""Parts of a step; they also differ in their pattern."""

INK, FAINT, GRID, PAPER = "#1a1a1a", "#555b61", "#dfe3e6", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

_AXIS = {
    "gridcolor": GRID,
    "showline": True,
    "linecolor": FAINT,
    "zeroline": False,
    "ticks": "outside",
    "tickcolor": GRID,
    "automargin": True,
    "title": {"standoff": 8},
}
LOOK: dict[str, Any] = {
    "layout": {
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": FAINT, "font": {"color": INK}, "align": "left"},
        "colorway": [BASELINE, *COLOURS],
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
}
"""The template (in Plotly's sense) of all plots."""


@dataclass(frozen=True)
class Style:
    """How one method is drawn in every plot."""

    colour: str
    dash: str
    marker: str
    width: float = 2.0

    @property
    def dasharray(self) -> str:
        """The dash for SVG."""
        return "none" if self.dash == "solid" else self.dash.replace("px", "")

    def outline(self, x: float, y: float, r: float) -> str:
        """The marker around a point, as an SVG path."""
        if self.marker == "circle":
            return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
        return "M" + "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in _OUTLINES[self.marker]) + "Z"


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """One style per method; 30 pairs of colour and dash before one repeats. Only the first is solid."""
    found: dict[str, Style] = {}
    for number, method in enumerate(methods):
        if number == 0:
            found[method] = Style(BASELINE, "solid", MARKERS[0], 2.5)
            continue
        round_, colour = divmod(number - 1, len(COLOURS))
        dash = (number - 1 + round_) % len(DASHES)
        found[method] = Style(COLOURS[colour], DASHES[dash], MARKERS[number % len(MARKERS)])
    return found


def _corners(count: int, turn: float = 0.0, radii: Sequence[float] = (1.2,)) -> list[tuple[float, float]]:
    """Of a regular polygon; a star has two radii that take turns."""
    angles = [2 * math.pi * (number + turn) / count for number in range(count)]
    sizes = [radii[number % len(radii)] for number in range(count)]
    return [(r * math.sin(a), -r * math.cos(a)) for a, r in zip(angles, sizes, strict=True)]


_QUARTER = ((-0.4, -1.0), (0.4, -1.0), (0.4, -0.4))
_OUTLINES = {
    "square": _corners(4, 0.5),
    "diamond": _corners(4),
    "triangle-up": _corners(3),
    "triangle-down": _corners(3, 0.5),
    "triangle-left": _corners(3, 2.25),
    "star": _corners(10, radii=(1.25, 0.5)),
    "cross": [
        (x * c - y * s, x * s + y * c) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1)) for x, y in _QUARTER
    ],
}
