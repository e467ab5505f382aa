"""The result of every method against its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from thinwire.tools import units
from thinwire.tools.compare.records import Setting
from thinwire.tools.report.palette import FAINT, Style
from thinwire.tools.report.plots.common import Figure, Trace, decades, dots, figure, points, rule, titled
from thinwire.tools.report.summary import Spread, Summary
from thinwire.tools.report.words import measure_name, measure_text


def pareto(summaries: Sequence[Summary], setting: Setting, styles: Mapping[str, Style]) -> Figure:
    """The result against the bytes of the whole run; a line joins methods that none beats in both."""
    known = [(one.method, one.sent.mean, one.measure) for one in summaries if one.sent and one.measure]
    places = [(sent, value.mean) for _, sent, value in known]
    front = [places[number] for number in frontier(places, setting)]
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": [sent for sent, _ in front],
        "y": [value for _, value in front],
        "line": {"color": FAINT, "width": 6},
        "opacity": 0.2,
        "hoverinfo": "skip",
    }
    return figure(
        [line, *(_point(method, sent, value, setting, styles[method]) for method, sent, value in known)],
        xaxis=decades([sent for sent, _ in places], units.data, "sent per worker"),
        yaxis=titled(
            measure_name(setting), tickformat=".2~%" if setting.is_fraction(setting.measure) else ""
        ),
        shapes=[] if setting.target is None else [rule("y", setting.target)],
    )


def _point(method: str, sent: float, value: Spread, setting: Setting, style: Style) -> Trace:
    text = f"{measure_text(value.mean, setting)}, {units.data(sent)} sent"
    if setting.seeds > 1:
        low, high = measure_text(value.low, setting), measure_text(value.high, setting)
        text += f"<br>{low} to {high} over the seeds"
    error = {
        "type": "data",
        "symmetric": False,
        "array": [value.high - value.mean],
        "arrayminus": [value.mean - value.low],
        "color": style.colour,
        "thickness": 1.5,
        "width": 4,
        "visible": setting.seeds > 1,
    }
    return points(method, [sent], [value.mean], [text], error_y=error, **dots(style, 13))


def frontier(places: Sequence[tuple[float, float]], setting: Setting) -> list[int]:
    """Which points no other one beats in bytes and result, by bytes."""
    sign = 1 if setting.higher_is_better else -1
    order = sorted(range(len(places)), key=lambda number: (places[number][0], -sign * places[number][1]))
    found: list[int] = []
    best = -math.inf
    for number in order:
        if sign * places[number][1] > best:
            best = sign * places[number][1]
            found.append(number)
    return found
