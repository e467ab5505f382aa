"""What the language-model study came to, for others: a table in the package, a picture and a page section."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.language import METHODS, SIZES, Row, Study, summary
from benchmarks.language_runs import ALONE, Run, Setting, keeps_the_momentum
from benchmarks.language_times import LINKS, by_link
from thinwire.errors import ConfigError
from thinwire.predict.recommend import duration, seconds_of
from thinwire.tools.cli.show import console, errors
from thinwire.tools.report.figure_picture import svg
from thinwire.tools.report.figures import lines
from thinwire.tools.report.page import save

TABLE, PICTURE, PAGE = "src/thinwire/predict/language.json", "docs/language.svg", "docs/choosing.md"
BEGIN = "<!-- made by `python -m benchmarks language-page`; do not edit -->"
END = "<!-- end of what language-page makes -->"
CONTROLS = ("dense", ALONE)
BARS = {
    "no worse than `dense`": 0.0,
    "at most 0.03 nats behind `dense`": 0.03,
    "at most 0.08 nats behind `dense`": 0.08,
}


def command(
    records: Annotated[
        list[Path],
        typer.Argument(help="Files of `language --json`; those of one setting make one table."),
    ],
    step_time: Annotated[
        str, typer.Option(help="Computation of a step, such as 170ms; none: as recorded.")
    ] = "",
    root: Annotated[Path, typer.Option(help="The folder of the repository.")] = Path(),
) -> None:
    """Write the table of `plan` and `auto`, the picture and the section of docs/choosing.md from a study."""
    with errors():
        studies = [read(path) for path in records]
        page = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).is_file() else ""
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            raise ConfigError(f"{root / PAGE} must have the lines {BEGIN} and {END} once each")
        compute = seconds_of(step_time) if step_time else None
        found = [Merged.of(alike, compute) for alike in _by_setting(studies)]
    drawn = max(found, key=lambda study: len(study.rows))
    save(root / TABLE, json.dumps(table(found), indent=2) + "\n")
    save(root / PICTURE, picture(drawn))
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    text = "\n\n".join(section(study, with_picture=study is drawn) for study in found)
    save(root / PAGE, f"{before}{BEGIN}\n{text}\n{END}{after}")
    console().print(f"wrote {TABLE}, {PICTURE} and the section of {PAGE}", markup=False)


def read(path: Path) -> Study:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Study)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} is not a file of `python -m benchmarks language --json`: {error}"
        ) from None


def _by_setting(studies: Sequence[Study]) -> list[list[Study]]:
    settings = list(dict.fromkeys(study.setting for study in studies))
    return [[study for study in studies if study.setting == setting] for setting in settings]


@dataclass(frozen=True)
class Merged:
    """Studies of one setting: of every method the runs with the most seeds."""

    setting: Setting
    tuning: Setting | None
    rates: Sequence[float]
    commands: Sequence[str]
    compute: float
    parameters: int
    rows: Sequence[Row]

    @classmethod
    def of(cls, studies: Sequence[Study], compute: float | None) -> Merged:
        first = studies[0]
        if any((study.tuning, study.rates) != (first.tuning, first.rates) for study in studies):
            raise ConfigError("studies of one setting must have chosen their learning rates alike")
        runs: dict[str, list[Run]] = {}
        for study in studies:
            for name, own in study.runs.items():
                if len(own) > len(runs.get(name, [])):
                    runs[name] = own
        compute = first.compute if compute is None else compute
        return cls(
            setting=first.setting,
            tuning=first.tuning,
            rates=first.rates,
            commands=[command_of(study) for study in studies],
            compute=compute,
            parameters=sum(map(prod, first.shapes.values())),
            rows=summary(runs, by_link(runs, first.shapes, first.setting.workers, compute)),
        )


def command_of(study: Study) -> str:
    """What makes this study again; DATA is a folder of yours."""
    made, tuning = study.setting, study.tuning
    names = {hidden: name for name, hidden in SIZES.items()}
    parts = [f"python -m benchmarks language --data {made.data} --size {names[made.hidden]}"]
    if tuning is not None:
        parts.append(
            f"--tune-data {tuning.data} --tune-size {names[tuning.hidden]} --tune-steps {tuning.steps}"
        )
        if tuning.workers != made.workers:
            parts.append(f"--tune-workers {tuning.workers}")
    parts.append(f"--rates {','.join(f'{rate:g}' for rate in study.rates)}")
    parts.append(f"--workers {made.workers} --steps {made.steps} --batch {made.batch} --seeds {study.seeds}")
    if study.link:
        parts.append(f"--link {study.link}")
    if set(study.runs) != set(METHODS):
        parts.append(f'-m "{", ".join(name for name in study.runs if name not in CONTROLS)}"')
    return " ".join(parts)


def table(studies: Sequence[Merged]) -> dict[str, Any]:
    """For `thinwire.predict.language`: the first study, and methods that only others of its model have."""
    first = studies[0]
    rows: dict[str, dict[str, Any]] = {}
    alike = [study for study in studies if study.parameters == first.parameters]
    for study in alike:
        for row in study.rows:
            rows.setdefault(row.method, asdict(row) | {"steps": study.setting.steps})
    return {
        "commands": [command for study in alike for command in study.commands],
        "setting": asdict(first.setting) | {"compute": first.compute},
        "rows": list(rows.values()),
    }


def picture(study: Merged) -> str:
    """Validation loss against bytes: a point for each method, and the two controls as lines."""
    rows = study.rows
    points = {row.method: ([100 * row.sent], [row.loss]) for row in rows if row.method not in CONTROLS}
    sent = [xs[0] for xs, _ in points.values()] + [100.0]
    ends = [min(sent), max(sent)]
    controls = {row.method: (ends, [row.loss] * 2) for row in rows if row.method in CONTROLS}
    made = lines(
        {**controls, **points},
        "bytes sent, % of dense's",
        "validation loss in nats",
        log_x=True,
        only_markers=True,
    )
    for trace in made["data"]:
        if trace["name"] in CONTROLS:
            trace["mode"] = "lines"
    title = f"Transformer with AdamW, {study.setting.workers} workers: loss against bytes"
    drawn = svg(title, made)
    assert drawn is not None
    return drawn


def section(study: Merged, *, with_picture: bool) -> str:
    setting = study.setting
    tuned = (
        "Each method, `dense` included, has the learning rate with which it did best on other data, of "
        f"{', '.join(f'{rate:g}' for rate in study.rates)}."
        if study.tuning is not None and len(study.rates) > 1
        else "All methods have the same learning rate."
    )
    if study.tuning is not None and study.tuning.hidden != setting.hidden:
        tuned += " The rates were chosen with a smaller transformer."
    if study.tuning is not None and study.tuning.workers != setting.workers:
        tuned += f" The rates were chosen with {study.tuning.workers} workers."
    for row in study.rows:
        if keeps_the_momentum(row.method):
            tuned += f" `{row.method}` keeps the momentum itself and gives the steps, in place of AdamW."
    header = ["method", "rate", "seeds", "loss", "behind dense", "recovered", "sent", *LINKS]
    table_lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *map(_line, study.rows)]
    parts = [
        f"A transformer of {study.parameters:,} parameters, AdamW with warm-up, cosine and clipping, "
        f"{setting.workers} workers, {setting.steps:,} steps. {tuned}",
        "\n".join(f"    {command}" for command in study.commands),
        *(["![Validation loss against bytes](language.svg)"] if with_picture else []),
        "\n".join(table_lines),
        "Loss is the validation loss in nats, the mean of the seeds. `alone` is a worker that never "
        "communicates; a method recovers a part of the gap between `alone` and `dense`, compared with the "
        "same seeds. Sent is a part of the bytes of `dense`, in the second half of the steps. The last "
        f"columns are predicted times of a step, with {duration(study.compute)} of computation and after any "
        "warm-up.",
        "\n".join(_bars(study.rows)),
    ]
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    cells = [
        f"`{row.method}`",
        f"{row.rate:g}",
        f"{row.seeds}",
        f"{row.loss:.3f}",
        f"{row.behind:+.3f}",
        f"{100 * row.recovered:.0f} %",
        f"{100 * row.sent:.3g} %",
        *(duration(row.seconds[link]) for link in LINKS),
    ]
    return f"| {' | '.join(cells)} |"


def _bars(rows: Sequence[Row]) -> list[str]:
    """For each bar the method with the fewest bytes that is within it."""
    found: list[str] = []
    for words, bar in BARS.items():
        able = [row for row in rows if row.behind <= bar and row.method not in CONTROLS]
        if able:
            best = min(able, key=lambda row: row.sent)
            found.append(f"- Fewest bytes, {words}: `{best.method}`, {100 * best.sent:.3g} % of the bytes.")
        else:
            found.append(f"- No method is {words}.")
    return found
