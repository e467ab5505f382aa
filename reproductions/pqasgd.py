"""SPA-SGD, quantised SGD and PQASGD: a few percent of the data, and the linear speed-up in the workers."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from reproductions.base import Claim, Context, Outcome, Reproduction
from reproductions.cohort import Recipe, mean_into, train
from reproductions.local_steps import LocalCohort
from thinwire.averaging import Periodic
from thinwire.methods import QSGD
from thinwire.tools.report.figures import lines
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.data import digits, mnist
from thinwire.tools.workloads.models import evaluate, loss

# bits and periods with 3.1, 5, 3.1 and 3.1 % of dense payload, then half of that, then no quantisation.
HEADLINE = (
    "pqasgd(every=8, bits=8)",
    "pqasgd(every=5, bits=8)",
    "pqasgd(every=4, bits=4)",
    "pqasgd(every=2, bits=2)",
    "pqasgd(every=8, bits=4)",
    "localsgd(every=8)",
    "spasgd(groups=8)",
)
WITHIN_POINTS = 0.3
FULL, TWO_STEPS = "localsgd(every=1)", "localsgd(every=2)"
# Times sqrt(M / K): stable in the shortest run with most workers, and past the start in the slowest.
STEP_SIZE = 0.6
# The theory bounds the exponent of M K by -1/2 from above; a run without speed-up in M is far flatter.
FLATTEST = -0.35
# Of a ratio of gradient norms: what two runs with other batches may differ by.
CHANCE = 1.15
FINE, COARSE, WILD = QSGD(bits=8), QSGD(bits=2), QSGD(bits=2, norm="l2", bucket=65_536)


def _quantised(quantiser: QSGD) -> str:
    """Quantised SGD: every step's change, without a second quantisation on the way back."""
    return str(Periodic(every=1, exchange=replace(quantiser, reduce="gather")))


# Inside of the conditions, except for the last.
SPEED_UP = {
    "full communication": FULL,
    "two local steps": TWO_STEPS,
    "spasgd(groups=2)": "spasgd(groups=2)",
    "quantised SGD, 2 bits": _quantised(COARSE),
    "pqasgd(every=2, bits=8)": "pqasgd(every=2, bits=8)",
    "outside: 2 bits, one norm for 65,536 entries": _quantised(WILD),
}
OUTSIDE = list(SPEED_UP)[-1]


@dataclass(frozen=True)
class Setting:
    """A method inside or outside of what the analysis asks for.

    `allowed` is what the analysis lets the leading term grow by: 1 + q for a quantiser.
    """

    method: str
    inside: bool
    why: str
    sorted_labels: bool = False
    allowed: float = 1.0


def settings(bound: float) -> tuple[Setting, ...]:
    """`bound` is K^(1/4) M^(-3/4); the quantiser's q is measured on Gaussian numbers."""
    allowed = f"p of the order of {bound:.1f} is allowed"
    fine, coarse, wild = quantiser_loss(FINE), quantiser_loss(COARSE), quantiser_loss(WILD)
    return (
        Setting("spasgd(groups=2)", True, allowed),
        Setting("spasgd(groups=4)", True, allowed),
        Setting("spasgd(groups=512)", False, allowed),
        Setting("spasgd(groups=2)", True, allowed, True),
        Setting("spasgd(groups=512)", False, allowed, True),
        Setting("pqasgd(every=2, bits=8)", True, f"q = {fine:.2g}; {allowed}"),
        Setting("pqasgd(every=512, bits=8)", False, f"q = {fine:.2g}; {allowed}", True),
        Setting(_quantised(FINE), True, f"q = {fine:.2g}", allowed=1 + fine),
        Setting(_quantised(COARSE), True, f"q = {coarse:.2g}", allowed=1 + coarse),
        Setting(_quantised(WILD), False, f"q = {wild:.2g}, not O(1)"),
    )


def quantiser_loss(quantiser: QSGD, entries: int = 2**18) -> float:
    """q = E ||Q(v) - v||^2 / ||v||^2."""
    v = torch.randn(entries, generator=torch.Generator().manual_seed(7))
    decoded = torch.empty_like(v)
    quantiser.decode_mean([quantiser.encode(v, seed=11)], decoded)
    return float((decoded - v).square().sum() / v.square().sum())


# -- what is measured --------------------------------------------------------------------------------------


class Objective:
    """Loss and squared gradient norm of a model on a fixed part of the training data."""

    def __init__(self, model: nn.Module, data: Dataset, rows: int) -> None:
        self._model = copy.deepcopy(model)
        self._data = data
        chosen = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(99))[:rows]
        self._batch = data.batch(chosen)

    def at_mean_of(self, models: list[nn.Module]) -> tuple[float, float]:
        mean_into(self._model, models)
        self._model.zero_grad()
        value = loss(self._data, self._model(self._batch[0]), self._batch[1])
        value.backward()
        squares = [float(p.grad.square().sum()) for p in self._model.parameters() if p.grad is not None]
        return float(value.detach()), sum(squares)


def measure(
    method: str, recipe: Recipe, data: Dataset, *, looks: int, rows: int, sorted_labels: bool = False
) -> dict[str, Any]:
    """Train; the mean over the run of the squared gradient norm, and the last loss.

    At the replicas' mean, and ("own") at one worker's parameters: where replicas hardly meet, their mean lies
    on a plateau on which the gradient is small and the loss is not.
    """
    cohort = LocalCohort(method, recipe, data, sorted_labels=sorted_labels)
    objective = Objective(cohort.models[0], data, rows)
    steps, losses, norms, own_norms = list[int](), list[float](), list[float](), list[float]()
    every = max(1, recipe.steps // looks)
    for number in range(recipe.steps):
        if number % every == 0:
            value, square = objective.at_mean_of(cohort.models)
            steps.append(number)
            losses.append(value)
            norms.append(square)
            own_norms.append(objective.at_mean_of(cohort.models[:1])[1])
        cohort.step()
    value, _ = objective.at_mean_of(cohort.models)
    return {
        "own_mean_square": sum(own_norms) / len(own_norms),
        "own_loss": objective.at_mean_of(cohort.models[:1])[0],
        "steps": [*steps, recipe.steps],
        "losses": [*losses, value],
        "mean_square": sum(norms) / len(norms),
        "loss": value,
    }


def headline(method: str, recipe: Recipe, data: Dataset) -> dict[str, float]:
    """Accuracy of the common model after the last step, and the payload of a step."""
    if method == "dense":
        found = train(method, recipe, data, looks=1)
        return {"accuracy": found["accuracy"], "payload": found["payload"], "sent": found["sent"]}
    cohort = LocalCohort(method, recipe, data)
    for _ in range(recipe.steps):
        cohort.step()
    spent = cohort.spent()
    cohort.sync()
    return {
        "accuracy": evaluate(cohort.models[0], data)[1],
        "payload": (spent.payload_bytes + spent.overhead_bytes) / recipe.steps,
        "sent": spent.sent_bytes / recipe.steps,
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line through (log x, log y), by least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


# -- the run -----------------------------------------------------------------------------------------------


class _Run:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.quick = context.quick
        self.data = digits() if context.quick else mnist(context.data / "mnist")
        hidden = (32,) if context.quick else (200,)
        self.recipe = Recipe(
            "mlp",
            workers=4 if context.quick else 8,
            steps=48 if context.quick else 1000,
            batch=16 if context.quick else 32,
            learning_rate=0.1,
            hidden=hidden,
        )
        self.small = replace(self.recipe, batch=2)
        self.seeds = (0,) if context.quick else (0, 1)
        self.workers = (1, 2, 4) if context.quick else (1, 2, 4, 8)
        self.lengths = (16, 32) if context.quick else (500, 1000, 2000)
        self.looks, self.rows = (4, 200) if context.quick else (25, 2000)
        self.conditions = settings(self.bound(self.condition_steps, self.recipe.workers))
        self.methods = HEADLINE[:2] if context.quick else HEADLINE
        self.total = (
            (1 + len(self.methods)) * len(self.seeds)
            + len(SPEED_UP) * len(self.workers) * len(self.lengths)
            + len(self.conditions)
            + 4
        )
        self.done = 0

    @property
    def condition_steps(self) -> int:
        return self.lengths[-2]

    @staticmethod
    def bound(steps: int, workers: int) -> float:
        return steps**0.25 * workers**-0.75

    def once(self, key: str, what: str, function: Any) -> dict[str, Any]:
        self.context.progress(what, self.done, self.total)
        found = cast("dict[str, Any]", self.context.once(key, function))
        self.done += 1
        return found

    def accuracy(self, method: str) -> dict[str, float]:
        """The mean over the seeds."""
        runs: list[dict[str, Any]] = []
        for seed in self.seeds:
            recipe = replace(self.recipe, seed=seed)
            key = f"accuracy {recipe.key(method, self.data)}"
            runs.append(self.once(key, method, lambda r=recipe: headline(method, r, self.data)))
        return {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}

    def point(
        self, method: str, workers: int, steps: int, sorted_labels: bool = False, batch: int | None = None
    ) -> dict[str, Any]:
        """A run with the step size that the analysis takes: proportional to sqrt(M / K)."""
        rate = STEP_SIZE * math.sqrt(workers / steps)
        size = batch or self.small.batch
        recipe = replace(self.small, workers=workers, steps=steps, learning_rate=rate, batch=size)
        shards = " sorted" if sorted_labels else ""
        key = f"gradient norm{shards} {self.looks} {self.rows} {recipe.key(method, self.data)}"

        def function() -> dict[str, Any]:
            return measure(
                method, recipe, self.data, looks=self.looks, rows=self.rows, sorted_labels=sorted_labels
            )

        return self.once(key, f"{method}, {workers} workers, {steps} steps", function)

    def verdict(self, holds: bool) -> bool | None:
        return None if self.quick else holds


def run(context: Context) -> Outcome:
    """All three parts; see the claims."""
    work, outcome = _Run(context), Outcome()
    _few_bytes(work, outcome)
    _speed_up(work, outcome)
    _conditions(work, outcome)
    outcome.notes.append(
        "Workers run in lock-step in one process, with the exchanges that train for real. SGD without "
        "momentum; gradient norms are of the loss on "
        f"{work.rows:,} training images, averaged over {work.looks} moments of a run. The paper's own "
        "models, data sets and accuracies could not be recovered; its claims are from its abstract."
    )
    return outcome


def _few_bytes(work: _Run, outcome: Outcome) -> None:
    dense = work.accuracy("dense")
    rows = [("dense", f"{100 * dense['accuracy']:.2f} %", "", f"{dense['payload']:,.0f}", "100 %", "100 %")]
    kept = list[str]()
    worst = 0.0
    for method in work.methods:
        found = work.accuracy(method)
        points = 100 * (found["accuracy"] - dense["accuracy"])
        share = 100 * found["payload"] / dense["payload"]
        rows.append(
            (
                method,
                f"{100 * found['accuracy']:.2f} %",
                f"{points:+.2f}",
                f"{found['payload']:,.0f}",
                f"{share:.1f} %",
                f"{100 * found['sent'] / dense['sent']:.1f} %",
            )
        )
        if method.startswith("pqasgd") and 3 <= share <= 5.5:
            kept.append(f"{method}: {points:+.2f} at {share:.1f} %")
            worst = max(worst, abs(points))
    recipe = work.recipe
    outcome.table(
        f"{work.data.name}, network of {recipe.hidden[0]} hidden units, {recipe.workers} workers, batches of "
        f"{recipe.batch}, {recipe.steps} steps, mean of {len(work.seeds)} seeds",
        ("method", "accuracy", "to dense, points", "payload a step", "of dense", "sent, of dense"),
        rows,
    )
    outcome.claims.append(
        Claim(
            f"PQASGD converges as full communication does, within {WITHIN_POINTS} points at equal steps",
            "3-5 % of the data size, same convergence (abstract)",
            "; ".join(kept) or "none in that range",
            work.verdict(bool(kept) and worst <= WITHIN_POINTS),
        )
    )


def _speed_up(work: _Run, outcome: Outcome) -> None:
    rows: list[tuple[str, ...]] = []
    curves: dict[str, Any] = {}
    slopes: dict[str, float] = {}
    squares: dict[tuple[str, int, int], float] = {}
    for name, method in SPEED_UP.items():
        for workers in work.workers:
            for steps in work.lengths:
                found = work.point(method, workers, steps)
                squares[name, workers, steps] = found["mean_square"]
                if steps == work.lengths[-1]:
                    curves[f"{name}, M = {workers}"] = (found["steps"], found["losses"])
            cells = [f"{squares[name, workers, steps]:.4f}" for steps in work.lengths]
            rows.append((name, str(workers), *cells))
        slopes[name] = slope([(w * k, value) for (n, w, k), value in squares.items() if n == name])
    outcome.table(
        f"mean squared gradient norm at the replicas' mean, batches of {work.small.batch} a worker, step "
        f"size {STEP_SIZE} sqrt(M / K)",
        ("", "M", *(f"K = {steps}" for steps in work.lengths)),
        rows,
    )
    longest, most = work.lengths[-1], work.workers[-1]
    inside = {name: value for name, value in slopes.items() if name != OUTSIDE}
    outcome.figures["Mean squared gradient norm against M K"] = lines(
        {name: _by_product({k[1:]: v for k, v in squares.items() if k[0] == name}) for name in inside},
        "workers times steps, M K",
        "mean squared gradient norm",
        log_x=True,
        log_y=True,
        markers=True,
    )
    outcome.figures[f"Loss against the step K, step size {STEP_SIZE} sqrt(M / K)"] = lines(
        curves, "K", "training loss"
    )
    told = "; ".join(
        f"{name} {value:.2f} ({squares[name, most, longest] / squares[name, 1, longest]:.2f})"
        for name, value in inside.items()
    )
    worse = [
        value / squares["full communication", workers, steps]
        for (name, workers, steps), value in squares.items()
        if name == OUTSIDE
    ]
    shortest = work.lengths[0]
    local = squares["two local steps", most, shortest] / squares["full communication", most, shortest]
    larger = 8 * work.small.batch
    calmer, calm = (work.point(m, most, shortest, batch=larger)["mean_square"] for m in (TWO_STEPS, FULL))
    outcome.claims.append(
        Claim(
            "linear speed-up: the gradient norm falls as (M K)^(-1/2)",
            f"O((M K)^-0.5), hence at most about {most**-0.5:.2f} times as much with {most} workers",
            f"exponent, and what {most} workers have of one's: {told}",
            work.verdict(all(value <= FLATTEST for value in inside.values())),
            f"outside of the conditions the norm is {min(worse):,.0f} to {max(worse):,.0f} times full "
            "communication's. Two local steps, nothing quantised, fall faster than full communication: with "
            f"{most} workers and {shortest} steps the norm at their mean is {local:.2f} of its, with batches "
            f"of {larger} {calmer / calm:.2f}, so it is the noise of small batches that they damp",
        )
    )


def _by_product(squares: dict[tuple[int, int], float]) -> tuple[list[int], list[float]]:
    """Over M K; several with the same product are averaged."""
    products = sorted({workers * steps for workers, steps in squares})
    means: list[float] = []
    for product in products:
        same = [value for (workers, steps), value in squares.items() if workers * steps == product]
        means.append(math.exp(sum(map(math.log, same)) / len(same)))
    return products, means


def _conditions(work: _Run, outcome: Outcome) -> None:
    workers, steps = work.recipe.workers, work.condition_steps
    full = {shards: work.point(FULL, workers, steps, shards)["own_mean_square"] for shards in (False, True)}
    ratios: list[tuple[Setting, float]] = []
    for setting in work.conditions:
        found = work.point(setting.method, workers, steps, setting.sorted_labels)
        ratios.append((setting, found["own_mean_square"] / full[setting.sorted_labels]))
    outcome.table(
        f"hyper-parameters inside and outside of the conditions, M = {workers}, K = {steps}: mean squared "
        "gradient norm at a worker's parameters by that of full communication",
        ("method", "shards", "condition", "", "ratio"),
        [
            (
                setting.method,
                "sorted" if setting.sorted_labels else "alike",
                setting.why,
                "inside" if setting.inside else "outside",
                f"{ratio:.2f}",
            )
            for setting, ratio in ratios
        ],
    )
    for kind, label in (("spasgd", "SPA-SGD"), ("periodic", "quantised SGD")):
        own = [(setting, ratio) for setting, ratio in ratios if setting.method.startswith(kind)]
        inside = [ratio for setting, ratio in own if setting.inside]
        outside = [ratio for setting, ratio in own if not setting.inside]
        kept = all(ratio <= CHANCE * setting.allowed for setting, ratio in own if setting.inside)
        coarsest = max(setting.allowed for setting, _ in own if setting.inside)
        outcome.claims.append(
            Claim(
                f"{label} keeps the rate if it is configured properly, and only then",
                "O(1/sqrt(MK)) inside of the conditions (abstract; constants not recovered)",
                f"inside: {_range(inside)} of full communication's gradient norm; outside: {_range(outside)}",
                work.verdict(kept and min(outside) > 2 * max(inside)),
                f"the analysis allows 1 + q, {coarsest:.1f} with the coarsest" if coarsest > 1 else "",
            )
        )


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f}"


REPRODUCTION = Reproduction(
    title="A few percent of the data, and the linear speed-up: SPA-SGD, quantised SGD, PQASGD",
    paper=(
        'Jiang and Agrawal, "A linear speedup analysis of distributed deep learning with sparse and '
        'quantized communication", NeurIPS 2018'
    ),
    run=run,
    methods=("pqasgd", "spasgd", "localsgd"),
)
