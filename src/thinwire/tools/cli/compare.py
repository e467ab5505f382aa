"""`thinwire compare`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import console, errors, table

if TYPE_CHECKING:
    from thinwire.tools.compare.records import Records

Chosen = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "-m",
        help='Such as "topk(ratio=0.01),qsgd(bits=4)"; may be given several times. In a lab also PyTorch\'s '
        "own: pytorch, pytorch-fp16, pytorch-powersgd. Default: one of each kind.",
    ),
]


def compare(
    methods: Chosen = None,
    workers: Annotated[int, typer.Option(min=1, help="Local worker processes.")] = 4,
    link: Annotated[
        str,
        typer.Option(
            help='"100mbit", "50mbit,latency=10ms,jitter=2ms", "up=20mbit,down=100mbit", "none"; '
            '"lab:100mbit" for real interfaces (needs root).'
        ),
    ] = "100mbit",
    model: Annotated[str, typer.Option(help="mlp, cnn, resnet20, lstm or transformer.")] = "mlp",
    hidden: Annotated[str, typer.Option(help="Widths of mlp's hidden layers, such as 1024,1024.")] = "",
    data: Annotated[str, typer.Option(help="digits, mnist:DIR, cifar10:DIR or text:FILE.")] = "digits",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    epochs: Annotated[float | None, typer.Option(min=0.0, help="Passes over the data, instead.")] = None,
    target_accuracy: Annotated[
        float | None, typer.Option(help="Stop a run where the test accuracy reaches this (0 to 1).")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Steps between tests.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per worker and step.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with other weights and batches.")] = 1,
    out: Annotated[Path, typer.Option(help="Where records, CSV and the report go.")] = Path("out/compare"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Train the same model with each method over your link; see accuracy, bytes and time side by side."""
    with errors():
        from thinwire.tools.compare import engine, summary
        from thinwire.tools.compare.live import Live
        from thinwire.tools.compare.task import line_up

        if optimizer not in (None, "sgd", "adam"):
            raise ConfigError(f"--optimizer is sgd or adam, not {optimizer!r}")
        wanted = engine.Comparison(
            methods=line_up(methods or ()),
            workers=workers,
            link=link,
            model=model,
            data=data,
            hidden=_widths(hidden),
            steps=steps,
            epochs=epochs,
            target=target_accuracy,
            evaluate_every=evaluate_every,
            batch=batch,
            learning_rate=lr,
            optimizer=optimizer,
            seeds=seeds,
            command=shlex.join(["thinwire", *sys.argv[1:]]),
        )
        prepared = engine.prepare(wanted)
        setting = prepared[0]
        with Live(console(stderr=True), list(wanted.methods), setting.steps, setting.measure) as live:
            records = engine.run(wanted, out, live, prepared)
        summary.write_csv(out / "runs.csv", records.runs)
        _report(records, out)
    if as_json:
        console().print_json(json.dumps(summary.as_json(records)))
        return
    title = (
        f"{setting.model} on {setting.data} ({setting.parameters:,} parameters), {workers} workers, link "
        f"{link}; bytes and times per step and worker"
    )
    table(title, summary.header(records), summary.rows(records))
    for run in records.runs:
        if run.failed is not None:
            console().print(f"{run.method} failed: {run.failed}", markup=False)
    console().print(f"records, CSV and report: {out / 'report.html'}", markup=False)


def _report(records: Records, out: Path) -> None:
    from thinwire.tools import report

    report.write(records, out / "report.html")


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise ConfigError(f"--hidden takes widths with commas, like 1024,1024, not {text!r}")
    return widths
