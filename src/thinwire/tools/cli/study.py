"""`thinwire study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from thinwire.tools.cli.compare import (
    Batch,
    Epochs,
    Hidden,
    Link,
    Momentum,
    MomentumBefore,
    Rate,
    Resume,
    Seeds,
    Steps,
    carry_out,
    command_line,
    show_records,
    widths,
)
from thinwire.tools.cli.show import AsJson, Data, Model, Workers, errors, print_json, table


def study(
    rule: Annotated[
        Literal["top-k", "random-k", "random block"] | None,
        typer.Option(help="Only this rule. Default: all three."),
    ] = None,
    ratio: Annotated[float, typer.Option(help="The share of the entries that is sent.")] = 0.05,
    workers: Workers = 4,
    link: Link = "none",
    model: Model = "mlp",
    hidden: Hidden = "",
    data: Data = "digits",
    steps: Steps = None,
    epochs: Epochs = None,
    batch: Batch = None,
    lr: Rate = None,
    momentum: Momentum = 0.9,
    momentum_before: MomentumBefore = 0.0,
    seeds: Seeds = 1,
    out: Annotated[Path, typer.Option(help="The folder for records, CSV and report.")] = Path("out/study"),
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Study sparse communication: rule, shared or own indices, layer or model, feedback on or off.

    Every combination trains the same model, beside dense training and a worker alone.

    The last table says what each parameter does to the accuracy, all else equal.
    """
    with errors():
        from thinwire.tools.compare import study as grid
        from thinwire.tools.compare.settings import Comparison, resolve_methods

        before = momentum_before > 0
        chosen = [cell for cell in grid.cells(momenta=(before,)) if rule in (cell.rule, None)]
        found = {cell: cell.method(ratio) for cell in chosen}
        methods = {cell: resolve_methods([text])[-1] for cell, text in found.items() if text is not None}
        asked = Comparison(
            methods=[*grid.CONTROLS, *methods.values()],
            workers=workers,
            link=link,
            model=model,
            data=data,
            hidden=widths(hidden),
            steps=steps,
            epochs=epochs,
            batch=batch,
            learning_rate=lr,
            optimizer="sgd",
            momentum=0.0 if before else momentum,
            momentum_before=momentum_before,
            seeds=seeds,
            command=command_line(),
        )
        records = carry_out(asked, out, resume=resume)
    effects = grid.effects(grid.accuracies_of(records, methods))
    if as_json:
        from thinwire.tools.report.summary import summarise

        print_json({"methods": summarise(records), "effects": effects})
    else:
        show_records(records, out)
        table(
            "what a change does to the accuracy, all else equal: the median, in points, and in how many "
            "pairs it helps",
            ("change", *grid.RULES),
            [
                (what, *(grid.summary(points) for points in by_rule.values()))
                for what, by_rule in effects.items()
                if any(by_rule.values())
            ],
        )
    if all(one.failed is not None for one in records.runs):
        raise typer.Exit(1)
