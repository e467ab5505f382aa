"""LAG: uploads until the loss is within 1e-8 of the optimum, on the paper's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import torch

from reproductions.base import Context, Outcome, Reproduction
from thinwire.convex import Descent, Known, Objective, lazy_gd
from thinwire.convex.options import Algorithm
from thinwire.convex.problems import SquaresShare, increasing_smoothness
from thinwire.tools.report.figures import Curve
from thinwire.tools.workloads import data as datasets

GAP = 1e-8
LAMBDA = 1e-4
"""The weight of the l2 term of each worker, as in the authors' script."""
LINEAR, LOGISTIC, CORRECTED = "linear", "logistic", "logistic, labels corrected"
SETS = {
    LINEAR: ("housing", "bodyfat", "abalone417"),
    LOGISTIC: ("ionosphere", "adult_a1a", "derm"),
    CORRECTED: ("ionosphere", "adult_a1a", "derm"),
}
SYNTHETIC = "synthetic, increasing smoothness"
ALGORITHMS: tuple[Algorithm, ...] = ("gd", "lag-ps", "lag-wk")
PLAIN, AUTHORS = "first iteration uploads", "authors' start"
# Uploads with 9 workers: as printed in the paper (remembered), and an independent run for the last three.
PUBLISHED: dict[str, dict[Algorithm, int]] = {
    LINEAR: {"gd": 5283, "lag-ps": 1756, "lag-wk": 412},
    LOGISTIC: {"gd": 33309, "lag-ps": 14423, "lag-wk": 584},
    CORRECTED: {"gd": 4923, "lag-ps": 1997, "lag-wk": 353},
}
Rows = tuple[torch.Tensor, torch.Tensor]


class Squares(SquaresShare):
    """A worker's 0.5 |X theta - y|^2."""

    @property
    def smoothness(self) -> float:
        return _largest(self.x)


@dataclass(frozen=True)
class Logistic:
    """A worker's sum log(1 + exp(-y x theta)) + LAMBDA/2 |theta|^2; labels of 0 have no gradient."""

    x: torch.Tensor
    y: torch.Tensor

    def loss(self, theta: torch.Tensor) -> torch.Tensor:
        fits = torch.nn.functional.softplus(-self.y * (self.x @ theta)).sum()
        return fits + 0.5 * LAMBDA * theta.square().sum()

    def gradient(self, theta: torch.Tensor) -> torch.Tensor:
        return LAMBDA * theta - self.x.T @ (self.y * torch.sigmoid(-self.y * (self.x @ theta)))

    @property
    def smoothness(self) -> float:
        return 0.25 * _largest(self.x) + LAMBDA


def _largest(x: torch.Tensor) -> float:
    return float(cast(torch.Tensor, torch.linalg.eigvalsh(x.T @ x))[-1])


@dataclass(frozen=True)
class Problem:
    """Workers' shares, their smoothness, the step size 1/L of the sum, and the smallest loss."""

    objectives: list[Objective]
    smoothness: tuple[float, ...]
    step: float
    optimum: float
    entries: int


def shares(rows: Sequence[Rows], per_set: int) -> list[Rows]:
    """Every set is cut into equal parts, one for each of its workers; what is left over is left out."""
    found: list[Rows] = []
    for x, y in rows:
        length = len(x) // per_set
        found += [
            (x[length * n : length * (n + 1)], y[length * n : length * (n + 1)]) for n in range(per_set)
        ]
    return found


def linear(rows: Sequence[Rows]) -> Problem:
    parts = [Squares(x, y) for x, y in rows]
    x, y = torch.cat([one.x for one in parts]), torch.cat([one.y for one in parts])
    best = cast(torch.Tensor, torch.linalg.solve(x.T @ x, x.T @ y))
    return _problem(parts, 1.0 / _largest(x), best)


def logistic(rows: Sequence[Rows]) -> Problem:
    parts = [Logistic(x, y) for x, y in rows]
    x, y = torch.cat([one.x for one in parts]), torch.cat([one.y for one in parts])
    best = torch.zeros(x.shape[1], dtype=torch.float64)
    ridge = len(parts) * LAMBDA
    for _ in range(60):  # Newton's method
        slope = torch.sigmoid(-y * (x @ best))
        gradient = ridge * best - x.T @ (y * slope)
        hessian = x.T @ (x * (slope * (1 - slope) * y.square())[:, None]) + ridge * torch.eye(x.shape[1])
        best = best - cast(torch.Tensor, torch.linalg.solve(hessian, gradient))
    return _problem(parts, 1.0 / (0.25 * _largest(x) + LAMBDA), best)


def _problem(parts: Sequence[Squares | Logistic], step: float, best: torch.Tensor) -> Problem:
    objectives = [Objective(one.loss, one.gradient) for one in parts]
    optimum = sum(objective.value(best) for objective in objectives)
    return Problem(objectives, tuple(one.smoothness for one in parts), step, optimum, best.numel())


def increasing(workers: int, seed: int = 0) -> Problem:
    """The paper's synthetic problem: worker m's smoothness grows with m."""
    return linear([(share.x, share.y) for share in increasing_smoothness(workers, seed=seed)])


@dataclass(frozen=True)
class Task:
    """One of the paper's problems, cut for so many workers; `data` has the sets."""

    name: str
    workers: int
    data: Path | None = field(default=None, repr=False)

    def problem(self) -> Problem:
        if self.data is None:
            return increasing(self.workers)
        # Cut to the smallest number of features.
        sets = [datasets.lag(self.data, name) for name in SETS[self.name]]
        features = min(x.shape[1] for x, _ in sets)
        rows = [(torch.from_numpy(x[:, :features].copy()), torch.from_numpy(y)) for x, y in sets]
        if self.name == CORRECTED:
            rows = [(x, torch.where(y == 0, -1.0, y)) for x, y in rows]
        return (linear if self.name == LINEAR else logistic)(shares(rows, self.workers // len(sets)))


def nine_workers(context: Context) -> Task:
    """The linear problem, or a synthetic one where there is no data."""
    return Task(LINEAR, 9, context.data) if context.has_data else Task(SYNTHETIC, 9)


class Run(msgspec.Struct):
    """Until the gap is reached. `curve` has (uploads, gap) of some points on the way."""

    iterations: int
    uploads: int
    bits: int
    gradients: int
    silence: int
    curve: list[tuple[int, float]]


def descend(
    problem: Problem, how: Descent, start: str = PLAIN, iterations: int = 20_000, shift: float = 0.0
) -> Run:
    """Descend until the gap is reached.

    The authors' script begins with gradients of ones that no worker has computed: plain gradient descent
    makes one step with a single such vector, LAG as many as the window is long with one from each worker, and
    only then applies its rule. That is another starting point, with known gradients.
    """
    workers, zero = len(problem.objectives), torch.zeros(problem.entries, dtype=torch.float64)
    ones, known, skipped = torch.ones_like(zero), None, 0
    theta = zero + shift
    if start == AUTHORS:
        if how.algorithm == "gd":
            skipped, theta = 1, theta - how.step * ones
        else:
            step = how.step * workers * ones
            skipped = how.window
            known = Known([ones] * workers, [theta] * workers, [float(step.square().sum())] * how.window)
            theta = theta - how.window * step
    trace = lazy_gd(
        problem.objectives, theta, how, iterations=iterations, optimum=problem.optimum, gap=GAP, known=known
    )
    last, counted = trace.last, skipped * workers if how.algorithm == "gd" else 0
    every = max(1, len(trace.iterations) // 60)
    return Run(
        last.number + skipped,
        last.uploads + counted,
        bits=last.bits + counted * last.bits // max(1, last.uploads),
        gradients=last.gradients,
        silence=max(max(one.silence) for one in trace.iterations),
        curve=[(one.uploads + counted, cast(float, one.gap)) for one in trace.iterations[::every]],
    )


def measure(task: Task, algorithm: Algorithm, start: str, shift: float = 0.0) -> Run:
    problem = task.problem()
    smoothness = problem.smoothness if algorithm == "lag-ps" else None
    # In float64 on the wire, too, as the authors' script computes.
    how = Descent(algorithm, problem.step, smoothness=smoothness, float_bits=64)
    return descend(problem, how, start, shift=shift)


def sensitivity(task: Task) -> list[int]:
    """Uploads of LAG-WK from starts that hardly differ."""
    return [measure(task, "lag-wk", AUTHORS, n * 1.25e-12).uploads for n in range(1, 9)]


def gap_figure(outcome: Outcome, title: str, runs: Mapping[str, Run]) -> None:
    curves: dict[str, Curve] = {
        name: ([uploads for uploads, _ in one.curve], [gap for _, gap in one.curve])
        for name, one in runs.items()
    }
    outcome.figure(title, curves, "uploads", "gap", log="xy")


def run(context: Context) -> Outcome:
    torch.set_num_threads(1)  # vectors of 8 and 34 entries
    if context.quick:
        tasks = [nine_workers(context)]
    else:
        tasks = [Task(name, workers, context.data) for name in SETS for workers in (9, 18, 27)]
    outcome = Outcome(judged=not context.quick)
    found: dict[tuple[str, int], dict[tuple[Algorithm, str], Run]] = {}
    for task in tasks:
        title = f"{task.name}, {task.workers} workers"
        parts: dict[tuple[Algorithm, str], partial[Run]] = {
            (algorithm, start): partial(measure, task, algorithm, start)
            for algorithm in ALGORITHMS
            for start in ((PLAIN, AUTHORS) if task.workers == 9 or algorithm == "gd" else (PLAIN,))
        }
        runs = found[task.name, task.workers] = context.each(parts, f"{title},")
        plain = runs["gd", PLAIN].uploads
        outcome.table(
            f"{title}: until the loss is within {GAP:g} of the optimum",
            {
                "algorithm": "",
                "start": "",
                "iterations": ",",
                "uploads": ",",
                "of GD": ".2%",
                "gradients": ",",
            },
            [
                (*key, one.iterations, one.uploads, one.uploads / plain, one.gradients)
                for key, one in runs.items()
            ],
        )
        plain_runs = {algorithm: one for (algorithm, start), one in runs.items() if start == PLAIN}
        gap_figure(outcome, f"{title}: gap against uploads", plain_runs)
    if not context.quick:
        _judge(context, outcome, {name: runs for (name, workers), runs in found.items() if workers == 9})
    return outcome


def _judge(context: Context, outcome: Outcome, found: dict[str, dict[tuple[Algorithm, str], Run]]) -> None:
    for name, figures in PUBLISHED.items():
        source = "independent run" if name == CORRECTED else "paper, remembered"
        for algorithm, figure in figures.items():
            plain, theirs = (found[name][algorithm, start].uploads for start in (PLAIN, AUTHORS))
            note = ""
            if algorithm == "lag-wk":
                counts = context.once(sensitivity, Task(name, 9, context.data))
                if min(counts) < max(counts):
                    note = (
                        f"which worker exceeds the bound depends on the last digits: {min(counts)} to "
                        f"{max(counts)} uploads from 8 starts that differ by up to 1e-11"
                    )
            outcome.claim(
                f"{name}, 9 workers, {algorithm}: uploads",
                f"{figure:,} ({source})",
                f"{theirs:,} with the {AUTHORS}; {plain:,} if the {PLAIN}",
                theirs == figure if algorithm == "gd" else abs(theirs - figure) <= 0.02 * figure,
                note,
            )
    fixed, published = (
        found[name]["gd", AUTHORS].uploads / found[name]["lag-wk", AUTHORS].uploads
        for name in (CORRECTED, LOGISTIC)
    )
    outcome.notes += [
        "Two of the three logistic sets ship labels of 0 and 1 for a loss that expects -1 and 1, so samples "
        f"of label 0 have no gradient. The published factor of GD over LAG-WK ({published:.0f}) needs that; "
        f"with corrected labels it is {fixed:.1f}.",
        "All numbers are float64, uploads included; claims are judged by the authors' start. Uploads count "
        "as in the paper, those of the last iteration included; flags and downloads are not counted.",
    ]


REPRODUCTION = Reproduction(
    "Lazily aggregated gradients: uploads to a loss",
    "Chen, Giannakis, Sun and Yin, LAG: lazily aggregated gradient for communication-efficient distributed "
    "learning, 2018.",
    run,
    methods=("lag",),
)
