"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report import numbers
from thinwire.tools.report.forecast import WORKERS, Forecast, Prediction, link_of
from thinwire.tools.report.page import Cell, Table
from thinwire.tools.report.palette import Style
from thinwire.tools.report.summary import Spread, Summary, speed_up, winner
from thinwire.tools.report.words import NONE, measure_name, measure_text, target_text

Row = list[Cell | str]
NOTHING = Cell(NONE, "")


def summary(summaries: Sequence[Summary], setting: Setting, drawn: dict[str, Style]) -> Table:
    """Everything about each method in one row."""
    base, best = summaries[0], winner(summaries, setting)
    header = ["method", measure_name(setting).removeprefix("test ")]
    if setting.target is not None:
        header += [f"{what} to {target_text(setting)}" for what in ("steps", "time", "sent")]
    header += [f"speed-up over {base.method}", "median step"]
    if setting.target is None:
        header.append("whole run")
    header += ["sent per worker", "received per worker", "rounds a step", "compute", "compress", "network"]
    rows = [_summary_row(one, base, one is best, setting, drawn) for one in summaries]
    return Table("Summary", header, rows)


def _summary_row(one: Summary, base: Summary, best: bool, setting: Setting, drawn: dict[str, Style]) -> Row:
    def show(value: Spread | None, write: Callable[[float], str]) -> Cell:
        return _spread(value, write, several=setting.seeds > 1)

    row: Row = [_name(one, drawn), show(one.measure, lambda value: measure_text(value, setting))]
    if setting.target is not None:
        row += [show(one.target_step, numbers.whole), _reached(one, setting, best)]
        row.append(show(one.target_sent, numbers.data))
    gain = speed_up(one, base, setting)
    row.append(NOTHING if gain is None else Cell(numbers.times(gain), gain, strong=best))
    row.append(show(one.step_seconds, numbers.seconds))
    if setting.target is None:
        row.append(show(one.seconds, numbers.seconds))
    row += [show(one.sent, numbers.data), show(one.received, numbers.data), show(one.rounds, numbers.digits)]
    parts = (one.compute_seconds, one.compress_seconds, one.wait_seconds)
    return [*row, *(show(part, numbers.seconds) for part in parts)]


def _spread(
    value: Spread | None, write: Callable[[float], str], *, several: bool, strong: bool = False
) -> Cell:
    """The mean, and the range below it."""
    if value is None:
        return NOTHING
    low, high = write(value.low), write(value.high)
    number, _, unit = low.partition(numbers.SPACE)
    note = f"{number if high.endswith(unit) else low} – {high}" if several and low != high else ""
    return Cell(write(value.mean), value.mean, note=note, strong=strong)


def _name(one: Summary, drawn: dict[str, Style]) -> Cell:
    failed = "" if not one.failures else f"{len(one.failures)} of {one.seeds} runs failed"
    return Cell(one.method, one.method, drawn[one.method], note=failed, bad=bool(failed))


def _reached(one: Summary, setting: Setting, best: bool) -> Cell:
    if one.target_seconds is not None or not one.ended:
        return _spread(one.target_seconds, numbers.seconds, several=setting.seeds > 1, strong=best)
    return Cell(f"by {one.reached} of {one.seeds} seeds" if one.reached else "not reached", "")


def failures(summaries: Sequence[Summary]) -> list[Table]:
    """What failed and why; no table if nothing did."""
    rows: list[Row] = [
        [one.method, str(run.seed), str(run.steps), Cell(run.failed or "", bad=True)]
        for one in summaries
        for run in one.failures
    ]
    header = ("method", "seed", "steps done", "why")
    return [Table("Runs that failed", header, rows, numbers=False)] if rows else []


def tests(records: Records) -> Table:
    rows: list[Row] = [
        [
            each.method,
            str(each.seed),
            str(each.step),
            Cell(numbers.seconds(each.seconds), each.seconds),
            Cell(numbers.data(each.sent), each.sent) if each.sent else NOTHING,
            Cell(numbers.digits(each.loss), each.loss),
            Cell(numbers.percent(each.accuracy), each.accuracy),
            Cell(numbers.digits(each.perplexity) if each.perplexity < 1e6 else "over 10⁶", each.perplexity),
        ]
        for each in records.evaluations
    ]
    header = ("method", "seed", "step", "time", "sent", "loss", "accuracy", "perplexity")
    return Table("All tests", header, rows)


def layers(summaries: Sequence[Summary]) -> Table:
    names = list(dict.fromkeys(name for one in summaries for name in one.layers))
    rows: list[Row] = []
    for name in names:
        values = [one.layers.get(name, 0.0) for one in summaries]
        rows.append([name, *(Cell(numbers.data(value), value) for value in values)])
    return Table("Payload a step", ["parameter", *(one.method for one in summaries)], rows)


def break_even(predicted: Forecast, summaries: Sequence[Summary], drawn: dict[str, Style]) -> Table:
    """Below which bandwidth each method wins, and how near the predicted step is to the measured one."""
    measured = {one.method: one.step_seconds for one in summaries}
    base = predicted.predictions[0].method
    rows: list[Row] = []
    for one in predicted.predictions:
        step, here = measured[one.method], one.here
        row: Row = [Cell(one.method, one.method, drawn[one.method]), _edge(one, base)]
        if here is not None:
            row.append(Cell(numbers.seconds(here), here))
            row.append(NOTHING if step is None else Cell(numbers.seconds(step.mean), step.mean))
            row.append(NOTHING if step is None else _ratio(here / step.mean))
        rows.append(row)
    on_a_link = predicted.predictions[0].here is not None
    parts = ("step predicted here", "step measured", "predicted / measured") if on_a_link else ()
    return Table("Break-even bandwidth", ("method", f"faster than {base} below", *parts), rows)


def _ratio(value: float) -> Cell:
    return Cell(f"{value:.3f}", value)


def _edge(one: Prediction, base: str) -> Cell:
    if one.method == base:
        return NOTHING
    edge = one.break_even.bandwidth
    if edge is not None:
        return Cell(numbers.rate(edge), 8 * edge)
    verdict = one.break_even.verdict
    return Cell("any bandwidth" if verdict == "always" else "never", verdict)


def by_workers(predicted: Forecast, setting: Setting, drawn: dict[str, Style]) -> Table:
    rows: list[Row] = [
        [
            Cell(one.method, one.method, drawn[one.method]),
            *(Cell(numbers.seconds(s), s) for s in one.by_workers),
        ]
        for one in predicted.predictions
    ]
    title = f"Predicted step time by workers, at {numbers.rate(link_of(setting).bandwidth)}"
    return Table(title, ["method", *(f"{count:,}" for count in WORKERS)], rows)


def interface_ratios(summaries: Sequence[Summary]) -> dict[str, float]:
    """The interface's count over the meter's, where there are both (PyTorch's own methods have no meter)."""
    return {
        one.method: one.interface_sent.mean / one.sent.mean
        for one in summaries
        if one.interface_sent and one.sent and one.payload
    }


def interface(summaries: Sequence[Summary]) -> Table:
    ratios = interface_ratios(summaries)
    rows: list[Row] = []
    for one in summaries:
        if one.method in ratios and one.sent and one.interface_sent:
            counts = (one.sent.mean, one.interface_sent.mean)
            cells = (Cell(numbers.whole(count), count) for count in counts)
            rows.append([one.method, *cells, _ratio(ratios[one.method])])
    header = ("method", "metered bytes", "interface's bytes", "ratio")
    return Table("Sent in the whole run", header, rows)
