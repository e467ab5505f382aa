"""`thinwire gradients`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.show import (
    JsonFile,
    Workers,
    check_writable,
    console,
    errors,
    progress,
    save,
    table,
)

if TYPE_CHECKING:
    from thinwire.tools.gradients import Findings

Models = Annotated[
    str,
    typer.Option(
        "--model",
        help="logistic, mlp, cnn, resnet20, lstm or transformer; several with commas between them, or all.",
    ),
]
DataSets = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="digits, mnist:DIR or cifar10:DIR for images; synthetic or text:FILE for text. May be given "
        "twice, for models of both kinds. Default: digits and synthetic.",
    ),
]


def gradients(
    model: Models = "mlp",
    data: DataSets = None,
    workers: Workers = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Rows per worker and step.")] = 32,
    lr: Annotated[float, typer.Option(help="The learning rate of SGD.")] = 0.1,
    ratio: Annotated[float, typer.Option(help="The share of entries that top-k keeps.")] = 0.01,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            help="The method that averages the gradients. If it keeps residuals, they are studied, too.",
        ),
    ] = "dense",
    seed: Annotated[int, typer.Option(help="The seed of weights and batches.")] = 0,
    out: Annotated[Path, typer.Option(help="The HTML file with the plots.")] = Path("out/gradients.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Draw every plot as an SVG file in this folder, too.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Train, and learn how the gradients are distributed, which fits describe them, and what top-k loses."""
    with errors():
        from thinwire.tools.gradients import Study, data_of, run

        check_writable(out, "--out")
        if json is not None:
            check_writable(json, "--json")
        studies = [
            Study(name, spec, workers, steps, batch, lr, ratio, method, seed)
            for name, spec in data_of(model, data or ()).items()
        ]
        found: list[Findings] = []
        with progress(steps * len(studies)) as advance:
            for study in studies:
                name = study.model
                found.append(run(study, lambda _, loss, name=name: advance(f"{name}, loss {loss:.3f}", 1)))
        _write(found, out, pictures)
        save(json, {each.study.model: each.to_json() for each in found})
    _show(found, out)


def _write(found: list[Findings], out: Path, pictures: Path | None) -> None:
    from thinwire.tools.gradients import figures, fits_table, loss_table, overview, tightness
    from thinwire.tools.report import page
    from thinwire.tools.report.figure_picture import svg
    from thinwire.tools.report.figures import write_figures

    plots = overview(found) if len(found) > 1 else {}
    for each in found:
        plots |= figures(each)
    names = ", ".join(each.study.model for each in found)
    title = f"Gradients of {names}, {found[0].study.workers} workers"
    write_figures(out, title, plots, tables=[fits_table(found), loss_table(found)], notes=[tightness(found)])
    if pictures is None:
        return
    for heading, plot in plots.items():
        drawn = svg(heading, plot)
        if drawn is not None:
            page.save(pictures / f"{re.sub('[^a-z0-9]+', '-', heading.lower())}.svg", drawn)


def _show(found: list[Findings], out: Path) -> None:
    from thinwire.tools.gradients import fits_table, loss_table, thresholds_table, tightness

    for each in found:
        table(*thresholds_table(each))
        share = each.histogram_bytes / max(each.gradient_bytes, 1)
        console().print(
            f"loss {each.steps[-1].loss:.3f} after {len(each.steps)} steps; a histogram costs a worker "
            f"{each.histogram_bytes:,.0f} bytes sent per step, {100 * share:.2g} % of a gradient of "
            f"{each.gradient_bytes:,} bytes.\n"
        )
    table(*fits_table(found))
    table(*loss_table(found))
    console().print(tightness(found), markup=False)
    console().print(f"Plots: {out}", markup=False, soft_wrap=True)
