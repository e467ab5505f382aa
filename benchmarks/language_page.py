"""What the language-model study came to, for others: a table in the package, a picture and a page section."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.language import METHODS, SIZES, Row, summary
from benchmarks.language_runs import ALONE, Run, Setting
from benchmarks.language_times import LINKS, by_link, compute_seconds, shapes_of
from thinwire.errors import ConfigError
from thinwire.predict.recommend import duration, seconds_of
from thinwire.tools.cli.show import console, errors
from thinwire.tools.report.figure_picture import svg
from thinwire.tools.report.figures import lines
from thinwire.tools.report.page import save
from thinwire.tools.workloads import load

TABLE, PICTURE, PAGE = "src/thinwire/predict/language.json", "docs/language.svg", "docs/choosing.md"
BEGIN = "<!-- made by `python -m benchmarks language-page`; do not edit -->"
END = "<!-- end of what language-page makes -->"
CONTROLS = ("dense", ALONE)
BARS = {
    "no worse than `dense`": 0.0,
    "at most 0.03 nats behind `dense`": 0.03,
    "at most 0.08 nats behind `dense`": 0.08,
}


class Study(msgspec.Struct, kw_only=True):
    """The file that `python -m benchmarks language --json` writes, as far as it is needed here."""

    setting: Setting
    tuning: Setting | None = None
    rates: list[float]
    seeds: int
    runs: dict[str, list[Run]]
    compute: float | None = None
    """Seconds of a step without communication."""
    shapes: dict[str, tuple[int, ...]] = {}

    @property
    def command(self) -> str:
        """What makes this study again; DATA is a folder of yours."""
        made = self.setting
        sizes = [name for name, hidden in SIZES.items() if hidden == made.hidden]
        parts = ["python -m benchmarks language", f"--data {_public(made.data)}"]
        if self.tuning is not None:
            parts += [f"--tune-data {_public(self.tuning.data)}", f"--tune-steps {self.tuning.steps}"]
        parts += [f"--rates {','.join(f'{rate:g}' for rate in self.rates)}", *(f"--size {s}" for s in sizes)]
        parts += [f"--workers {made.workers}", f"--steps {made.steps}", f"--batch {made.batch}"]
        parts.append(f"--seeds {self.seeds}")
        if set(self.runs) != set(METHODS):
            parts.append(f'-m "{", ".join(name for name in self.runs if name not in CONTROLS)}"')
        return " ".join(parts)


def command(
    records: Annotated[
        list[Path],
        typer.Argument(help="Files of `language --json`; table and picture are of the first."),
    ],
    step_time: Annotated[
        str, typer.Option(help="Computation of a step, such as 170ms; none: as recorded, or measured here.")
    ] = "",
    root: Annotated[Path, typer.Option(help="The folder of the repository.")] = Path(),
) -> None:
    """Write the table of `plan` and `auto`, the picture and the section of docs/choosing.md from a study."""
    with errors():
        studies = [_completed(read(path), step_time) for path in records]
        page = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).is_file() else ""
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            raise ConfigError(f"{root / PAGE} must have the lines {BEGIN} and {END} once each")
    found = [(study, rows_of(study)) for study in studies]
    first, rows = found[0]
    save(root / TABLE, json.dumps(table(first, rows), indent=2) + "\n")
    save(root / PICTURE, picture(first, rows))
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    text = "\n\n".join(section(study, own, with_picture=study is first) for study, own in found)
    save(root / PAGE, f"{before}{BEGIN}\n{text}\n{END}{after}")
    console().print(f"wrote {TABLE}, {PICTURE} and the section of {PAGE}", markup=False)


def read(path: Path) -> Study:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Study)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} is not a file of `python -m benchmarks language --json`: {error}"
        ) from None


def _completed(study: Study, step_time: str) -> Study:
    """With shapes and the time of a step, which older files do not have."""
    compute = seconds_of(step_time) if step_time else study.compute
    shapes = study.shapes
    if compute is None or not shapes:
        data = load(study.setting.data)
        compute = compute_seconds(study.setting, data) if compute is None else compute
        shapes = shapes or shapes_of(study.setting, data)
    return msgspec.structs.replace(study, compute=compute, shapes=shapes)


def rows_of(study: Study) -> list[Row]:
    assert study.compute is not None
    seconds = by_link(study.runs, study.shapes, study.setting.workers, study.compute)
    return summary(study.runs, seconds)


def table(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """For `thinwire.predict.language`; the rows by their loss."""
    setting = asdict(replace(study.setting, data=_public(study.setting.data)))
    return {
        "command": study.command,
        "setting": setting | {"seeds": study.seeds, "compute": study.compute},
        "rows": [asdict(row) for row in rows],
    }


def picture(study: Study, rows: Sequence[Row]) -> str:
    """Validation loss against bytes: a point for each method, and the two controls as lines."""
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


def section(study: Study, rows: Sequence[Row], *, with_picture: bool) -> str:
    setting, compute = study.setting, study.compute
    assert compute is not None
    entries = sum(_product(shape) for shape in study.shapes.values())
    tuned = (
        f"Each method, `dense` included, has the learning rate with which it did best on other data, of "
        f"{', '.join(f'{rate:g}' for rate in study.rates)}."
        if study.tuning is not None and len(study.rates) > 1
        else "All methods have the same learning rate."
    )
    header = ["method", "rate", "loss", "behind dense", "recovered", "sent", *LINKS]
    table_lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *map(_line, rows)]
    parts = [
        f"A transformer of {entries:,} parameters, AdamW with warm-up, cosine and clipping, "
        f"{setting.workers} workers, {setting.steps:,} steps, mean of {study.seeds} "
        f"{'seed' if study.seeds == 1 else 'seeds'}. {tuned}",
        f"    {study.command}",
        *(["![Validation loss against bytes](language.svg)"] if with_picture else []),
        "\n".join(table_lines),
        "Loss is the validation loss in nats. `alone` is a worker that never communicates; a method recovers "
        "a part of the gap between `alone` and `dense`. Sent is a part of the bytes of `dense`, in the "
        "second half of the steps. The last columns are predicted times of a step, with "
        f"{duration(compute)} of computation and after any warm-up.",
        "\n".join(_bars(rows)),
    ]
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    cells = [
        f"`{row.method}`",
        f"{row.rate:g}",
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


def _public(data: str) -> str:
    """Without the folders of a machine: `text:DATA/name/file`."""
    kind, colon, path = data.partition(":")
    return f"{kind}:DATA/{'/'.join(PurePath(path).parts[-2:])}" if colon else kind


def _product(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
