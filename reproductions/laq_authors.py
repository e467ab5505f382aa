"""LAQ and SLAQ at their authors' settings: softmax regression on MNIST, pixels from 0 to 1, ten workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import torch

from reproductions.base import Context, Outcome
from reproductions.cohort import Cohort, Recipe, images
from thinwire.convex import Descent, Objective, lazy_gd, softmax_regression
from thinwire.methods.families.lazy import Counts, Lazy
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.models import evaluate

WORKERS = 10
STEP, WINDOW, XI, BITS, MAX_SKIP, GAP = 0.02, 10, 0.08, 4, 100, 1e-6
PUBLISHED = (2673, 620, 1.95e7)
"""Iterations, uploads and bits of LAQ until the loss is within 1e-6 of the optimum."""
WITHIN = 0.05
MOST_UPLOADS, MOST_POINTS = 0.05, 0.5
MEAN, DEVIATION = 0.1307, 0.3081
"""By which `mnist` standardises its pixels."""


def pixels(context: Context) -> Dataset:
    """MNIST with pixels from 0 to 1; the digits have such pixels already."""
    data = images(context)
    if data.name == "digits":
        return data

    def raw(inputs: torch.Tensor) -> torch.Tensor:
        return ((inputs * DEVIATION + MEAN) * 255).round() / 255

    return replace(data, inputs=raw(data.inputs), test_inputs=raw(data.test_inputs))


class Headline(msgspec.Struct):
    """When LAQ reached the gap."""

    iterations: int
    uploads: int
    bits: float


def headline(data: Dataset, iterations: int) -> Headline:
    shares = softmax_regression(data.inputs.flatten(1), data.targets, workers=WORKERS, classes=data.classes)
    start = torch.zeros((data.inputs[0].numel() + 1) * data.classes, dtype=torch.float64)
    how = Descent("laq", STEP, window=WINDOW, xi=XI, bits=BITS, max_skip=MAX_SKIP)
    last = lazy_gd(shares, start, how, iterations=iterations, optimum=optimum(shares, start), gap=GAP).last
    return Headline(last.number, last.uploads, last.bits)


def optimum(shares: list[Objective], start: torch.Tensor) -> float:
    """The smallest loss, by L-BFGS."""
    theta = start.clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [theta], max_iter=500, history_size=30, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        both = [share.value_and_slope(theta.detach()) for share in shares]
        theta.grad = torch.stack([slope for _, slope in both]).sum(0)
        return torch.tensor([value for value, _ in both], dtype=torch.float64).sum()

    solver.step(closure)
    return float(closure())


def uploads_of(cohort: Cohort) -> int:
    """How often the workers have uploaded so far, all together."""
    if not isinstance(cohort.exchange, Lazy):
        return cohort.steps * cohort.recipe.workers
    known = [session.engine.states.entries() for session in cohort.sessions]
    counts = [fields["counts"] for own in known for fields in own.values() if "counts" in fields]
    return sum(Counts.of(each).uploads for each in counts)


class Stochastic(msgspec.Struct):
    """Uploads of all workers, and the test accuracy at the end."""

    uploads: int
    accuracy: float


def stochastic(method: str, recipe: Recipe, data: Dataset) -> Stochastic:
    cohort = Cohort(method, recipe, data)
    for _ in cohort.run():
        pass
    return Stochastic(uploads_of(cohort), evaluate(cohort.models[0], data)[1])


def add(context: Context, outcome: Outcome) -> None:
    """LAQ's claim fails if a figure is off by 5 %; SLAQ's if it uploads more than 5 % or loses 0.5 points."""
    data = pixels(context)
    found = context.once(headline, data, 30 if context.quick else 4000)
    outcome.claim(
        "LAQ on MNIST, 10 workers, 4 bits, gap 1e-6: iterations, uploads, bits",
        "{:,}, {:,}, {:.3g}".format(*PUBLISHED),
        f"{found.iterations:,}, {found.uploads:,}, {found.bits:.3g}",
        all(
            abs(ours / theirs - 1) <= WITHIN
            for ours, theirs in zip((found.iterations, found.uploads, found.bits), PUBLISHED, strict=True)
        ),
    )
    steps, batch = (20, 32) if context.quick else (1000, 500)
    recipe = Recipe("logistic", WORKERS, steps, batch=batch, learning_rate=0.08)
    methods = ("dense", "qsgd(bits=4)", "slaq(bits=3)", "slaq(bits=4)", "slaq(bits=4, allowance=0.2)")
    runs = context.each({m: partial(stochastic, m, recipe, data) for m in methods}, f"{data.name}, logistic")
    outcome.table(
        f"{data.name}, logistic regression, pixels from 0 to 1, {WORKERS} workers, batches of {batch}, "
        f"{steps:,} steps",
        {"method": "", "uploads": ",", "of all": ".2%", "accuracy": ".2%"},
        [(name, one.uploads, one.uploads / (steps * WORKERS), one.accuracy) for name, one in runs.items()],
    )
    qsgd, slaq = runs["qsgd(bits=4)"], runs["slaq(bits=4)"]
    outcome.claim(
        "slaq(bits=4) uploads a small part of what qsgd(bits=4) uploads, at its accuracy",
        "few uploads (authors' figures)",
        f"{100 * slaq.uploads / qsgd.uploads:.1f} % of the uploads, {100 * slaq.accuracy:.2f} % "
        f"against {100 * qsgd.accuracy:.2f} %",
        slaq.uploads <= MOST_UPLOADS * qsgd.uploads and 100 * (qsgd.accuracy - slaq.accuracy) <= MOST_POINTS,
    )
