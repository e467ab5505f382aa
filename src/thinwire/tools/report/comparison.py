"""The report of a comparison: which parts it has, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.tools.compare.records import Records, Setting, to_line
from thinwire.tools.report import numbers, tables, words
from thinwire.tools.report.curves import POINTS, smoothing
from thinwire.tools.report.forecast import Forecast, forecast, link_of
from thinwire.tools.report.page import Download, Fold, Part, Plot, Section, Text, Tile, Tiles, render
from thinwire.tools.report.palette import Style, styles
from thinwire.tools.report.plots import predictions, rows, tradeoff, training
from thinwire.tools.report.summary import Spread, Summary, duration, speed_up, summarise, traffic, winner

HINT = (
    "A column's head sorts by it. In the plots: hover or tap for values, drag to zoom, double-click to go "
    "back, and press a name below a plot to hide or show it in all of them."
)


def write(records: Records, path: Path, *, predict: bool = True) -> None:
    """Write the report, one HTML file that opens without a network.

    Args:
        predict: with predictions for other links and worker counts. They take some seconds, because the
            methods' own code is run for them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build(records, predict=predict), encoding="utf-8")


def build(records: Records, *, predict: bool = True) -> str:
    """The report as text."""
    summaries = summarise(records)
    predicted = forecast(records, summaries) if predict and summaries else None
    return render(words.heading(records), sections(records, summaries, predicted))


def sections(records: Records, summaries: Sequence[Summary], predicted: Forecast | None) -> list[Section]:
    setting = records.setting
    about = Text(words.setting_sentence(setting))
    if not summaries:
        return [Section("", [Text("There are no runs in the records.", "lead"), about])]
    drawn = styles([one.method for one in summaries])
    first: list[Part] = [
        Text(words.verdict(summaries, setting), "lead"),
        about,
        *_tiles(summaries, setting),
        *tables.failures(summaries),
        tables.summary(summaries, setting, drawn),
        Text(words.table_note(setting), "note"),
        Text(HINT, "hint"),
    ]
    return [
        Section("", first),
        _training(records, drawn),
        _parts_of_a_step(summaries),
        _tradeoff(summaries, setting, drawn),
        *_layers(records, summaries, drawn),
        *([] if predicted is None else _predictions(setting, summaries, predicted, drawn)),
        _interface(summaries),
        _about(records),
    ]


def _tiles(summaries: Sequence[Summary], setting: Setting) -> list[Part]:
    """The winner beside the baseline."""
    best, base = winner(summaries, setting), summaries[0]
    if best is None or best is base:
        return []
    tiles: list[Tile] = []
    gain = speed_up(best, base, setting)
    if gain is not None:
        tiles.append(Tile(best.method, numbers.times(gain), f"as fast as {base.method}"))

    def add(name: str, pick: Callable[[Summary], Spread | None], show: Callable[[float], str]) -> None:
        mine, theirs = pick(best), pick(base)
        if mine is not None:
            other = words.NONE if theirs is None else show(theirs.mean)
            tiles.append(Tile(name, show(mine.mean), f"{base.method}: {other}"))

    goal = "" if setting.target is None else f" to {words.target_text(setting)}"
    add(f"Time{goal}", lambda one: duration(one, setting), numbers.seconds)
    add(f"Sent per worker{goal}", lambda one: traffic(one, setting), numbers.data)
    measure = words.measure_name(setting).capitalize()
    add(measure, lambda one: one.measure, lambda value: words.measure_text(value, setting))
    return [Tiles(tiles)]


def _training(records: Records, drawn: dict[str, Style]) -> Section:
    setting = records.setting
    figure, views = training.curves(records, drawn)
    said = ["Time is training time, tests excepted; bytes are what each worker sent."]
    if setting.target is not None:
        said.append("The dotted line is the target.")
    if setting.seeds > 1:
        said.append("Lines are means over the seeds, shades their range.")
    if smoothing(records) > 1:
        said.append(f"Training loss is the mean of {smoothing(records)} steps.")
    if any(run.failed for run in records.runs):
        said.append("A cross marks where a failed run ended.")
    said.append(f"At most {POINTS} points a line.")
    describes = (
        f"{words.measure_name(setting)} and loss of every method over the run; the table below has them."
    )
    plot = Plot(figure, " ".join(said), describes, 460, legend=drawn, views=views)
    return Section("Training", [plot, Fold("The tests as a table", [tables.tests(records)])])


def _parts_of_a_step(summaries: Sequence[Summary]) -> Section:
    title = "Time of a step"
    ended = sum(one.mean_step is not None for one in summaries)
    if not ended:
        return Section(title, [Text("No run ended: there is nothing to show.")])
    caption = (
        "Means a step. Network is time inside its operations. Compression and network may lie beside the "
        "backward pass, so the bars can be longer than the measured step, which is the black mark."
    )
    describes = "Compute, compression and network time a step, method by method, as in the summary table."
    return Section(title, [Plot(rows.split(summaries), caption, describes, rows.height(ended), rows=True)])


def _tradeoff(summaries: Sequence[Summary], setting: Setting, drawn: dict[str, Style]) -> Section:
    name = words.measure_name(setting).removeprefix("test ")
    title = f"{name.capitalize()} against bytes"
    if not any(one.measure and one.sent for one in summaries):
        return Section(title, [Text("Nobody counted bytes in these runs.")])
    better = "Lower" if setting.measure == "perplexity" else "Higher"
    said = [f"{better} and further left is better."]
    said.append("The grey line joins methods that no other one beats in both.")
    if setting.target is not None:
        said.append("Runs ended where they reached the target (dotted): then bytes say more than the result.")
    if any(one.sent is None for one in summaries):
        said.append("Methods that failed, or whose bytes nobody counted, are not in it.")
    figure = tradeoff.pareto(summaries, setting, drawn)
    shown = {one.method: drawn[one.method] for one in summaries if one.measure and one.sent}
    return Section(
        title, [Plot(figure, " ".join(said), f"{name} of every method by its bytes.", legend=shown)]
    )


def _layers(records: Records, summaries: Sequence[Summary], drawn: dict[str, Style]) -> list[Section]:
    known = [one for one in summaries if one.layers]
    if not known:
        return []
    caption = (
        "What a worker hands over for each parameter and step, frames included, before it is sent around."
    )
    plot = Plot(
        rows.layers(records, known, drawn),
        caption,
        "Payload bytes a step by layer and method; the table below has them.",
        rows.height(len(rows.layer_rows(records.setting, known))),
        rows=True,
        legend={one.method: drawn[one.method] for one in known},
    )
    return [Section("Bytes by layer", [plot, Fold("All layers as a table", [tables.layers(known)])])]


def _predictions(
    setting: Setting, summaries: Sequence[Summary], predicted: Forecast, drawn: dict[str, Style]
) -> list[Section]:
    missing = [Text(f"Not predicted: {method} ({why}).", "note") for method, why in predicted.missing.items()]
    if not predicted.predictions:
        return [Section("On other links", [Text("These methods cannot be predicted."), *missing])]
    shown = {one.method: drawn[one.method] for one in predicted.predictions}
    said = (
        f"Predicted for {setting.workers} workers from operations, bytes and measured times of compute and "
        f"compression. Circles mark where a method breaks even with {predicted.predictions[0].method}: it is "
        "faster to the left."
    )
    if setting.bandwidth is not None:
        said += " The dotted line is the link of these runs, with the measured steps on it."
    bandwidth = Plot(
        predictions.by_bandwidth(predicted, summaries, setting, drawn),
        said,
        "Predicted step time of every method against bandwidth; break-even is in the table below.",
        460,
        legend=shown,
    )
    link = link_of(setting)
    workers = Plot(
        predictions.by_workers(predicted, setting, drawn),
        f"Predicted for a link of {numbers.rate(link.bandwidth)} and {numbers.seconds(link.latency)} a "
        f"message for each worker. The dotted line is the number of workers in these runs.",
        "Predicted step time of every method against the number of workers; the table below has them.",
        460,
        legend=shown,
    )
    by_workers = Fold("As a table", [tables.by_workers(predicted, setting, drawn)])
    return [
        Section("On other links", [bandwidth, tables.break_even(predicted, summaries, drawn), *missing]),
        Section("With more workers", [workers, by_workers]),
    ]


def _interface(summaries: Sequence[Summary]) -> Section:
    title = "Metered bytes against the interface"
    ratios = tables.interface_ratios(summaries)
    if not ratios:
        said = "These runs had no interface of their own to count on; --link lab:RATE gives every worker one."
        return Section(title, [Text(f"{said} Bytes are the meter's.")])
    said = (
        f"The kernel counted {min(ratios.values()):.3f} to {max(ratios.values()):.3f} times as many bytes "
        "on rank 0's interface as the meter did. Headers of TCP and IP and acknowledgements make the "
        "difference; they weigh more the smaller the messages are."
    )
    return Section(title, [Text(said), tables.interface(summaries)])


def _about(records: Records) -> Section:
    setting = records.setting
    lines = [to_line(each) for each in (setting, *records.steps, *records.evaluations, *records.runs)]
    said = f"thinwire {setting.thinwire}; {numbers.seconds(setting.compute)} a step without communication. "
    return Section(
        "About these figures",
        [
            Text("All methods began with the same weights and saw the same batches. They were run by:"),
            Text(setting.command, "code"),
            Text(f"{said}All records are inside this page; thinwire report remakes it.", "note"),
            Download("Save the records (JSON lines)", "records.jsonl", "\n".join(lines) + "\n"),
        ],
    )
