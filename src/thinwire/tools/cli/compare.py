"""`thinwire compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from thinwire.tools.devices import DeviceOption

if TYPE_CHECKING:
    from thinwire.tools.compare.records import Records
    from thinwire.tools.compare.settings import Comparison
    from thinwire.tools.compare.settings import Script as OwnScript

Chosen = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--method",
        "-m",
        help='Such as "topk(ratio=0.01),qsgd(bits=4)"; may be given several times. "auto" measures and '
        'chooses itself; "alone" is a worker without the others. PyTorch\'s own are pytorch, '
        "pytorch-fp16 and pytorch-powersgd. Default: six methods, one of each kind, and alone.",
    ),
]
Link = Annotated[
    str,
    typer.Option(
        help='The link of each worker: "100mbit", "50mbit,latency=10ms,jitter=2ms", "up=20mbit,down=100mbit" '
        'or "none"; "lab:100mbit" for real interfaces (needs root).'
    ),
]


Hidden = Annotated[
    str,
    typer.Option(
        help="Widths of mlp's hidden layers (default: 256,256 for digits, otherwise 1024,1024); of the "
        "layers of lstm (256,256) or transformer (128,128), all equal; or of cnn's three convolutions and "
        "its hidden layer (32,64,64,128)."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps of each run. Default: 300.")]
Epochs = Annotated[
    float | None, typer.Option(min=0.0, help="Passes over the training data, instead of --steps.")
]
Batch = Annotated[int | None, typer.Option(min=1, help="Rows per worker and step. Default: 32 (text: 16).")]
Rate = Annotated[
    float | None,
    typer.Option(
        help="The learning rate. Default: 0.1 for SGD, times 1 - momentum; 0.002 for Adam and AdamW (lstm: "
        "0.004)."
    ),
]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD, after the exchange.")]
MomentumBefore = Annotated[
    float, typer.Option(help="Instead, momentum on each worker's own gradients, before the exchange.")
]
Seeds = Annotated[
    int, typer.Option(min=1, help="Runs of each method, each with its own weights and batches.")
]
Against = Annotated[
    Literal["none", "dense", "pytorch"] | None,
    typer.Option(
        help="What speed-ups are against; it is run too. Default: pytorch (plain DDP) if it is among the "
        "methods, otherwise dense."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the runs in --out that have ended; train only the rest.")
]


Script = Annotated[
    str | None,
    typer.Argument(help="Your training script, instead of --model and --data.", show_default=False),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help='For the script, after --; "{seed}" is the number of the seed.', show_default=False),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        help='A value in what the script prints: "val_loss=([0-9.]+)"; may be given several times. Those of '
        "thinwire.record are found without it.",
    ),
]
Module = Annotated[bool, typer.Option("--module", help="SCRIPT is a module, as in python -m.")]


def compare(
    script: Script = None,
    arguments: Arguments = None,
    metric: Metrics = None,
    module: Module = False,
    methods: Chosen = None,
    workers: Workers = 4,
    device: DeviceOption = "cpu",
    link: Link = "100mbit",
    model: Model = "mlp",
    hidden: Hidden = "",
    data: Data = "digits",
    steps: Steps = None,
    epochs: Epochs = None,
    target_accuracy: Annotated[
        float | None, typer.Option(help="Stop a run at this test accuracy, such as 0.95. For images.")
    ] = None,
    target_perplexity: Annotated[
        float | None, typer.Option(help="Stop a run at this test perplexity, such as 5.2. For text.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between two tests. Default: 20 tests per run.")
    ] = None,
    batch: Batch = None,
    lr: Rate = None,
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"] | None,
        typer.Option(help="The optimizer. Default: sgd for images, adam for text."),
    ] = None,
    momentum: Momentum = 0.0,
    momentum_before: MomentumBefore = 0.0,
    seeds: Seeds = 1,
    baseline: Against = None,
    out: Annotated[Path, typer.Option(help="The folder for records, CSV and report.")] = Path("out/compare"),
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train the same model with each method over your link; see accuracy, bytes and time side by side.

    With your own script: thinwire compare train.py --link 50mbit -m "dense,topk" -- ARGS
    """
    with errors():
        from thinwire.tools.compare.settings import Comparison, resolve_methods

        own = own_script(script, arguments, metric, module=module)
        asked = Comparison(
            methods=resolve_methods(methods or (), baseline),
            workers=workers,
            device=device,
            link=link,
            model=model,
            data=data,
            hidden=widths(hidden),
            steps=steps,
            epochs=epochs,
            target_accuracy=target_accuracy,
            target_perplexity=target_perplexity,
            evaluate_every=evaluate_every,
            batch=batch,
            learning_rate=lr,
            optimizer=optimizer,
            momentum=momentum,
            momentum_before=momentum_before,
            seeds=seeds,
            command=command_line(),
            baseline=baseline != "none",
            script=own,
        )
        records = carry_out(asked, out, resume=resume)
    from thinwire.tools.report.summary import summarise

    if as_json:
        print_json(summarise(records))
    else:
        show_records(records, out)
    if all(one.failed is not None for one in records.runs):
        raise typer.Exit(1)


def own_script(
    path: str | None, arguments: list[str] | None, metrics: list[str] | None = None, *, module: bool = False
) -> OwnScript | None:
    """The script to train with, if one is given."""
    from thinwire.tools.compare.settings import Script
    from thinwire.tools.script.output import read_patterns

    if path is not None:
        return Script(path, tuple(arguments or ()), module, read_patterns(metrics or ()))
    if metrics or module:
        raise ConfigError(f"{'--metric' if metrics else '--module'} is for a script of yours: name it")
    return None


def command_line() -> str:
    """The command as the user gave it."""
    return shlex.join(["thinwire", *sys.argv[1:]])


def carry_out(asked: Comparison, out: Path, *, resume: bool) -> Records:
    """Run the comparison with progress bars; records, CSV and report are written to `out`."""
    from thinwire.tools import report
    from thinwire.tools.compare.progress import ProgressBars
    from thinwire.tools.compare.records import write_csv
    from thinwire.tools.compare.runner import FILE, run
    from thinwire.tools.compare.settings import prepare

    setting = prepare(asked)
    check_writable(out / FILE, "--out")
    try:
        with ProgressBars(console(stderr=True), list(asked.methods), setting) as bars:
            records = run(asked, out, bars, setting, resume=resume)
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"thinwire: interrupted; {out} has the runs that had ended: go on with --resume", err=True)
        raise
    write_csv(out / "runs.csv", records)
    report.write(records, out / "report.html")
    return records


def show_records(records: Records, out: Path) -> None:
    """The table of a comparison on the terminal."""
    from thinwire.tools.report import terminal

    setting = records.setting
    title = (
        f"{setting.task}, {setting.parameters:,} parameters, "
        f"{setting.workers} workers, link {setting.link}; bytes and times per step and worker"
        + (f"; speed-up over {records.baseline}" if records.baseline else "")
    )
    table(title, terminal.header(records), terminal.rows(records))
    for one in records.runs:
        if one.failed is not None:
            console().print(f"{one.method} failed: {one.failed}", markup=False)
    for line in terminal.warnings(records):
        console().print(line, markup=False)
    if setting.target is not None:
        console().print(f"steps and time: until the target {setting.measure} was reached", markup=False)
    console().print(f"Report: {out / 'report.html'}; records and CSV are beside it.", markup=False)


def widths(text: str) -> tuple[int, ...]:
    """The value of --hidden."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (0,)
    if any(width < 1 for width in found):
        raise ConfigError(f"--hidden takes widths with commas, like 1024,1024, not {text!r}")
    return found
