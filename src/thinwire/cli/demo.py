"""`thinwire demo`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from thinwire.cli.show import JsonFile, Methods, errors, progress, save, table


def demo(
    workers: Annotated[int, typer.Option(min=1, help="Local worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each method.")] = 150,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs with other weights and batches; the mean counts.")
    ] = 1,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """Train a small network on handwritten digits, dense and with each method, and compare."""
    with errors():
        from thinwire.bench import digits

        strings = digits.line_up(method or ())
        with progress(len(strings) * steps * seeds) as advance:
            results = digits.run(strings, workers, steps, seeds, lambda name, step: advance(name, 1))
    table(
        f"digits, {workers} workers, {steps} steps; bytes per step and worker",
        ("method", "accuracy", "payload", "rounds", "sent", "of dense"),
        [
            (
                r.method,
                f"{100 * r.accuracy:.1f} %",
                f"{r.payload:,.0f}",
                f"{r.rounds:.3g}",
                f"{r.sent:,.0f}",
                f"{r.ratio:.4f}",
            )
            for r in results
        ],
    )
    command = f"thinwire demo --workers {workers} --steps {steps} --seeds {seeds}"
    record = {"command": command, "workers": workers, "steps": steps, "seeds": seeds}
    save(json_file, record | {"results": [asdict(r) for r in results]})
