"""LAQ: uploads and bits on the data of LAG; SLAQ and LASG: bits to a loss with minibatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from reproductions import lag
from reproductions.base import Claim, Context, Outcome, Reproduction
from reproductions.cohort import Cohort, Gradients, Recipe, images
from reproductions.plots import lines
from thinwire.convex import Descent, Objective, lazy_gd
from thinwire.methods import LASG, QSGD
from thinwire.methods.families.lazy import Coder, Counts, Lazy
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.models import evaluate, loss

WINDOW, XI, BITS, MAX_SKIP = 10, 0.08, 4, 100
# Linear regression, 9 workers, gap 1e-8: uploads and bits of an independent run.
EXPECTED: dict[str, tuple[int, float]] = {
    "gd": (5274, 1.35e6),
    "lag-wk": (399, 1.02e5),
    "qgd": (5265, 3.37e5),
    "laq": (429, 2.75e4),
}
STOCHASTIC = (
    "dense",
    "qsgd(bits=4)",
    "slaq(bits=2)",
    "slaq(bits=2, max_skip=0)",
    "slaq(bits=4)",
    "slaq(bits=8)",
    "lasg",
    "lasg(bits=4)",
    "lasg(bits=8)",
)
AVERAGED_STEPS = 20
# Codes have headers of different lengths: a percent less is no saving.
CLEARLY = 0.95
WORKERS = 8


# -- full gradients ----------------------------------------------------------------------------------------


def _descent(problem: lag.Problem, algorithm: str) -> Descent:
    return Descent(
        algorithm,  # pyright: ignore[reportArgumentType]
        problem.step,
        window=WINDOW,
        xi=XI,
        bits=BITS,
        max_skip=MAX_SKIP,
    )


def error_bound(problem: lag.Problem) -> float:
    """The largest error of an upload of LAQ, in units of its bound R / (2^b - 1), over all workers."""
    seen: list[list[torch.Tensor]] = [[] for _ in problem.objectives]

    def watched(objective: Objective, gradients: list[torch.Tensor]) -> Objective:
        def gradient(theta: torch.Tensor) -> torch.Tensor:
            gradients.append(objective.slope(theta))
            return gradients[-1]

        return Objective(objective.loss, gradient)

    objectives = [watched(one, own) for one, own in zip(problem.objectives, seen, strict=True)]
    how, zero = _descent(problem, "laq"), torch.zeros(problem.entries, dtype=torch.float64)
    trace = lazy_gd(objectives, zero, how, iterations=2000, optimum=problem.optimum, gap=lag.GAP)
    coder, worst = Coder(BITS), 0.0
    for worker, gradients in enumerate(seen):
        last = zero
        for one, gradient in zip(trace.iterations, gradients, strict=True):
            if worker in one.uploaders:
                radius = float((gradient - last).abs().max())
                last = last + coder.decode(coder.encode(gradient, last).parts, problem.entries)
                if radius:
                    worst = max(worst, float((gradient - last).abs().max()) * (2**BITS - 1) / radius)
    return worst


# -- minibatches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Goal:
    """Train until the mean loss of the last steps is below `loss`, for at most `recipe.steps` steps."""

    recipe: Recipe
    loss: float


class _Lazy(Cohort):
    """Workers that compute a second gradient on the same batch, where the method compares."""

    def gradients(self) -> tuple[float, Gradients]:
        if not isinstance(self.exchange, LASG):
            return super().gradients()
        rows = torch.randint(
            len(self.data.inputs), (self.recipe.workers, self.recipe.batch), generator=self._order
        )
        total, found = 0.0, list[dict[str, torch.Tensor]]()
        for rank, session in enumerate(self.sessions):
            model = self.model_of(rank)
            inputs, targets = self.data.batch(rows[rank])

            def value(
                net: torch.nn.Module, x: torch.Tensor = inputs, y: torch.Tensor = targets
            ) -> torch.Tensor:
                return loss(self.data, net(x), y)

            session.same_batch(model, value)
            model.zero_grad()
            now = value(model)
            now.backward()
            total += float(now.detach()) / self.recipe.workers
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        return total, found


def train(method: str, goal: _Goal, data: Dataset) -> dict[str, Any]:
    """Payload bits that all workers handed over, step by step, and what came of it, as JSON."""
    cohort, recipe = _Lazy(method, goal.recipe, data), goal.recipe
    losses: list[float] = []
    curve: list[tuple[float, float]] = []
    reached: dict[str, float] | None = None
    for number in range(1, recipe.steps + 1):
        losses.append(cohort.step())
        recent = losses[-AVERAGED_STEPS:]
        smooth, bits = sum(recent) / len(recent), 8.0 * sum(m.payload_bytes for m in cohort.network.meters)
        if number % 10 == 0:
            curve.append((bits, smooth))
        if reached is None and len(recent) == AVERAGED_STEPS and smooth < goal.loss:
            reached = {"steps": number, "bits": bits, **_uploads(cohort, number)}
    meters = cohort.network.meters
    return {
        "reached": reached,
        "curve": curve,
        "accuracy": evaluate(cohort.models[0], data)[1],
        "bits": 8.0 * sum(meter.payload_bytes for meter in meters),
        "sent": sum(meter.sent_bytes for meter in meters) / recipe.steps / recipe.workers,
    }


def _uploads(cohort: Cohort, steps: int) -> dict[str, float]:
    """How many uploads there were, and the bits of their codes alone: what the papers count.

    What comes back, or a second round, is not in it.
    """
    exchange = cohort.exchange
    numbers = [parameter.numel() for parameter in cohort.models[0].parameters()]
    total = sum(numbers)
    if not isinstance(exchange, Lazy):
        code = (
            exchange.encode(torch.ones(total), seed=0) if isinstance(exchange, QSGD) else [torch.ones(total)]
        )
        uploads, size = steps * cohort.recipe.workers, sum(part.nbytes for part in code)
    else:
        known = [session.engine.states.entries() for session in cohort.sessions]
        counts = [fields["counts"] for own in known for fields in own.values() if "counts" in fields]
        uploads = sum(Counts.of(each).uploads for each in counts)
        size = Coder(exchange.upload_bits, tuple(numbers)).payload_bytes(total)
    return {"uploads": uploads, "uploaded_bits": 8.0 * uploads * size}


# -- the reproduction --------------------------------------------------------------------------------------


def run(context: Context) -> Outcome:
    torch.set_num_threads(1)
    outcome = Outcome()
    methods = ("dense", "qsgd(bits=4)", "slaq(bits=4)", "lasg") if context.quick else STOCHASTIC
    total = len(EXPECTED) + 1 + len(methods)
    make = (lambda: lag.increasing(9)) if not context.has_data else (lambda: _linear(context))
    key = "linear" if context.has_data else "synthetic"
    found: dict[str, dict[str, Any]] = {}
    for number, algorithm in enumerate(EXPECTED):
        context.progress(f"{key}, {algorithm}", number, total)
        settings = f"{WINDOW} {XI} {BITS} {MAX_SKIP}"

        def descend(algorithm: str = algorithm) -> dict[str, Any]:
            problem = make()
            return lag.descend(problem, _descent(problem, algorithm))

        found[algorithm] = context.once(f"{key} {algorithm} {settings}", descend)
    context.progress("error bound", len(EXPECTED), total)
    worst = context.once(f"{key} error {BITS}", lambda: error_bound(make()))
    outcome.table(
        f"{key}, 9 workers, {BITS} bits, xi {XI:g}: until the loss is within {lag.GAP:g} of the optimum",
        ("algorithm", "iterations", "uploads", "bits", "longest silence"),
        [
            (name, f"{v['iterations']:,}", f"{v['uploads']:,}", f"{v['bits']:.3g}", str(v["silence"]))
            for name, v in found.items()
        ],
    )
    outcome.figures["gap against uploads"] = lines(
        {name: lag.curve(value) for name, value in found.items()},
        "uploads",
        "gap",
        log_x=True,
        log_y=True,
    )
    judge = key == "linear"
    for name, (uploads, bits) in EXPECTED.items() if judge else ():
        ours = found[name]
        near = abs(ours["uploads"] - uploads) <= 0.05 * uploads and abs(ours["bits"] - bits) <= 0.05 * bits
        outcome.claims.append(
            Claim(
                f"linear, 9 workers, {name}: uploads and bits",
                f"{uploads:,} and {bits:.3g} (independent run)",
                f"{ours['uploads']:,} and {ours['bits']:.3g}",
                near,
            )
        )
    outcome.claims += [
        Claim(
            "an upload's error is at most R / (2^b - 1)",
            "1",
            f"{worst:.6f} of the bound at most",
            worst <= 1 + 1e-6,
        ),
        Claim(
            f"nobody is silent for more than {MAX_SKIP} iterations",
            str(MAX_SKIP),
            str(found["laq"]["silence"]),
            found["laq"]["silence"] <= MAX_SKIP,
        ),
    ]
    _stochastic(context, outcome, methods, len(EXPECTED) + 1, total)
    return outcome


def _linear(context: Context) -> lag.Problem:
    return lag.linear(lag.shares(lag.load(context, lag.LINEAR[1]), 3))


def _stochastic(context: Context, outcome: Outcome, methods: tuple[str, ...], done: int, total: int) -> None:
    data = images(context)
    recipe = Recipe(
        "mlp",
        workers=3 if context.quick else WORKERS,
        steps=40 if context.quick else 400,
        batch=64,
        learning_rate=0.1,
        hidden=(32,) if context.quick else (200,),
    )
    goal = _Goal(recipe, 2.25 if context.quick else 0.25)
    found: dict[str, dict[str, Any]] = {}
    for number, method in enumerate(methods):
        context.progress(f"{data.name}, {method}", done + number, total)
        key = f"{recipe.key(method, data)} below {goal.loss}, uploads counted"
        found[method] = context.once(key, lambda m=method: train(m, goal, data))
    plain = found["dense"]["reached"]
    rows: list[tuple[str, ...]] = []
    for method, value in found.items():
        reached = value["reached"]
        share = f"{100 * reached['bits'] / plain['bits']:.2f} %" if reached and plain else "-"
        rows.append(
            (
                method,
                f"{reached['steps']:,}" if reached else f"not in {recipe.steps}",
                f"{reached['bits']:.3g}" if reached else "-",
                share,
                f"{reached['uploads']:,}" if reached else "-",
                f"{reached['uploaded_bits']:.3g}" if reached else "-",
                f"{100 * value['accuracy']:.2f} %",
                f"{value['sent']:,.0f}",
            )
        )
    outcome.table(
        f"{data.name}, {recipe.workers} workers, batches of {recipe.batch}: until the mean training loss of "
        f"{AVERAGED_STEPS} steps is below {goal.loss:g}, and accuracy after {recipe.steps} steps",
        (
            "method",
            "steps",
            "bits handed over",
            "of dense",
            "uploads",
            "bits of uploads",
            "accuracy",
            "sent per worker and step",
        ),
        rows,
    )
    outcome.figures["training loss against bits"] = lines(
        {name: lag.curve(value) for name, value in found.items()},
        "bits handed over by all workers",
        "training loss",
        log_x=True,
    )
    if not context.quick:
        outcome.claims += _claims(found)
    outcome.notes.append(
        "Bits are payloads that all workers hand over: codes, flags and, where a mean is cheaper than single "
        "uploads, the dense mean. The last column is what a worker's interface sends, in both phases."
    )


def _claims(found: dict[str, dict[str, Any]]) -> list[Claim]:
    claims: list[Claim] = []
    for method, other in (("slaq(bits=4)", "dense"), ("slaq(bits=4)", "qsgd(bits=4)"), ("lasg", "dense")):
        mine, theirs = found[method]["reached"], found[other]["reached"]
        what = f"{method} uploads fewer bits than {other}"
        if not (mine and theirs):
            claims.append(Claim(what, "fewer (authors' records)", "loss not reached", False))
            continue
        skipped = 100 * (1 - mine["uploads"] / mine["steps"] / WORKERS)
        claims.append(
            Claim(
                what,
                "fewer (authors' records)",
                f"{mine['uploaded_bits']:.3g} against {theirs['uploaded_bits']:.3g}",
                mine["uploaded_bits"] < CLEARLY * theirs["uploaded_bits"],
                f"{skipped:.0f} % of the uploads are left out; {mine['steps']} steps against "
                f"{theirs['steps']}. All that is handed over, the sum that comes back included: "
                f"{mine['bits'] / theirs['bits']:.2f} of {other}'s",
            )
        )
    return claims


REPRODUCTION = Reproduction(
    "Lazily aggregated quantised gradients: uploads and bits to a loss",
    "Sun, Chen, Giannakis and Yang, Communication-efficient distributed learning via lazily aggregated "
    "quantized gradients, 2019; Chen, Sun and Yin, LASG, 2020.",
    run,
    methods=("laq", "slaq", "lasg"),
)
