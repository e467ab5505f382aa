"""`thinwire compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import (
    AsJson,
    Data,
    Model,
    Workers,
    check_writable,
    console,
    errors,
    print_json,
    table,
)

Chosen = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "-m",
        help='Such as "topk(ratio=0.01),qsgd(bits=4)"; may be given several times. In a lab also PyTorch\'s '
        "own: pytorch, pytorch-fp16, pytorch-powersgd. Default: one of each kind.",
    ),
]
Link = Annotated[
    str,
    typer.Option(
        help='"100mbit", "50mbit,latency=10ms,jitter=2ms", "up=20mbit,down=100mbit", "none"; '
        '"lab:100mbit" for real interfaces (needs root).'
    ),
]


def compare(
    methods: Chosen = None,
    workers: Workers = 4,
    link: Link = "100mbit",
    model: Model = "mlp",
    hidden: Annotated[str, typer.Option(help="Widths of mlp's hidden layers, such as 1024,1024.")] = "",
    data: Data = "digits",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    epochs: Annotated[float | None, typer.Option(min=0.0, help="Passes over the data, instead.")] = None,
    target_accuracy: Annotated[
        float | None, typer.Option(help="Stop a run at this test accuracy (0 to 1).")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Steps between tests.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per worker and step.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    optimizer: Annotated[Literal["sgd", "adam", "adamw"] | None, typer.Option(help="The optimizer.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with other weights and batches.")] = 1,
    out: Annotated[Path, typer.Option(help="Where records, CSV and the report go.")] = Path("out/compare"),
    as_json: AsJson = False,
) -> None:
    """Train the same model with each method over your link; see accuracy, bytes and time side by side."""
    with errors():
        from thinwire.tools import report
        from thinwire.tools.compare.progress import ProgressBars
        from thinwire.tools.compare.records import write_csv
        from thinwire.tools.compare.runner import FILE, run
        from thinwire.tools.compare.settings import Comparison, prepare, resolve_methods

        asked = Comparison(
            methods=resolve_methods(methods or ()),
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
        setting = prepare(asked)
        check_writable(out / FILE, "--out")
        with ProgressBars(console(stderr=True), list(asked.methods), setting) as bars:
            records = run(asked, out, bars, setting)
        write_csv(out / "runs.csv", records.runs)
        report.write(records, out / "report.html")
    from thinwire.tools.report import terminal
    from thinwire.tools.report.summary import summarise

    if as_json:
        print_json(summarise(records))
        return
    title = (
        f"{model} on {setting.dataset} ({setting.parameters:,} parameters), {workers} workers, link {link}; "
        "bytes and times per step and worker"
    )
    table(title, terminal.header(setting), terminal.rows(records))
    for one in records.runs:
        if one.failed is not None:
            console().print(f"{one.method} failed: {one.failed}", markup=False)
    console().print(f"records, CSV and report: {out / 'report.html'}", markup=False)


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise ConfigError(f"--hidden takes widths with commas, like 1024,1024, not {text!r}")
    return widths
