"""Training on local workers, with the distribution of their gradients learned in 4 KB per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

import torch

from thinwire import log
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse_exchange
from thinwire.net.launch import Worker, run_local
from thinwire.sessions.gradient import Session
from thinwire.sessions.histogram import Histogram
from thinwire.tools.gradients.bound import Loss, lost_by_topk
from thinwire.tools.gradients.fits import Fit, fit_all
from thinwire.tools.workloads import MODELS, build, load
from thinwire.tools.workloads.models import TEXT_MODELS, loss

_EMBEDDED = {"images": "digits", "text": "synthetic"}
PHASES = 4
SHOWN_RATIOS = (0.001, 0.01, 0.1)
"""Where the loss of top-k is printed."""


@dataclass(frozen=True)
class Study:
    """What to train, on what, and how."""

    model: str = "mlp"
    data: str = "digits"
    workers: int = 2
    steps: int = 100
    batch: int = 32
    rate: float = 0.1
    ratio: float = 0.01
    method: str = "dense"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.workers, self.steps, self.batch) < 1:
            raise ConfigError("workers, steps and batch must be 1 or more")
        if not 0.0 < self.ratio < 1.0:
            raise ConfigError(f"ratio must be between 0 and 1, not {self.ratio!r}")
        if not 0.0 < self.rate < math.inf:
            raise ConfigError(f"the learning rate must be above 0, not {self.rate!r}")


@dataclass(frozen=True)
class Step:
    """One step's thresholds: the real one, the one learned by the histogram, and those of the two fits."""

    step: int
    loss: float
    real: float
    learned: float
    gaussian: float
    laplace: float
    gaussian_share: float
    laplace_share: float
    """Which share of the entries the fits' thresholds would really select."""


@dataclass(frozen=True)
class Findings:
    """Every step, the histograms of `PHASES` equal parts of the run, and what learning them cost a worker.

    `losses` are of rank 0 at the end of each part. With a method that keeps residuals all of it is about
    residual + gradient, because that is what the method selects from.
    """

    study: Study
    steps: tuple[Step, ...]
    phases: tuple[Histogram, ...]
    losses: tuple[Loss, ...]
    histogram_bytes: float
    gradient_bytes: int

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        """To the last part of the run."""
        return fit_all(self.phases[-1])

    def to_json(self) -> dict[str, Any]:
        fits = [{**asdict(fit), "shape": None if math.isnan(fit.shape) else fit.shape} for fit in self.fits]
        return {**asdict(self), "fits": fits, "edges": list(Histogram.edges())}


def data_of(models: str, specs: Sequence[str]) -> dict[str, str]:
    """The data that each model learns: the given set of its kind, or the one that comes with this package.

    Args:
        models: names with commas between them, or `all`.
        specs: at most one set of images and one of text.
    """
    names = MODELS if models == "all" else tuple(dict.fromkeys(models.split(",")))
    given: dict[str, str] = {}
    for spec in specs:
        kind = load(spec).kind
        if kind in given:
            raise ConfigError(f"--data: {given[kind]} and {spec} are both {kind}; give one of them")
        given[kind] = spec
    found = {name: _EMBEDDED["text" if name in TEXT_MODELS else "images"] for name in names}
    for kind, spec in given.items():
        learners = [name for name in names if found[name] == _EMBEDDED[kind]]
        if not learners:
            build(names[0], load(spec), 0)  # says what it learns instead
        found |= dict.fromkeys(learners, spec)
    return found


def run(study: Study, progress: Callable[[int, float], None] | None = None) -> Findings:
    """Train on local workers; every step's histogram is learned from all of them before the average."""
    parse_exchange(study.method)
    build(study.model, load(study.data), study.seed)  # errors are raised here, once

    def on_report(rank: int, message: tuple[int, float]) -> None:
        if rank == 0 and progress is not None:
            progress(*message)

    ranks = run_local(_train, study.workers, study, timeout=7200, on_report=on_report)
    if isinstance(ranks[0], int):
        raise ConfigError(
            f"gradients are not finite any more at step {ranks[0]}: use a smaller learning rate"
        )
    return cast(Findings, ranks[0])


def _train(worker: Worker, study: Study) -> Findings | int | None:
    """Rank 0 has the findings; a number is the step at which the training broke down."""
    log.quiet()
    data = load(study.data)
    model = build(study.model, data, study.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=study.rate)
    session = Session(model.named_parameters(), study.method, optimizer=optimizer)
    order = torch.Generator().manual_seed(1 + study.seed)
    steps: list[Step] = []
    phases: list[Histogram] = []
    losses: list[Loss] = []
    spent, parts = 0, min(PHASES, study.steps)
    for number in range(study.steps):
        rows = torch.randint(len(data.inputs), (study.workers, study.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        optimizer.zero_grad()
        error = loss(data, model(inputs), targets)
        cast(Any, error).backward()
        before = session.meter.sent_bytes
        vectors = _selected_from(session)
        found = session.histogram(vectors, ratio=study.ratio)
        if found.not_finite:  # equal on all ranks
            return number
        spent += session.meter.sent_bytes - before
        if number * parts // study.steps == len(phases):
            phases.append(found)
        else:
            phases[-1] = phases[-1].plus(found)
        if worker.rank == 0 and (number + 1) * parts // study.steps == len(phases):
            losses.append(lost_by_topk(torch.cat([v.flatten() for v in vectors.values()]), *SHOWN_RATIOS))
        steps.append(_step(number, float(error.detach()), found, study.ratio))
        session.average({name: p.grad for name, p in model.named_parameters()}, in_place=True)
        optimizer.step()
        worker.report((number + 1, float(error.detach())))
    session.detach()
    findings = Findings(
        study, tuple(steps), tuple(phases), tuple(losses), spent / study.steps, session.dense_bytes
    )
    return findings if worker.rank == 0 else None


def _selected_from(session: Session) -> dict[str, torch.Tensor]:
    """This rank's gradients, with what the method has not sent yet."""
    residuals = session.residuals()
    own = {name: p.grad for name, p in session.engine.parameters.items() if p.grad is not None}
    return {name: g + residuals[name].view_as(g) if name in residuals else g for name, g in own.items()}


def _step(number: int, loss: float, found: Histogram, ratio: float) -> Step:
    gaussian, laplace = found.gaussian_threshold(ratio), found.laplace_threshold(ratio)
    return Step(
        number,
        loss,
        found.real_threshold,
        found.threshold(ratio),
        gaussian,
        laplace,
        found.share_above(gaussian),
        found.share_above(laplace),
    )
