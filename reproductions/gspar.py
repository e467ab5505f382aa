"""GSpar: sparsity against a variance budget, convergence against uniform sampling, coding length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from reproductions.base import Claim, Context, Outcome, Reproduction
from reproductions.cohort import Cohort, Recipe, images
from thinwire import kernels
from thinwire.core.routing import View
from thinwire.drivers.lockstep import Lockstep
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.gradient import Session
from thinwire.tools.report.figures import lines

BUDGETS = (0.1, 0.5, 1.0, 2.0, 4.0)
VALUE_BITS = 32
WORKERS = 4
SGD_RATE, SVRG_RATE = 1.0, 0.3


@dataclass(frozen=True)
class Problem:
    """Regularised logistic regression on data whose gradients are sparse to a chosen degree.

    Features are normal numbers; the part `weak` of them is made `factor` times smaller.
    """

    rows: int = 1024
    features: int = 2048
    weak: float = 0.9
    factor: float = 0.1
    seed: int = 0

    @property
    def regularisation(self) -> float:
        return 1 / (10 * self.rows)

    def make(self) -> tuple[torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(self.seed)
        plain = torch.randn(self.rows, self.features, generator=rng)
        strength = torch.where(torch.rand(self.features, generator=rng) < self.weak, self.factor, 1.0)
        truth = torch.randn(self.features, generator=rng)
        return plain * strength, torch.sign(plain @ truth)


class Logistic:
    """The problem's loss and gradients."""

    def __init__(self, problem: Problem) -> None:
        self.x, self.y = problem.make()
        self.regularisation = problem.regularisation

    def loss(self, w: torch.Tensor) -> float:
        fit = torch.nn.functional.softplus(-self.y * (self.x @ w)).mean()
        return float(fit + 0.5 * self.regularisation * w.square().sum())

    def gradient(self, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x, y = self.x[rows], self.y[rows]
        weight = -y * torch.sigmoid(-y * (x @ w)) / len(rows)
        return x.T @ weight + self.regularisation * w

    def best(self, steps: int = 3000) -> float:
        """The least loss, by accelerated gradient descent."""
        everything = torch.arange(len(self.y))
        smooth = float(self.x.square().sum()) / (4 * len(self.y)) + self.regularisation
        w = look = torch.zeros(self.x.shape[1])
        for step in range(steps):
            new = look - self.gradient(look, everything) / smooth
            look = new + step / (step + 3) * (new - w)
            w = new
        return self.loss(w)


def descend(
    method: str, problem: Problem, best: float, epochs: int, rate: float, batch: int, *, svrg: bool
) -> dict[str, Any]:
    """Stochastic descent of four workers, plain or with variance reduction; the gap after each epoch."""
    task = Logistic(problem)
    count = len(task.y)
    network = Lockstep(WORKERS)
    w = torch.zeros(problem.features)
    sessions = [
        Session([("w", w)], method, rank_info=RankInfo(rank, WORKERS), dense_below=0)
        for rank in range(WORKERS)
    ]
    rng = torch.Generator().manual_seed(1)
    everything = torch.arange(count)
    steps = count // (batch * WORKERS)
    gaps, bits = [task.loss(w) - best], [0.0]
    for epoch in range(epochs):
        anchor = w.clone()
        full = task.gradient(anchor, everything) if svrg else torch.zeros_like(w)
        # The variance of plain SGD must fade; that of SVRG does by itself.
        step_size = rate if svrg else rate / (1 + epoch)
        for _ in range(steps):
            rows = torch.randint(count, (WORKERS, batch), generator=rng)
            views: list[tuple[dict[str, torch.Tensor], list[View]]] = []
            for rank, session in enumerate(sessions):
                gradient = task.gradient(w, rows[rank])
                if svrg:
                    gradient -= task.gradient(anchor, rows[rank])
                views.append(session.engine.views({"w": gradient}, in_place=True))
                session.engine.begin_step()
            kept = network.run([s.engine.program(v) for s, (_, v) in zip(sessions, views, strict=True)])
            for session in sessions:
                session.engine.end_step(kept)
            w -= step_size * (views[0][0]["w"] + full)
        gaps.append(task.loss(w) - best)
        bits.append(8.0 * network.meters[0].total.payload_bytes)
    return {"gaps": gaps, "bits": bits}


def sparsity(gradient: torch.Tensor, budget: float, draws: int = 20) -> dict[str, float]:
    """Expected and drawn entries, variance, and bits of one gradient at one budget."""
    d = gradient.numel()
    lam = kernels.gspar_budget(gradient, budget)
    p = (lam * gradient.abs()).clamp(max=1.0)
    kept = p > 0
    square = float(gradient.double().square().sum())
    second = float((gradient[kept].double().square() / p[kept].double()).sum()) / square
    drawn = energy = certain_count = 0.0
    for seed in range(draws):
        certain, values, sampled, magnitude = kernels.gspar_sample(gradient, lam, seed)
        drawn += (len(certain) + len(sampled)) / draws
        certain_count += len(certain) / draws
        energy += (float(values.double().square().sum()) + len(sampled) * magnitude**2) / draws / square
    # s and rho of the definition: the largest entries that hold all but rho = budget of the l1 norm.
    ordered = gradient.abs().double().sort(descending=True).values
    head = ordered.cumsum(0)
    total = float(head[-1])
    s = int((total - head > budget * head).sum()) + 1
    index = math.log2(d)
    bound = s * (VALUE_BITS + index) + min(budget * s * index, d) + VALUE_BITS
    return {
        "entries": drawn / d,
        "expected": float(p.sum()) / d,
        "second": second,
        "energy": energy,
        "uniform": 1 / max(float(p.sum()) / d, 1e-12),
        "bits": certain_count * (VALUE_BITS + index) + (drawn - certain_count) * (1 + index) + VALUE_BITS,
        "bound": bound,
        "within": float(p.sum()) / ((1 + budget) * s),
    }


def _real_gradient(context: Context) -> torch.Tensor:
    data = images(context)
    recipe = Recipe("mlp", workers=2, steps=30, hidden=(64,) if context.quick else (200,))
    cohort = Cohort("dense", recipe, data)
    for _ in range(recipe.steps):
        cohort.step()
    _, gradients = cohort.gradients()
    return torch.cat([gradient.flatten() for gradient in gradients[0].values()])


def run(context: Context) -> Outcome:
    quick = context.quick
    gradient = _real_gradient(context)
    where = f"{gradient.numel()} {float(gradient.double().abs().sum()):.6g}"
    spread = {
        budget: context.once(f"sparsity {where} {budget}", lambda b=budget: sparsity(gradient, b))
        for budget in BUDGETS
    }
    problem = Problem(rows=256, features=512) if quick else Problem()
    epochs, batch = (3, 8) if quick else (30, 8)
    best = context.once(f"best {problem}", lambda: Logistic(problem).best())
    methods = {
        "dense": "dense",
        "GSpar 10 %": "gspar(ratio=0.1)",
        "GSpar 3 %": "gspar(ratio=0.03)",
        "uniform 10 %": "randomk(ratio=0.1, feedback=False, shared=False)",
    }
    found: dict[str, dict[str, Any]] = {}
    total, done = 2 * len(methods), 0
    for svrg in (False, True):
        for label, method in methods.items():
            name = f"{'SVRG' if svrg else 'SGD'}, {label}"
            context.progress(name, done, total)
            rate = SVRG_RATE if svrg else SGD_RATE
            found[name] = context.once(
                f"descend {method} {problem} {epochs} {rate} {batch} {svrg}",
                lambda m=method, v=svrg, r=rate: descend(m, problem, best, epochs, r, batch, svrg=v),
            )
            done += 1
    return _outcome(context, spread, found)


def _outcome(
    context: Context, spread: dict[float, dict[str, float]], found: dict[str, dict[str, Any]]
) -> Outcome:
    judge = not context.quick
    outcome = Outcome()
    outcome.table(
        "a network's gradient: entries kept and variance for a budget, beside uniform sampling of as many",
        ("budget", "entries", "E||Q||^2 / ||g||^2", "drawn", "uniform", "bits", "bound on bits"),
        [
            (
                f"{budget:g}",
                f"{100 * one['entries']:.2f} %",
                f"{one['second']:.4f}",
                f"{one['energy']:.3f}",
                f"{one['uniform']:.2f}",
                f"{one['bits']:,.0f}",
                f"{one['bound']:,.0f}",
            )
            for budget, one in spread.items()
        ],
    )
    outcome.table(
        "logistic regression, 4 workers: gap to the least loss, and bits a worker hands over",
        ("", "first gap", "last gap", "bits"),
        [
            (name, f"{one['gaps'][0]:.3g}", f"{one['gaps'][-1]:.3g}", f"{one['bits'][-1]:,.0f}")
            for name, one in found.items()
        ],
    )
    outcome.figures["gap against bits"] = lines(
        {name: (one["bits"][1:], one["gaps"][1:]) for name, one in found.items()},
        "bits handed over per worker",
        "gap",
        log_x=True,
        log_y=True,
    )
    exact = max(abs(one["second"] / (1 + budget) - 1) for budget, one in spread.items())
    better = min(one["uniform"] / one["second"] for one in spread.values())
    svrg, uniform, dense = (found[f"SVRG, {n}"] for n in ("GSpar 10 %", "uniform 10 %", "dense"))
    sgd, blind = (found[f"SGD, {n}"] for n in ("GSpar 10 %", "uniform 10 %"))
    outcome.claims = [
        Claim(
            "the variance budget is used to the full",
            "E||Q||^2 = (1 + epsilon) ||g||^2",
            f"within {100 * exact:.2f} %",
            (exact < 0.01) if judge else None,
        ),
        Claim(
            "far less variance than uniform sampling of as many entries",
            "the least of all unbiased sparsifications",
            f"at least {better:.1f} times less",
            (better > 1.5) if judge else None,
        ),
        Claim(
            "coding length within the bound",
            "s(b + log2 d) + min(rho s log2 d, d) + b",
            f"at most {max(one['bits'] / one['bound'] for one in spread.values()):.2f} of it; entries at "
            f"most {max(one['within'] for one in spread.values()):.2f} of (1 + rho) s",
            all(one["bits"] <= one["bound"] and one["within"] <= 1 for one in spread.values())
            if judge
            else None,
        ),
        Claim(
            "sparsified SGD converges better than with uniform sampling",
            "curves in the paper",
            f"last gap {sgd['gaps'][-1]:.3g} against {blind['gaps'][-1]:.3g} at 10 % of the entries",
            (sgd["gaps"][-1] < blind["gaps"][-1]) if judge else None,
        ),
        Claim(
            "sparsified SVRG, too",
            "curves in the paper",
            f"last gap {svrg['gaps'][-1]:.3g} against {uniform['gaps'][-1]:.3g}; dense "
            f"{dense['gaps'][-1]:.3g} with {dense['bits'][-1] / svrg['bits'][-1]:.1f} times the bits",
            (svrg["gaps"][-1] < uniform["gaps"][-1]) if judge else None,
        ),
    ]
    return outcome


REPRODUCTION = Reproduction(
    "The unbiased sparsification with the least variance",
    "Wangni, Wang, Liu and Zhang, Gradient sparsification for communication-efficient distributed "
    "optimization, NeurIPS 2018.",
    run,
    methods=("gspar",),
)
