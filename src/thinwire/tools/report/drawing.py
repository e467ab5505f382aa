"""What pictures in SVG are made of: scales with ticks, text, lines and markers."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.tools.report.page import FONT, shape
from thinwire.tools.report.palette import GRID, INK, Style


@dataclass(frozen=True)
class Scale:
    """From a value to a place on the card; `places` are two, for the first and the last value."""

    first: float
    last: float
    places: tuple[float, float]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        first, last = self.first, self.last
        if self.logarithmic:
            value, first, last = math.log(value), math.log(first), math.log(last)
        part = (value - first) / (last - first)
        return self.places[0] + part * (self.places[1] - self.places[0])

    def ticks(self) -> list[float]:
        return decades(self.first, self.last) if self.logarithmic else even(self.first, self.last)


def card(width: int, height: int, title: str, description: str, body: Sequence[str]) -> str:
    """A whole picture on a white card."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
        f'font-family="{html.escape(FONT)}" role="img"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(description)}</desc>"
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="#fff" '
        f'stroke="{GRID}"/>{"".join(body)}</svg>\n'
    )


def line(places: Sequence[tuple[float, float]], style: Style) -> str:
    """A line through these places."""
    way = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    look = f'fill="none" stroke="{style.colour}" stroke-width="2.2" stroke-linejoin="round"{dashes(style)}'
    return f'<path d="{way}" {look}/>'


def marker(place: tuple[float, float], style: Style, size: float) -> str:
    return f'<path d="{shape(style.marker, *place, size)}" fill="{style.colour}" stroke="#fff"/>'


def key(x: float, y: float, style: Style, *, lined: bool = True) -> str:
    """A piece of line with its marker, for a legend; the marker alone, where there are no lines."""
    stroke = f'<path d="M{x} {y}h34" stroke="{style.colour}" stroke-width="2.2"{dashes(style)}/>'
    return (stroke if lined else "") + marker((x + 17, y), style, 5)


def dashes(style: Style) -> str:
    return "" if style.dash == "solid" else f' stroke-dasharray="{style.dash.replace("px", "")}"'


def text(
    x: float, y: float, words: str, *, size: int, anchor: str = "start", weight: int = 400, fill: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{html.escape(words)}</text>'
    )


def decades(first: float, last: float) -> list[float]:
    """1, 2, 5, 10, 20 ... in between; fewer of each decade where there are many decades."""
    many = math.log10(last / first) > 3
    found = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        for factor in ((1,) if many else (1, 2, 5))
    ]
    return [value for value in found if first <= value <= last]


def even(first: float, last: float) -> list[float]:
    """About six round values in between."""
    rough = (last - first) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [
        round(number * step, 10) for number in range(math.ceil(first / step), math.floor(last / step) + 1)
    ]
