"""Every method on handwritten digits: what it sends, and how well a small network learns with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import torch
import typer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Progress, chosen_methods, from_rank_0, measuring, show
from thinwire.errors import ConfigError
from thinwire.methods.registry import list_methods, list_schedules, parse
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, Methods, errors, save
from thinwire.tools.workloads import build, load
from thinwire.tools.workloads.models import evaluate, loss

BATCH = 32
STEPS = 150

# Only other methods make something of these.
WRAPPERS = ("warmup", "route", "hierarchical", "delayed", "adam")  # SGD trains here, and adam needs AdamW


@dataclass(frozen=True)
class Result:
    """One method's run. Bytes and rounds are per step and worker."""

    method: str
    accuracy: float
    payload: float
    rounds: float
    sent: float
    ratio: float
    """Of the bytes sent, to those of `dense`."""
    loss: float


def command(
    workers: Annotated[int, typer.Option(min=1, help="Local worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each method.")] = STEPS,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs with other weights and batches; the mean counts.")
    ] = 1,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """Train a small network on handwritten digits with every method: accuracy and bytes, without a link."""
    with errors():
        strings = line_up(chosen_methods(method))
    with measuring(len(strings) * steps * seeds) as progress:
        results = run(strings, workers, steps, seeds, progress)
    show(
        f"digits, {workers} workers, {steps} steps; bytes per step and worker",
        results,
        {
            "method": lambda r: r.method,
            "accuracy": lambda r: f"{100 * r.accuracy:.1f} %",
            "payload": lambda r: f"{r.payload:,.0f}",
            "rounds": lambda r: f"{r.rounds:.3g}",
            "sent": lambda r: f"{r.sent:,.0f}",
            "sent / dense": lambda r: f"{r.ratio:.4f}",
        },
    )
    text = f"python -m benchmarks digits --workers {workers} --steps {steps} --seeds {seeds}"
    record = {"command": text, "workers": workers, "steps": steps, "seeds": seeds}
    save(json_file, record | {"results": [asdict(r) for r in results]})


def line_up(chosen: Sequence[str] = ()) -> list[str]:
    """The method strings to run: `dense` first, then those chosen, or all that are registered."""
    wanted = chosen or [name for name in (*list_methods(), *list_schedules()) if name not in WRAPPERS]
    strings = [str(parse(text)) for text in wanted]
    return ["dense", *(text for text in dict.fromkeys(strings) if text != "dense")]


def run(
    chosen: Sequence[str] = (),
    workers: int = 4,
    steps: int = STEPS,
    seeds: int = 1,
    progress: Progress | None = None,
) -> list[Result]:
    """Train with each method from the same weights on the same batches; `dense` comes first."""
    if min(workers, steps, seeds) < 1:
        raise ConfigError(f"workers, steps and seeds must be 1 or more, not {workers}, {steps}, {seeds}")
    load("digits")
    strings = line_up(chosen)
    on_report = from_rank_0(progress)
    ranks = run_local(_work, workers, strings, steps, seeds, timeout=7200, on_report=on_report)
    outcomes = cast("list[dict[str, Any]]", ranks[0])
    dense = outcomes[0]["sent"]
    return [Result(**one, ratio=one["sent"] / dense if dense else 1.0) for one in outcomes]


def _work(worker: Worker, strings: Sequence[str], steps: int, seeds: int) -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = []
    for method in strings:
        runs = [_train(worker, method, steps, seed) for seed in range(seeds)]
        figures = {key: sum(run[key] for run in runs) / seeds for key in runs[0]}
        outcomes.append({"method": method, **figures})
    return outcomes


def _train(worker: Worker, method: str, steps: int, seed: int) -> dict[str, float]:
    from thinwire.hosts import attach

    data = load("digits")
    bare = build("mlp", data, seed)
    model = DistributedDataParallel(bare)
    # Without momentum: what random selections hold back comes in bursts, which momentum makes worse.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session = attach(model, method, optimizer=optimizer)
    order = torch.Generator().manual_seed(1 + seed)
    last = torch.zeros(())
    for _ in range(steps):
        rows = torch.randint(len(data.inputs), (worker.size, BATCH), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        optimizer.zero_grad()
        last = loss(data, model(inputs), targets)
        last.backward()
        optimizer.step()
        worker.report(method)
    if session.reconcile_every is not None:
        session.reconcile()
    meter = session.meter.total
    session.detach()
    return {
        "accuracy": evaluate(bare, data)[1],
        "payload": meter.payload_bytes / steps,
        "rounds": meter.operations / steps,
        "sent": meter.sent_bytes / steps,
        "loss": float(last.detach()),
    }
