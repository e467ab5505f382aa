"""Step times on other links and among more workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.tools.compare.records import Setting
from thinwire.tools.report import numbers
from thinwire.tools.report.forecast import BANDWIDTHS, WORKERS, Forecast, link_of
from thinwire.tools.report.page import layout
from thinwire.tools.report.palette import PAPER, Style
from thinwire.tools.report.plots.common import HOVER, decades, plain, rule, short
from thinwire.tools.report.summary import Summary


def by_bandwidth(
    forecast: Forecast, summaries: Sequence[Summary], setting: Setting, styles: Mapping[str, Style]
) -> dict[str, Any]:
    """Step time against bandwidth, with break-even marked, and the measured steps at the link of the runs."""
    measured = {one.method: one.step_seconds for one in summaries}
    data: list[dict[str, Any]] = []
    for one in forecast.predictions:
        style = styles[one.method]
        data.append(
            _prediction_line(one.method, style, [8 * b for b in BANDWIDTHS], one.by_bandwidth, "rate")
        )
        edge = one.break_even.bandwidth
        if edge is not None and BANDWIDTHS[0] <= edge <= BANDWIDTHS[-1]:
            at = _between(edge, BANDWIDTHS, one.by_bandwidth)
            text = f"faster than {plain(forecast.predictions[0].method)} below {numbers.rate(edge)}"
            data.append(_mark(one.method, style, 8 * edge, at, text, "-open", 14))
        step = measured.get(one.method)
        if setting.bandwidth is not None and step is not None:
            text = f"measured {numbers.seconds(step.mean)}"
            if one.here is not None:
                text += f", predicted {numbers.seconds(one.here)}"
            data.append(_mark(one.method, style, 8 * setting.bandwidth, step.mean, text, "", 10))
    shapes = [] if setting.bandwidth is None else [rule("x", 8 * setting.bandwidth)]
    look = layout(
        xaxis=decades([8 * each for each in BANDWIDTHS], _bits, "bandwidth in bit/s"),
        yaxis=decades(
            [s for one in forecast.predictions for s in one.by_bandwidth], numbers.seconds, "step time"
        ),
        shapes=shapes,
    )
    return {"data": data, "layout": look}


def by_workers(forecast: Forecast, setting: Setting, styles: Mapping[str, Style]) -> dict[str, Any]:
    """Step time against the number of workers, on the link that was there."""
    data = [
        _prediction_line(one.method, styles[one.method], WORKERS, one.by_workers, "workers")
        for one in forecast.predictions
    ]
    look = layout(
        xaxis={
            "type": "log",
            "title": {"text": f"workers, each at {numbers.rate(link_of(setting).bandwidth)}"},
            "tickvals": list(WORKERS),
            "ticktext": [f"{count:,}" for count in WORKERS],
            "tickangle": 0,
        },
        yaxis=decades(
            [s for one in forecast.predictions for s in one.by_workers], numbers.seconds, "step time"
        ),
        shapes=[rule("x", setting.workers)],
    )
    return {"data": data, "layout": look}


def _prediction_line(
    method: str, style: Style, x: Sequence[float], seconds: Sequence[float], kind: str
) -> dict[str, Any]:
    where = [numbers.rate(each / 8) if kind == "rate" else f"{each:,} workers" for each in x]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(method),
        "meta": method,
        "x": list(x),
        "y": [short(each) for each in seconds],
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"color": style.colour, "symbol": style.marker, "size": 5},
        "text": [
            f"{numbers.seconds(s)} at {at}" if kind == "rate" else f"{numbers.seconds(s)}, {at}"
            for s, at in zip(seconds, where, strict=True)
        ],
        "hovertemplate": HOVER,
    }


def _mark(method: str, style: Style, x: float, y: float, text: str, kind: str, size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(method),
        "meta": method,
        "x": [x],
        "y": [y],
        "marker": {
            "symbol": "circle-open" if kind else style.marker,
            "size": size,
            "color": style.colour,
            "line": {"width": 2.5 if kind else 1, "color": style.colour if kind else PAPER},
        },
        "text": [text],
        "hovertemplate": HOVER,
    }


def _bits(value: float) -> str:
    return numbers.scaled(value, ((1e9, "G"), (1e6, "M")))


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """On the line that is drawn between two points of a plot with logarithmic axes."""
    upper = next(number for number, each in enumerate(xs) if each >= x)
    lower = max(0, upper - 1)
    if upper == lower:
        return ys[upper]
    part = math.log(x / xs[lower]) / math.log(xs[upper] / xs[lower])
    return math.exp((1 - part) * math.log(ys[lower]) + part * math.log(ys[upper]))
