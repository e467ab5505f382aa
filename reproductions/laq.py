"""LAQ: uploads and bits to a loss, on MNIST and on the data of LAG; SLAQ and LASG with minibatches.

Verdicts:
- LAQ's row on MNIST (softmax regression, 10 workers, 4 bits, the authors' random start, mean of 3 starts, the
  gap of the mean loss): fails if iterations, uploads or bits are off by more than 5 %. So do the rows of GD,
  QGD and LAG, from one start.
- LAQ, QGD, LAG and GD on the linear problem of LAG: fail if uploads or bits are off by more than 5 % from
  those of an independent run.
- The error of an upload: fails if it exceeds R / (2^b - 1) once, for any worker.
- Silence: fails if a worker is silent for more than 100 iterations.
- SLAQ at the authors' settings (batches of 500, a step of 0.008 for the sum of the gradients, b = 3, an
  allowance of 0.2, 1,000 steps), 3 seeds: fails unless it uploads less than 90 % of all gradients and ends
  within 0.5 points of QSGD's accuracy. The authors' records have 85.5 % and 45 %.
- SLAQ and LASG upload fewer bits than dense and than QSGD to the same loss, on a network of 200 hidden units,
  3 seeds: fails if the mean of the bits is not 5 % smaller; SLAQ with an
  allowance for noise, and without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import msgspec
import torch

from reproductions import lag, laq_authors
from reproductions.base import Claim, Outcome, Reproduction, Section
from reproductions.cohort import Cohort, Recipe, images
from reproductions.laq_authors import uploads_of
from reproductions.parts import Context
from reproductions.seeds import SEEDS, plus_minus
from thinwire.convex import Descent, Objective, lazy_gd
from thinwire.convex.options import Algorithm
from thinwire.methods import LASG, QSGD
from thinwire.methods.families.lazy import Coder, Lazy
from thinwire.tools.report.figures import Curve
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.models import evaluate, loss

WINDOW, XI, BITS, MAX_SKIP = 10, 0.08, 4, 100
# Linear regression, 9 workers, gap 1e-8: uploads and bits of an independent run.
EXPECTED: dict[Algorithm, tuple[int, float]] = {
    "gd": (5274, 1.35e6),
    "lag-wk": (399, 1.02e5),
    "qgd": (5265, 3.37e5),
    "laq": (429, 2.75e4),
}
QUICK = ("dense", "qsgd(bits=4)", "slaq(bits=4, allowance=0)", "lasg")
STOCHASTIC = (
    "dense",
    "qsgd(bits=4)",
    "slaq(bits=2, allowance=0)",
    "slaq(bits=2, max_skip=0, allowance=0)",
    "slaq(bits=4, allowance=0)",
    "slaq(bits=8, allowance=0)",
    "slaq(bits=4)",
    "lasg",
    "lasg(bits=4)",
    "lasg(bits=8)",
)
AVERAGED_STEPS = 20
# Codes have headers of different lengths: a percent less is no saving.
CLEARLY = 0.95
WORKERS = 8


# -- full gradients ----------------------------------------------------------------------------------------


def _descent(problem: lag.Problem, algorithm: Algorithm, bits: int) -> Descent:
    return Descent(algorithm, problem.step, window=WINDOW, xi=XI, bits=bits, max_skip=MAX_SKIP)


def measure(task: lag.Task, algorithm: Algorithm, bits: int) -> lag.Run:
    problem = task.problem()
    return lag.descend(problem, _descent(problem, algorithm, bits))


def error_bound(task: lag.Task, bits: int) -> float:
    """The largest error of an upload of LAQ, in units of its bound R / (2^b - 1), over all workers."""
    problem = task.problem()
    seen: list[list[torch.Tensor]] = [[] for _ in problem.objectives]

    def watched(objective: Objective, gradients: list[torch.Tensor]) -> Objective:
        def gradient(theta: torch.Tensor) -> torch.Tensor:
            gradients.append(objective.slope(theta))
            return gradients[-1]

        return Objective(objective.loss, gradient)

    objectives = [watched(one, own) for one, own in zip(problem.objectives, seen, strict=True)]
    how, zero = _descent(problem, "laq", bits), torch.zeros(problem.entries, dtype=torch.float64)
    trace = lazy_gd(objectives, zero, how, iterations=2000, optimum=problem.optimum, gap=lag.GAP)
    coder, worst = Coder(bits), 0.0
    for worker, gradients in enumerate(seen):
        last = zero
        for one, gradient in zip(trace.iterations, gradients, strict=True):
            if worker in one.uploaders:
                radius = float((gradient - last).abs().max())
                last = last + coder.decode(coder.encode(gradient, last).parts, problem.entries)
                if radius:
                    worst = max(worst, float((gradient - last).abs().max()) * (2**bits - 1) / radius)
    return worst


# -- minibatches -------------------------------------------------------------------------------------------


class _Lazy(Cohort):
    """Workers that compute a second gradient on the same batch, if the method compares the two."""

    def backward(self, rank: int, rows: torch.Tensor) -> float:
        if isinstance(self.exchange, LASG):
            inputs, targets = self.data.batch(rows)
            model = self.model_of(rank)
            self.sessions[rank].same_batch(model, lambda net: loss(self.data, net(inputs), targets))
        return super().backward(rank, rows)


class Reached(msgspec.Struct):
    """When the loss was reached: payload bits of all workers, and the bits of their uploads alone.

    The papers count only the latter, without the sum that is returned or a second round.
    """

    steps: int
    bits: float
    uploads: int
    uploaded_bits: float


class Training(msgspec.Struct):
    """`curve` has (payload bits of all workers, mean loss of the last steps)."""

    reached: Reached | None
    curve: list[tuple[float, float]]
    accuracy: float
    sent: float


def train(method: str, recipe: Recipe, data: Dataset, goal: float) -> Training:
    """Train for `recipe.steps` steps; note when the mean loss of the last steps is below `goal`."""
    cohort = _Lazy(method, recipe, data)
    meters = cohort.network.meters
    losses: list[float] = []
    curve: list[tuple[float, float]] = []
    reached: Reached | None = None
    for number in range(1, recipe.steps + 1):
        losses.append(cohort.step())
        recent = losses[-AVERAGED_STEPS:]
        smooth, bits = sum(recent) / len(recent), 8.0 * sum(meter.payload_bytes for meter in meters)
        if number % max(1, recipe.steps // 40) == 0:
            curve.append((bits, round(smooth, 5)))
        if reached is None and len(recent) == AVERAGED_STEPS and smooth < goal:
            uploads = uploads_of(cohort)
            reached = Reached(number, bits, uploads, 8.0 * uploads * _code_bytes(cohort))
    sent = sum(meter.sent_bytes for meter in meters) / recipe.steps / recipe.workers
    return Training(reached, curve, evaluate(cohort.models[0], data)[1], sent)


def _code_bytes(cohort: Cohort) -> int:
    """The bytes of one upload."""
    exchange = cohort.exchange
    numbers = [parameter.numel() for parameter in cohort.models[0].parameters()]
    total = sum(numbers)
    if isinstance(exchange, Lazy):
        return Coder(exchange.upload_bits, tuple(numbers)).payload_bytes(total)
    plain = torch.ones(total)
    code = exchange.encode(plain, seed=0) if isinstance(exchange, QSGD) else [plain]
    return sum(part.nbytes for part in code)


# -- the reproduction --------------------------------------------------------------------------------------


def _deterministic(context: Context, outcome: Outcome) -> None:
    """Judged in smoke runs, too: they are the whole thing."""
    task = lag.nine_workers(context)
    key = task.name.partition(",")[0]
    found = context.each({name: partial(measure, task, name, BITS) for name in EXPECTED}, f"{key},")
    worst = context.once(error_bound, task, BITS)
    outcome.table(
        f"{key}, 9 workers, {BITS} bits, xi {XI:g}: until the loss is within {lag.GAP:g} of the optimum",
        {"algorithm": "", "iterations": ",", "uploads": ",", "bits": ".3g", "longest skip": ""},
        [(name, one.iterations, one.uploads, one.bits, one.silence) for name, one in found.items()],
    )
    lag.gap_figure(outcome, "gap against uploads", found)
    for name, (uploads, bits) in EXPECTED.items() if task.name == lag.LINEAR else ():
        ours = found[name]
        outcome.claims.append(
            Claim(
                f"linear, 9 workers, {name}: uploads and bits",
                f"{uploads:,} and {bits:.3g} (independent run)",
                f"{ours.uploads:,} and {ours.bits:.3g}",
                abs(ours.uploads - uploads) <= 0.05 * uploads and abs(ours.bits - bits) <= 0.05 * bits,
            )
        )
    silence = found["laq"].silence
    outcome.claims += [
        Claim(
            "an upload's error is at most R / (2^b - 1)",
            "1",
            f"{worst:.6f} of the bound at most",
            worst <= 1 + 1e-6,
        ),
        Claim(
            f"no worker skips more than {MAX_SKIP} iterations in a row",
            str(MAX_SKIP),
            str(silence),
            silence <= MAX_SKIP,
        ),
    ]


class Mean(msgspec.Struct):
    """Over the seeds that reached the loss; `reached` is None unless all did."""

    reached: Reached | None
    steps: list[int]
    bits: list[float]
    accuracies: list[float]
    sent: float


def mean_of(runs: Sequence[Training]) -> Mean:
    found = [one.reached for one in runs if one.reached is not None]
    whole = None
    if len(found) == len(runs):
        whole = Reached(
            round(fmean(one.steps for one in found)),
            fmean(one.bits for one in found),
            round(fmean(one.uploads for one in found)),
            fmean(one.uploaded_bits for one in found),
        )
    return Mean(
        whole,
        [one.steps for one in found],
        [one.uploaded_bits for one in found],
        [one.accuracy for one in runs],
        fmean(one.sent for one in runs),
    )


def _stochastic(context: Context, outcome: Outcome) -> None:
    quick = context.quick
    data = images(context)
    workers, steps, hidden, goal = (3, 40, 32, 2.25) if quick else (WORKERS, 400, 200, 0.25)
    recipe = Recipe("mlp", workers, steps, batch=64, learning_rate=0.1, hidden=(hidden,))
    methods, seeds = (QUICK, (0,)) if quick else (STOCHASTIC, SEEDS)
    runs = context.each(
        {
            (method, "seed", seed): partial(train, method, replace(recipe, seed=seed), data, goal)
            for seed in seeds
            for method in methods
        },
        data.name,
    )
    found = {method: mean_of([runs[method, "seed", seed] for seed in seeds]) for method in methods}
    plain = found["dense"].reached

    def cells(one: Mean) -> tuple[object, ...]:
        if one.reached is None:
            return f"not in {recipe.steps}", "-", "-", "-", "-"
        own = one.reached
        steps = f"{min(one.steps)} to {max(one.steps)}"
        return steps, own.bits, own.bits / plain.bits if plain else "-", own.uploads, own.uploaded_bits

    outcome.table(
        f"{data.name}, {recipe.workers} workers, batches of {recipe.batch}, {len(seeds)} seeds: until the "
        f"mean training loss of {AVERAGED_STEPS} steps is below {goal:g}, and accuracy after {recipe.steps} "
        "steps",
        {"method": "", "steps": ",", "payload bits": ".3g", "of dense": ".2%", "uploads": ","}
        | {"bits of uploads": ".3g", "accuracy": "", "sent per worker and step": ",.0f"},
        [(method, *cells(one), plus_minus(one.accuracies), one.sent) for method, one in found.items()],
    )
    curves: dict[str, Curve] = {}
    for method in methods:
        points = runs[method, "seed", seeds[0]].curve
        curves[method] = [bits for bits, _ in points], [value for _, value in points]
    outcome.figure(
        "training loss against bits", curves, "payload bits of all workers", "training loss", log="x"
    )
    if not quick:
        for method, other in (
            ("slaq(bits=4)", "dense"),
            ("slaq(bits=4)", "qsgd(bits=4)"),
            ("slaq(bits=4, allowance=0)", "qsgd(bits=4)"),
            ("lasg", "dense"),
            ("lasg(bits=4)", "qsgd(bits=4)"),
        ):
            _fewer_bits(outcome, method, other, found)
    outcome.notes.append(
        "Payload bits are those of all workers: codes, flags and, where a mean is cheaper than single "
        "uploads, the dense mean. The last column is what a worker's interface sends, in both phases."
    )


def _fewer_bits(outcome: Outcome, method: str, other: str, found: dict[str, Mean]) -> None:
    mine, theirs = found[method].reached, found[other].reached
    what, paper = f"{method} uploads fewer bits than {other}", "fewer (authors' records)"
    if not (mine and theirs):
        outcome.claim(what, paper, "loss not reached", False)
        return
    skipped = 100 * (1 - mine.uploads / mine.steps / WORKERS)
    own, its = found[method].bits, found[other].bits
    outcome.claim(
        what,
        paper,
        f"{mine.uploaded_bits:.3g} ({min(own):.3g} to {max(own):.3g}) against {theirs.uploaded_bits:.3g} "
        f"({min(its):.3g} to {max(its):.3g})",
        mine.uploaded_bits < CLEARLY * theirs.uploaded_bits,
        f"{skipped:.0f} % of the uploads are skipped; {mine.steps} steps against {theirs.steps}. The whole "
        f"payload, the returned sum included, is {mine.bits / theirs.bits:.2f} of that of {other}",
    )


REPRODUCTION = Reproduction(
    "Lazily aggregated quantised gradients: uploads and bits to a loss",
    "Sun, Chen, Giannakis and Yang, Communication-efficient distributed learning via lazily aggregated "
    "quantized gradients, 2019; Chen, Sun and Yin, LASG, 2020.",
    (
        Section("LAQ's error, silence, uploads and bits on the linear problem of LAG", _deterministic),
        Section(
            "LAQ's row of the paper's table: iterations, uploads and bits on MNIST", laq_authors.headline
        ),
        Section("SLAQ at the authors' settings: uploads and accuracy on MNIST", laq_authors.stochastic),
        Section("bits of SLAQ and LASG to a loss, with a network of 200 hidden units", _stochastic),
        Section("the rows of GD, QGD and LAG in the paper's table", laq_authors.other_rows, smoke=False),
    ),
    __doc__ or "",
    takeaway="With full gradients LAQ multiplies LAG's saving by 4-bit codes; with minibatches `slaq` with "
    "its measured allowance for noise sends the fewest bits at a small loss, `lasg(bits=4)` loses "
    "nothing, and `qsgd` is simpler.",
    methods=("laq", "slaq", "lasg"),
)
