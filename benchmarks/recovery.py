"""How many columns a sketch needs: what `sketched` recovers of the largest entries while real models train.

A step may send so many numbers: rows x columns of the table and P k candidates. Few columns leave more of
them to candidates, but the table then finds fewer of the largest entries. Every split trains the model for
itself, because what was not sent stays in the vector that is sketched next. One worker with the whole batch
stands for all, since the mean of sketches is the sketch of the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.common import Progress, measuring, show
from thinwire.drivers.lockstep import Lockstep
from thinwire.errors import ConfigError
from thinwire.methods import Sketched
from thinwire.methods.families.sketch import COLS_PER_ENTRY, FEWEST_COLS
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.gradient import Session
from thinwire.tools.cli.show import JsonFile, console, errors, save
from thinwire.tools.workloads import build, load
from thinwire.tools.workloads.models import loss

BATCH = 32
BUDGETS = (0.05, 0.2)
"""Numbers sent per step, by those of the gradient."""
COLUMNS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Columns of the table for each entry that is sent."""
NEARLY = 0.95


@dataclass(frozen=True)
class Case:
    """A model, its data (below `--data DIR`, if they are not embedded), and whether it chooses or judges."""

    model: str
    data: str
    rate: float
    chooses: bool

    @property
    def embedded(self) -> bool:
        return ":" not in self.data

    def spec(self, folder: Path | None) -> str:
        kind, _, place = self.data.partition(":")
        return kind if folder is None or self.embedded else f"{kind}:{folder / place}"


CASES = (
    Case("mlp", "digits", 0.05, chooses=True),
    Case("cnn", "digits", 0.05, chooses=True),
    Case("transformer", "text:tinyshakespeare/input.txt", 0.02, chooses=True),
    Case("mlp", "mnist:mnist", 0.02, chooses=False),
    Case("resnet20", "cifar10:cifar10", 0.01, chooses=False),
    Case("lstm", "text:wikitext-2/valid.txt", 0.1, chooses=False),
)


@dataclass(frozen=True)
class Row:
    """One split of one budget, over the second half of a short training.

    found: the share of the k largest entries that are sent. kept: the squared norm of the entries that are
    sent over that of the k largest. sent: by how much the squared norm of all shrinks if what is sent is
    subtracted, the contraction of the paper. loss: of the last quarter.
    """

    model: str
    data: str
    chooses: bool
    budget: float
    columns: float
    k: int
    cols: int
    found: float
    kept: float
    sent: float
    loss: float


def command(
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with mnist, cifar10, tinyshakespeare and wikitext-2; else digits only."
        ),
    ] = None,
    only: Annotated[str, typer.Option(help='Only these cases, such as "mlp" or "digits".')] = "",
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each run.")] = 24,
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 5,
    candidates: Annotated[int, typer.Option(min=1, help="P.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and hash functions.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """What `sketched` recovers at equal bytes, by the columns of its table."""
    with errors():
        cases = [c for c in CASES if (c.embedded or data is not None) and only in f"{c.model} {c.data}"]
        if not cases:
            names = ", ".join(f"{case.model} {case.data}" for case in CASES)
            raise ConfigError(f"--only {only}: no case of {names}; those with a colon need --data")
        Sketched(rows=rows, candidates=candidates)
        for case in cases:
            load(case.spec(data))
    with measuring(len(cases) * len(BUDGETS) * len(COLUMNS)) as progress:
        found = run(cases, data, steps, rows, candidates, seed=seed, progress=progress)
    show(
        f"what is recovered in {steps} steps, {rows} rows, P = {candidates}",
        found,
        {
            "model": lambda r: f"{r.model}, {r.data}",
            "budget": lambda r: f"{100 * r.budget:.0f} %",
            "columns": lambda r: f"{r.columns:g} k",
            "k": lambda r: f"{r.k:,}",
            "found": lambda r: f"{r.found:.2f}",
            "kept": lambda r: f"{r.kept:.2f}",
            "sent": lambda r: f"{r.sent:.3f}",
            "loss": lambda r: f"{r.loss:.3f}",
        },
    )
    for chooses, who in ((True, "chosen on"), (False, "judged on")):
        own = [row for row in found if row.chooses == chooses]
        if own:
            scores = by_columns(own)
            line = ", ".join(f"{columns:g} k {score:.2f}" for columns, score in scores.items())
            models = ", ".join(dict.fromkeys(f"{row.model} ({row.data})" for row in own))
            console().print(f"{who} {models}: {line}; choice {choice(scores):g} k", markup=False)
    console().print(f"the default is {COLS_PER_ENTRY:g} k", markup=False)
    save(json_file, [asdict(row) for row in found])


def choice(scores: dict[float, float]) -> float:
    """The most columns that send nearly as much as the best: they find more of the largest entries."""
    return max(columns for columns, score in scores.items() if score >= NEARLY * max(scores.values()))


def by_columns(rows: Iterable[Row]) -> dict[float, float]:
    """What each split sends of the squared norm, by what the best of the same model and budget sends."""
    rows = list(rows)
    best: dict[tuple[str, str, float], float] = {}
    for row in rows:
        key = (row.model, row.data, row.budget)
        best[key] = max(best.get(key, 0.0), row.sent)
    shares: dict[float, list[float]] = {}
    for row in rows:
        shares.setdefault(row.columns, []).append(row.sent / best[row.model, row.data, row.budget])
    return {columns: statistics.fmean(each) for columns, each in shares.items()}


def run(
    cases: Sequence[Case],
    folder: Path | None,
    steps: int,
    rows: int = 5,
    candidates: int = 4,
    budgets: Sequence[float] = BUDGETS,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Row]:
    found: list[Row] = []
    for case in cases:
        for budget in budgets:
            for columns in COLUMNS:
                if progress is not None:
                    progress(f"{case.model} {case.data} {budget:g} {columns:g} k")
                found.append(measure(case, folder, steps, budget, columns, rows, candidates, seed))
    return found


def measure(
    case: Case,
    folder: Path | None,
    steps: int,
    budget: float,
    columns: float,
    rows: int,
    candidates: int,
    seed: int,
) -> Row:
    """Train with one split of one budget."""
    data = load(case.spec(folder))
    model = build(case.model, data, seed)
    parameters = dict(model.named_parameters())
    n = sum(parameter.numel() for parameter in parameters.values())
    k = max(1, int(budget * n / (rows * columns + candidates)))
    cols = max(FEWEST_COLS, int(columns * k))
    method = Sketched(k=k, cols=cols, rows=rows, candidates=candidates)
    if rows * cols + candidates * k >= n:
        raise ConfigError(f"a budget of {budget:g} is not smaller than the gradient itself")
    optimizer = torch.optim.SGD(parameters.values(), lr=case.rate)
    session = Session(
        parameters.items(), method, rank_info=RankInfo(0, 1), dense_below=0, optimizer=optimizer, seed=seed
    )
    network, order = Lockstep(1), torch.Generator().manual_seed(1 + seed)
    recovered: list[tuple[float, float, float]] = []
    losses: list[float] = []
    for number in range(steps):
        inputs, targets = data.batch(torch.randint(len(data.inputs), (BATCH,), generator=order))
        optimizer.zero_grad()
        value = loss(data, model(inputs), targets)
        value.backward()
        losses.append(float(value.detach()))
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        wanted = sketched_vector(session, gradients, method.momentum)
        session.engine.begin_step()
        means, views = session.engine.views(gradients, in_place=True)
        session.engine.end_step(network.run([session.engine.program(views)]))
        if number >= steps // 2:
            recovered.append(recovery(torch.cat([means[name].flatten() for name in parameters]), wanted, k))
        optimizer.step()
    found, kept, sent = (statistics.fmean(each) for each in zip(*recovered, strict=True))
    last = statistics.fmean(losses[-max(1, steps // 4) :])
    return Row(case.model, data.name, case.chooses, budget, columns, k, cols, found, kept, sent, last)


def sketched_vector(session: Session, gradients: dict[str, torch.Tensor], momentum: float) -> torch.Tensor:
    """What a session will sketch next: v + momentum u + g, of the tensors that are sketched."""
    known = session.engine.states.entries()
    parts: list[torch.Tensor] = []
    for name, gradient in gradients.items():
        state = known.get(name)
        if state is None or "v" in state:
            flat = gradient.flatten().clone()
            parts.append(flat if state is None else state["v"] + momentum * state["u"] + flat)
    return torch.cat(parts)


def recovery(sent: torch.Tensor, wanted: torch.Tensor, k: int) -> tuple[float, float, float]:
    """`found`, `kept` and `sent` of a `Row`, of the entries that are sent and of all."""
    largest, chosen = wanted.abs().topk(k).indices, sent != 0
    found = float(chosen[largest].float().mean())
    kept = float(wanted[chosen].square().sum() / wanted[largest].square().sum())
    return found, kept, 1 - float((wanted - sent).square().sum() / wanted.square().sum())
