"""LAG: uploads until the loss is within 1e-8 of the optimum, on the paper's own data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from reproductions.base import Claim, Context, Outcome, Reproduction
from thinwire.convex import Descent, Known, Objective, lazy_gd
from thinwire.convex.options import Algorithm
from thinwire.tools.report.figures import lines
from thinwire.tools.workloads import data as datasets

GAP = 1e-8
LAMBDA = 1e-4
"""The weight of the l2 term of each worker, as in the authors' script."""
LINEAR = ("linear", ("housing", "bodyfat", "abalone417"))
LOGISTIC = ("logistic", ("ionosphere", "adult_a1a", "derm"))
ALGORITHMS: tuple[Algorithm, ...] = ("gd", "lag-ps", "lag-wk")
PLAIN, AUTHORS = "first iteration uploads", "authors' start"
# Uploads with 9 workers: as printed in the paper (remembered), and an independent run for the last three.
PUBLISHED: dict[str, dict[str, int]] = {
    "linear": {"gd": 5283, "lag-ps": 1756, "lag-wk": 412},
    "logistic": {"gd": 33309, "lag-ps": 14423, "lag-wk": 584},
    "logistic, labels corrected": {"gd": 4923, "lag-ps": 1997, "lag-wk": 353},
}
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Squares:
    """A worker's 0.5 |X theta - y|^2."""

    x: torch.Tensor
    y: torch.Tensor

    def loss(self, theta: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.x @ theta - self.y).square().sum()

    def gradient(self, theta: torch.Tensor) -> torch.Tensor:
        return self.x.T @ (self.x @ theta - self.y)

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
    """The paper's synthetic problem: X_m = 1.3^(m-1) q q' + I, so worker m's smoothness grows with m."""
    rng = torch.Generator().manual_seed(seed)
    rows: list[Rows] = []
    for worker in range(workers):
        q = torch.nn.functional.normalize(torch.randn(50, generator=rng, dtype=torch.float64), dim=0)
        x = 1.3**worker * torch.outer(q, q) + torch.eye(50, dtype=torch.float64)
        rows.append((x, torch.randn(50, generator=rng, dtype=torch.float64)))
    return linear(rows)


def load(context: Context, names: Sequence[str]) -> list[Rows]:
    """The sets of a task, cut to the smallest number of features."""
    sets = [datasets.lag(context.data, name) for name in names]
    features = min(x.shape[1] for x, _ in sets)
    return [(torch.from_numpy(x[:, :features].copy()), torch.from_numpy(y)) for x, y in sets]


def descend(
    problem: Problem, how: Descent, start: str = PLAIN, iterations: int = 20_000, shift: float = 0.0
) -> dict[str, Any]:
    """Iterations, uploads and bits until the gap is reached, and some points on the way, as JSON.

    The authors' script begins with gradients of ones that nobody has computed: plain gradient descent makes
    one step with a single such vector, LAG as many as the window is long with one from each worker, and
    only then looks at its rule. That is a start from somewhere, with something known.
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
    points = [(one.uploads + counted, one.gap) for one in trace.iterations[::every]]
    return {
        "iterations": last.number + skipped,
        "uploads": last.uploads + counted,
        "bits": last.bits + counted * last.bits // max(1, last.uploads),
        "gradients": last.gradients,
        "silence": max(max(one.silence) for one in trace.iterations),
        "reached": last.gap is not None and last.gap < GAP,
        "curve": points,
    }


def curve(value: dict[str, Any]) -> tuple[list[float], list[float]]:
    return [uploads for uploads, _ in value["curve"]], [gap for _, gap in value["curve"]]


def _descent(problem: Problem, algorithm: Algorithm) -> Descent:
    smoothness = problem.smoothness if algorithm == "lag-ps" else None
    # In float64 on the wire, too, as the authors' script computes.
    return Descent(algorithm, problem.step, smoothness=smoothness, float_bits=64)


def run(context: Context) -> Outcome:
    torch.set_num_threads(1)  # vectors of 8 and 34 entries
    outcome = Outcome()
    problems = _quick_problems(context) if context.quick else _problems(context)
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    todo = [(task, workers, a) for task, workers in problems for a in ALGORITHMS]
    for number, (task, workers, algorithm) in enumerate(todo):
        context.progress(f"{task}, {workers} workers, {algorithm}", number, len(todo))
        make = problems[task, workers]
        for start in (PLAIN, AUTHORS) if workers == 9 or algorithm == "gd" else (PLAIN,):
            key = f"{task} {workers} {algorithm} {start} float64"
            value = context.once(key, lambda m=make, a=algorithm, s=start: _run(m(), cast(Algorithm, a), s))
            found.setdefault((task, workers), {})[f"{algorithm} {start}"] = value
    for (task, workers), runs in found.items():
        header = ("algorithm", "start", "iterations", "uploads", "of GD", "gradients")
        plain = runs[f"gd {PLAIN}"]["uploads"]
        rows = [
            (
                algorithm,
                start,
                f"{value['iterations']:,}",
                f"{value['uploads']:,}",
                f"{100 * value['uploads'] / plain:.2f} %",
                f"{value['gradients']:,}",
            )
            for name, value in runs.items()
            for algorithm, start in (name.split(" ", 1),)
        ]
        outcome.table(
            f"{task}, {workers} workers: until the loss is within {GAP:g} of the optimum", header, rows
        )
        outcome.figures[f"{task}, {workers} workers: gap against uploads"] = lines(
            {name.split(" ")[0]: curve(value) for name, value in runs.items() if PLAIN in name},
            "uploads",
            "gap",
            log_x=True,
            log_y=True,
        )
    if not context.quick:
        _judge(context, problems, found, outcome)
    return outcome


def _run(problem: Problem, algorithm: Algorithm, start: str) -> dict[str, Any]:
    return descend(problem, _descent(problem, algorithm), start)


def _problems(context: Context) -> dict[tuple[str, int], Callable[[], Problem]]:
    found: dict[tuple[str, int], Callable[[], Problem]] = {}
    for (task, names), corrected in ((LINEAR, False), (LOGISTIC, False), (LOGISTIC, True)):
        rows = load(context, names)
        if corrected:
            rows = [(x, torch.where(y == 0, -1.0, y)) for x, y in rows]
        title = f"{task}, labels corrected" if corrected else task
        make = linear if task == "linear" else logistic
        for per_set in (3, 6, 9):
            cut = shares(rows, per_set)
            found[title, 3 * per_set] = lambda make=make, cut=cut: make(cut)
    return found


def _quick_problems(context: Context) -> dict[tuple[str, int], Callable[[], Problem]]:
    if context.has_data:
        return {
            (task, w): make for (task, w), make in _problems(context).items() if (task, w) == ("linear", 9)
        }
    return {("synthetic, increasing smoothness", 9): lambda: increasing(9)}


def _judge(
    context: Context,
    problems: dict[tuple[str, int], Callable[[], Problem]],
    found: dict[tuple[str, int], dict[str, dict[str, Any]]],
    outcome: Outcome,
) -> None:
    for task, figures in PUBLISHED.items():
        runs = found[task, 9]
        for algorithm, figure in figures.items():
            plain, theirs = (runs[f"{algorithm} {start}"]["uploads"] for start in (PLAIN, AUTHORS))
            ours = f"{theirs:,} with the {AUTHORS}; {plain:,} if the {PLAIN}"
            note = ""
            holds = theirs == figure if algorithm == "gd" else abs(theirs - figure) <= 0.02 * figure
            if algorithm == "lag-wk":
                low, high = _sensitivity(context, task, problems[task, 9])
                if low < high:
                    note = (
                        f"which worker is just above the bound hangs on the last digits: {low} to {high} "
                        "uploads from 8 starts that differ by up to 1e-11"
                    )
            source = "independent run" if "corrected" in task else "paper, remembered"
            outcome.claims.append(
                Claim(f"{task}, 9 workers, {algorithm}: uploads", f"{figure:,} ({source})", ours, holds, note)
            )
    fixed, published = (
        found[task, 9][f"gd {AUTHORS}"]["uploads"] / found[task, 9][f"lag-wk {AUTHORS}"]["uploads"]
        for task in ("logistic, labels corrected", "logistic")
    )
    outcome.notes.append(
        f"Two of the three logistic sets ship labels of 0 and 1 for a loss that expects -1 and 1, so samples "
        f"of label 0 have no gradient. The published factor of GD over LAG-WK ({published:.0f}) needs that; "
        f"with corrected labels it is {fixed:.1f}."
    )
    outcome.notes.append(
        "All numbers are float64, uploads included; verdicts go by the authors' start. Uploads count "
        "as in the paper, those of the last iteration included; flags and downloads are not counted."
    )


def _sensitivity(context: Context, task: str, make: Callable[[], Problem]) -> tuple[int, int]:
    """The fewest and the most uploads of LAG-WK over starts that hardly differ."""

    def measure() -> list[int]:
        problem = make()
        how = _descent(problem, "lag-wk")
        return [descend(problem, how, AUTHORS, shift=n * 1.25e-12)["uploads"] for n in range(1, 9)]

    counts = context.once(f"{task} 9 lag-wk shifted float64", measure)
    return min(counts), max(counts)


REPRODUCTION = Reproduction(
    "Lazily aggregated gradients: uploads to a loss",
    "Chen, Giannakis, Sun and Yin, LAG: lazily aggregated gradient for communication-efficient distributed "
    "learning, 2018.",
    run,
    methods=("lag",),
)
