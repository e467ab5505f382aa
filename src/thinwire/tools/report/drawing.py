"""Line charts as SVG, for pages without scripts: a white card with axes, lines and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinwire.tools.report import page
from thinwire.tools.report.palette import Style


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


class Series(NamedTuple):
    """One line. Markers stand at all places or at the last one; a cross marks where a failed run ended."""

    places: Sequence[tuple[float, float]]
    style: Style
    lined: bool = True
    marks: Literal["all", "last", "cross"] = "last"


class Entry(NamedTuple):
    """One line of the legend; `value` and `note` are flush right at the edge of the card."""

    x: float
    y: float
    name: str
    style: Style
    lined: bool = True
    value: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A whole picture. `box` is left, top, right and bottom of the plot."""

    width: int
    height: int
    title: str
    subtitle: str
    description: str
    box: tuple[int, int, int, int]
    x: Scale
    y: Scale
    x_title: str
    y_title: str
    series: Sequence[Series]
    legend: Sequence[Entry]
    legend_title: str = ""
    target: float | None = None
    y_label: Callable[[float], str] = "{:g}".format

    def svg(self) -> str:
        return page.render("chart.svg.j2", chart=self)


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
