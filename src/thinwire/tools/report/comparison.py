"""The report of a comparison: what the template `comparison.html.j2` needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.hosts.scripts import ALONE
from thinwire.tools.compare.records import Records, to_lines
from thinwire.tools.report import page, words
from thinwire.tools.report.curves import POINTS, smoothing
from thinwire.tools.report.forecast import WORKERS, Forecast, forecast, link_of
from thinwire.tools.report.palette import styles
from thinwire.tools.report.plots import predictions, rows, tradeoff, training
from thinwire.tools.report.summary import Summary, duration, recovers_too_little, summarise, traffic, winner


def write(records: Records, path: Path, *, predict: bool = True) -> None:
    """Write the report, one HTML file that opens without a network.

    Args:
        predict: with predictions for other links and worker counts. They take some seconds, because they
            run the methods' own code.
    """
    page.save(path, build(records, predict=predict))


def build(records: Records, *, predict: bool = True) -> str:
    """The report as text."""
    summaries = summarise(records)
    return render(records, summaries, forecast(records, summaries) if predict and summaries else None)


def render(records: Records, summaries: Sequence[Summary], predicted: Forecast | None) -> str:
    context: dict[str, Any] = {
        "title": words.heading(records),
        "plots": bool(summaries),
        "records": records,
        "setting": records.setting,
        "summaries": summaries,
        "predicted": predicted,
        "words": words,
        "lines": to_lines(records),
    }
    if summaries:
        context |= _results(records, summaries)
    if predicted is not None and predicted.predictions:
        context |= _predictions(records, summaries, predicted)
    return page.render("comparison.html.j2", **context)


def _results(records: Records, summaries: Sequence[Summary]) -> dict[str, Any]:
    setting, base = records.setting, summaries[0] if records.setting.baseline else None
    drawn = styles([one.method for one in summaries])
    curves, views = training.curves(records, drawn)
    counted = [one for one in summaries if one.measure and one.sent]
    layered = [one for one in summaries if one.layers]

    return {
        "drawn": drawn,
        "base": base,
        "best": winner(summaries, setting),
        "with_control": base is not None and ALONE in records.methods,
        "too_little": recovers_too_little,
        "duration": partial(duration, setting=setting),
        "traffic": partial(traffic, setting=setting),
        "measure": partial(words.measure_text, setting=setting),
        "curves": curves,
        "views": views,
        "points": POINTS,
        "smoothing": smoothing(records) if setting.script is None else 1,
        "step_parts": rows.split(summaries),
        "height": rows.height,
        "counted": counted,
        "tradeoff": tradeoff.pareto(summaries, setting, drawn) if counted else None,
        "layered": layered,
        "layer_names": list(dict.fromkeys(name for one in layered for name in one.layers)),
        "layers": rows.layers(setting, layered, drawn) if layered else None,
        "ratios": interface_ratios(summaries),
    }


def _predictions(records: Records, summaries: Sequence[Summary], predicted: Forecast) -> dict[str, Any]:
    setting = records.setting
    drawn = styles([one.method for one in summaries])
    return {
        "by_bandwidth": predictions.by_bandwidth(predicted, summaries, setting, drawn),
        "by_workers": predictions.by_workers(predicted, setting, drawn),
        "link": link_of(setting),
        "worker_counts": WORKERS,
    }


def interface_ratios(summaries: Sequence[Summary]) -> dict[str, float]:
    """The interface's count over the meter's, where there are both (PyTorch's own methods have no meter)."""
    return {
        one.method: one.interface_sent.mean / one.sent.mean
        for one in summaries
        if one.interface_sent and one.sent and one.payload
    }
