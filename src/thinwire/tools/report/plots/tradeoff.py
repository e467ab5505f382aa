"""The result of every method against its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.tools.compare.records import Setting
from thinwire.tools.report import numbers
from thinwire.tools.report.page import layout
from thinwire.tools.report.palette import FAINT, PAPER, Style
from thinwire.tools.report.plots.common import HOVER, decades, plain, rule
from thinwire.tools.report.summary import Spread, Summary
from thinwire.tools.report.words import measure_name, measure_text


def pareto(summaries: Sequence[Summary], setting: Setting, styles: Mapping[str, Style]) -> dict[str, Any]:
    """The result against the bytes of the whole run; a line joins methods that none beats in both."""
    known = [(one.method, one.sent.mean, one.measure) for one in summaries if one.sent and one.measure]
    places = [(sent, value.mean) for _, sent, value in known]
    front = [places[number] for number in frontier(places, setting)]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [sent for sent, _ in front],
            "y": [value for _, value in front],
            "line": {"color": FAINT, "width": 6},
            "opacity": 0.2,
            "hoverinfo": "skip",
        }
    ]
    data += [_point(method, sent, value, setting, styles[method]) for method, sent, value in known]
    look = layout(
        xaxis=decades([sent for sent, _ in places], numbers.data, "sent per worker"),
        yaxis={
            "title": {"text": measure_name(setting), "standoff": 8},
            "tickformat": "" if setting.measure == "perplexity" else ".2~%",
        },
        shapes=[] if setting.target is None else [rule("y", setting.target)],
    )
    return {"data": data, "layout": look}


def _point(method: str, sent: float, value: Spread, setting: Setting, style: Style) -> dict[str, Any]:
    text = f"{measure_text(value.mean, setting)}, {numbers.data(sent)} sent"
    if setting.seeds > 1:
        low, high = measure_text(value.low, setting), measure_text(value.high, setting)
        text += f"<br>{low} to {high} over the seeds"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(method),
        "meta": method,
        "x": [sent],
        "y": [value.mean],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [value.high - value.mean],
            "arrayminus": [value.mean - value.low],
            "color": style.colour,
            "thickness": 1.5,
            "width": 4,
            "visible": setting.seeds > 1,
        },
        "marker": {
            "color": style.colour,
            "symbol": style.marker,
            "size": 13,
            "line": {"width": 1, "color": PAPER},
        },
        "text": [text],
        "hovertemplate": HOVER,
    }


def frontier(points: Sequence[tuple[float, float]], setting: Setting) -> list[int]:
    """Which points no other one beats in bytes and result, by bytes."""
    sign = -1 if setting.measure == "perplexity" else 1
    order = sorted(range(len(points)), key=lambda number: (points[number][0], -sign * points[number][1]))
    found: list[int] = []
    best = -math.inf
    for number in order:
        if sign * points[number][1] > best:
            best = sign * points[number][1]
            found.append(number)
    return found
