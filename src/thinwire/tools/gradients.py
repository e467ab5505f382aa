"""A study of gradients while they train: their distribution over all workers, learned in 4 KB per step.

What it shows is the question behind Gaussian-k: does a Gaussian (or a Laplace) fitted to the gradients know
the threshold of top-k?
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from thinwire import log
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse_exchange
from thinwire.net.launch import Worker, run_local
from thinwire.sessions.gradient import Session
from thinwire.sessions.histogram import Histogram
from thinwire.tools.report.figures import Curve, lines
from thinwire.tools.report.plots.common import Figure
from thinwire.tools.workloads import build, load
from thinwire.tools.workloads.models import loss

PHASES = 4


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
    """Every step, the histograms of `PHASES` equal parts of the run, and what learning them cost a worker."""

    study: Study
    steps: tuple[Step, ...]
    phases: tuple[Histogram, ...]
    histogram_bytes: float
    gradient_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "edges": list(Histogram.edges())}


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
    spent = 0
    for number in range(study.steps):
        rows = torch.randint(len(data.inputs), (study.workers, study.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        optimizer.zero_grad()
        error = loss(data, model(inputs), targets)
        cast(Any, error).backward()
        before = session.meter.sent_bytes
        found = session.histogram(ratio=study.ratio)
        if found.not_finite:  # equal on all ranks
            return number
        spent += session.meter.sent_bytes - before
        if number * PHASES // study.steps == len(phases):
            phases.append(found)
        else:
            phases[-1] = phases[-1].plus(found)
        steps.append(_step(number, float(error.detach()), found, study.ratio))
        session.average({name: p.grad for name, p in model.named_parameters()}, in_place=True)
        optimizer.step()
        worker.report((number + 1, float(error.detach())))
    session.detach()
    findings = Findings(study, tuple(steps), tuple(phases), spent / study.steps, session.dense_bytes)
    return findings if worker.rank == 0 else None


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


def figures(findings: Findings) -> dict[str, Figure]:
    """Plots by title."""
    last, ratio = findings.phases[-1], findings.study.ratio
    magnitude, parts = "magnitude of a gradient entry", len(findings.phases)
    middles, heights = _density(last)
    fits = {
        "learned": (middles, heights),
        "Gaussian": (middles, [_gaussian(last, x) for x in middles]),
        "Laplace": (middles, [_laplace(last, x) for x in middles]),
    }
    thresholds = {
        f"top-k {ratio:g}: real": last.real_threshold,
        "Gaussian": last.gaussian_threshold(ratio),
        "Laplace": last.laplace_threshold(ratio),
    }
    density = lines(fits, magnitude, "density", log_x=True, log_y=True, verticals=thresholds)
    density["data"][0] |= {"mode": "lines+markers", "line": {**density["data"][0]["line"], "shape": "hvh"}}
    # The learned density's range: a Gaussian's tail would squeeze everything else.
    density["layout"]["yaxis"]["range"] = [math.log10(min(heights)) - 0.5, math.log10(max(heights)) + 0.5]
    phases = {f"part {number + 1} of {parts}": _density(each) for number, each in enumerate(findings.phases)}

    def by_step(*fields: str) -> dict[str, Curve]:
        steps = [step.step for step in findings.steps]
        return {field: (steps, [getattr(step, field) for step in findings.steps]) for field in fields}

    shares = {"gaussian_share": "Gaussian", "laplace_share": "Laplace"}
    return {
        "Gradient magnitudes, last quarter of the run": density,
        "Gradient magnitudes, by quarters": lines(phases, magnitude, "density", log_x=True, log_y=True),
        "Thresholds": lines(
            by_step("real", "learned", "gaussian", "laplace"),
            "step",
            f"threshold of top-k, ratio {ratio:g}",
            log_y=True,
        ),
        "What the fitted thresholds select": lines(
            {shares[field]: curve for field, curve in by_step(*shares).items()},
            "step",
            "share that is really selected",
            log_y=True,
            horizontals={"asked for": ratio},
        ),
    }


def _density(found: Histogram) -> tuple[list[float], list[float]]:
    """Of magnitudes, at the middles of the bins that have entries."""
    edges = Histogram.edges()
    full = [j for j, count in enumerate(found.counts) if count]
    middles = [math.sqrt(edges[j] * edges[j + 1]) for j in full]
    return middles, [found.counts[j] / found.total / (edges[j + 1] - edges[j]) for j in full]


def _gaussian(found: Histogram, x: float) -> float:
    scale = max(found.deviation, 1e-300)
    return math.sqrt(2.0 / math.pi) / scale * math.exp(-0.5 * (x / scale) ** 2)


def _laplace(found: Histogram, x: float) -> float:
    scale = max(found.magnitude, 1e-300)
    return math.exp(-x / scale) / scale
