"""`thinwire gradients`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.show import (
    Data,
    JsonFile,
    Model,
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


def gradients(
    model: Model = "mlp",
    data: Data = "digits",
    workers: Workers = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Rows per worker and step.")] = 32,
    lr: Annotated[float, typer.Option(help="The learning rate of SGD.")] = 0.1,
    ratio: Annotated[float, typer.Option(help="The share of entries that top-k keeps.")] = 0.01,
    method: Annotated[
        str, typer.Option("--method", "-m", help="The method that averages the gradients.")
    ] = "dense",
    seed: Annotated[int, typer.Option(help="The seed of weights and batches.")] = 0,
    out: Annotated[Path, typer.Option(help="The HTML file with the plots.")] = Path("out/gradients.html"),
    json: JsonFile = None,
) -> None:
    """Train, and learn from all workers how the gradients are distributed and what top-k would select."""
    with errors():
        from thinwire.tools.gradients import Study, figures, run
        from thinwire.tools.report.figures import write_figures

        check_writable(out, "--out")
        if json is not None:
            check_writable(json, "--json")
        study = Study(model, data, workers, steps, batch, lr, ratio, method, seed)
        with progress(steps) as advance:
            findings = run(study, lambda _, loss: advance(f"{model}, loss {loss:.3f}", 1))
        title = f"Gradients of {model} on {data.partition(':')[0]}, {workers} workers"
        write_figures(out, title, figures(findings))
        save(json, findings.to_json())
    _show(findings, out)


def _show(findings: Findings, out: Path) -> None:
    study, last = findings.study, findings.steps[-1]
    rows: list[tuple[str, ...]] = []
    for number, phase in enumerate(findings.phases):
        fits = (phase.threshold, phase.gaussian_threshold, phase.laplace_threshold)
        thresholds = [fit(study.ratio) for fit in fits]
        selected = [f"{each:.3g} ({100 * phase.share_above(each):.2f} %)" for each in thresholds]
        moments = (phase.deviation, phase.real_threshold)
        name = f"{number + 1} of {len(findings.phases)}"
        rows.append((name, *(f"{value:.3g}" for value in moments), *selected))
    header = ("part", "deviation", "top-k", "learned", "Gaussian", "Laplace")
    title = (
        f"the threshold of top-k at {100 * study.ratio:g} % in each part of the run, and estimates of it "
        "with the share of entries that they would select"
    )
    table(title, header, rows)
    share = findings.histogram_bytes / max(findings.gradient_bytes, 1)
    console().print(
        f"loss {last.loss:.3f} after {len(findings.steps)} steps; a histogram costs a worker "
        f"{findings.histogram_bytes:,.0f} bytes sent per step, {100 * share:.2g} % of a gradient of "
        f"{findings.gradient_bytes:,} bytes.\nPlots: {out}"
    )
