"""Step times on other links and among more workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from thinwire.tools import units
from thinwire.tools.compare.records import Setting
from thinwire.tools.report.forecast import BANDWIDTHS, WORKERS, Forecast, link_of
from thinwire.tools.report.palette import Style
from thinwire.tools.report.plots.common import (
    Figure,
    Trace,
    decades,
    dots,
    drawn_line,
    figure,
    plain,
    points,
    rule,
    short,
    titled,
)
from thinwire.tools.report.summary import Summary

BITS = [8 * each for each in BANDWIDTHS]


def by_bandwidth(
    forecast: Forecast, summaries: Sequence[Summary], setting: Setting, styles: Mapping[str, Style]
) -> Figure:
    """Step time against bandwidth, with break-even marked, and the measured steps at the link of the runs."""
    measured = {one.method: one.step_seconds for one in summaries}
    baseline = plain(forecast.predictions[0].method)
    data: list[Trace] = []
    for one in forecast.predictions:
        style = styles[one.method]
        seconds = one.by_bandwidth
        texts = [f"{units.seconds(s)} at {units.rate(b)}" for s, b in zip(seconds, BANDWIDTHS, strict=True)]
        data.append(points(one.method, BITS, [short(s) for s in seconds], texts, **drawn_line(style, 5)))
        edge = one.break_even.bandwidth
        if edge is not None and BANDWIDTHS[0] <= edge <= BANDWIDTHS[-1]:
            at = _between(edge, BANDWIDTHS, seconds)
            text = f"faster than {baseline} below {units.rate(edge)}"
            ring = dots(style, 14, symbol="circle-open", line={"width": 2.5, "color": style.colour})
            data.append(points(one.method, [8 * edge], [at], [text], **ring))
        step = measured.get(one.method)
        if setting.bandwidth is not None and step is not None:
            text = f"measured {units.seconds(step.mean)}"
            if one.here is not None:
                text += f", predicted {units.seconds(one.here)}"
            data.append(points(one.method, [8 * setting.bandwidth], [step.mean], [text], **dots(style, 10)))
    times = [s for one in forecast.predictions for s in one.by_bandwidth]
    return figure(
        data,
        xaxis=decades(BITS, _bits, "bandwidth in bit/s"),
        yaxis=decades(times, units.seconds, "step time"),
        shapes=[] if setting.bandwidth is None else [rule("x", 8 * setting.bandwidth)],
    )


def by_workers(forecast: Forecast, setting: Setting, styles: Mapping[str, Style]) -> Figure:
    """Step time against the number of workers, on the link of the runs."""
    data: list[Trace] = []
    for one in forecast.predictions:
        texts = [f"{units.seconds(s)}, {n:,} workers" for s, n in zip(one.by_workers, WORKERS, strict=True)]
        times = [short(s) for s in one.by_workers]
        data.append(points(one.method, WORKERS, times, texts, **drawn_line(styles[one.method], 5)))
    title = f"workers, each at {units.rate(link_of(setting).bandwidth)}"
    labels = [f"{count:,}" for count in WORKERS]
    times = [s for one in forecast.predictions for s in one.by_workers]
    return figure(
        data,
        xaxis=titled(title, type="log", tickvals=list(WORKERS), ticktext=labels, tickangle=0),
        yaxis=decades(times, units.seconds, "step time"),
        shapes=[rule("x", setting.workers)],
    )


def _bits(value: float) -> str:
    return units.scaled(value, ((1e9, "G"), (1e6, "M")))


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """On the line that is drawn between two points of a plot with logarithmic axes."""
    upper = next(number for number, each in enumerate(xs) if each >= x)
    lower = max(0, upper - 1)
    if upper == lower:
        return ys[upper]
    part = math.log(x / xs[lower]) / math.log(xs[upper] / xs[lower])
    return math.exp((1 - part) * math.log(ys[lower]) + part * math.log(ys[upper]))
