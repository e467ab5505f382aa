"""A2SGD: what two means a step are worth, beside no communication at all and periodic averaging."""

from __future__ import annotations

from typing import Any

import torch

from reproductions.base import Claim, Context, Outcome, Reproduction
from reproductions.cohort import Cohort, Gradients, Recipe, images
from thinwire.tools.report.figures import lines
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.models import evaluate

PUBLISHED = "a2sgd(average_every=None, allow_drift=True)"
AVERAGED = "a2sgd(average_every=32)"
ALONE = "no communication"
PERIODIC = "no communication, averaged every 32 steps"
DENSE = "dense"
VARIANTS = (DENSE, PUBLISHED, ALONE, AVERAGED, PERIODIC)
PERIOD = 32


class Silent(Cohort):
    """Workers that never talk, except that their parameters may be averaged from time to time."""

    def __init__(self, recipe: Recipe, data: Dataset, every: int | None) -> None:
        # Replicas as A2SGD has them; what it would exchange is left out.
        super().__init__(PUBLISHED, recipe, data)
        self.every = every

    def average(self, gradients: Gradients) -> Gradients:
        if self.every is not None and self.steps and self.steps % self.every == 0:
            self.reconcile()
        return gradients


class Watched(Cohort):
    """Notes how much of the way to the mean of all gradients is left after the exchange.

    `left` has |out_i - mean| / |g_i - mean| of the first worker, a value a step: 0 is a full mean, 1 no
    communication.
    """

    def __init__(self, method: str, recipe: Recipe, data: Dataset) -> None:
        super().__init__(method, recipe, data)
        self.left: list[float] = []

    def average(self, gradients: Gradients) -> Gradients:
        flats = [torch.cat([g.flatten() for g in own.values()]) for own in gradients]
        own, mean = flats[0], torch.stack(flats).mean(0)
        made = super().average(gradients)
        after = torch.cat([made[0][name].flatten() for name in gradients[0]])
        left = float((after - mean).square().sum()) / float((own - mean).square().sum())
        self.left.append(left**0.5)
        return made


def _cohort(variant: str, recipe: Recipe, data: Dataset) -> Cohort:
    if variant in (ALONE, PERIODIC):
        return Silent(recipe, data, PERIOD if variant == PERIODIC else None)
    return Watched(variant, recipe, data)


def measure(variant: str, recipe: Recipe, data: Dataset, looks: int) -> dict[str, Any]:
    """Train; look at single replicas, at their mean, and at how far they are apart."""
    cohort = _cohort(variant, recipe, data)
    curve: list[dict[str, float]] = []
    every = max(1, recipe.steps // looks)
    for number in range(1, recipe.steps + 1):
        cohort.step()
        if number % every == 0 or number == recipe.steps:
            single = [evaluate(model, data)[1] for model in cohort.models]
            curve.append(
                {
                    "step": number,
                    "single": sum(single) / len(single),
                    "mean": evaluate(cohort.mean_model(), data)[1],
                    "spread": cohort.spread(),
                }
            )
    spent = cohort.spent()
    left = cohort.left if isinstance(cohort, Watched) else [1.0]
    return {
        "curve": curve,
        "sent": spent.sent_bytes / recipe.steps,
        "left": sum(left) / len(left),
    }


def run(context: Context) -> Outcome:
    data = images(context)
    recipe = Recipe(
        "mlp",
        workers=4 if context.quick else 8,
        steps=64 if context.quick else 1200,
        batch=16,
        learning_rate=0.05,
        hidden=(64,) if context.quick else (200,),
        # Every tensor goes through the two means, as in the paper; otherwise small ones are averaged.
        dense_below=0,
    )
    found: dict[str, dict[str, Any]] = {}
    for number, variant in enumerate(VARIANTS):
        context.progress(variant, number, len(VARIANTS))
        key = f"{recipe.key(variant, data)}, the way to the mean"
        found[variant] = context.once(key, lambda v=variant: measure(v, recipe, data, 12))
    last = {variant: found[variant]["curve"][-1] for variant in VARIANTS}
    outcome = Outcome()
    outcome.table(
        f"{data.name}, {recipe.workers} workers, {recipe.steps} steps: test accuracy of one replica (mean "
        "over the replicas), of the mean of all replicas, their spread, how much of a gradient's "
        "distance to the mean of all is left after the exchange, and bytes sent per worker and step",
        ("method", "one replica", "averaged", "spread", "left", "sent"),
        [
            (
                variant,
                f"{100 * last[variant]['single']:.2f} %",
                f"{100 * last[variant]['mean']:.2f} %",
                f"{last[variant]['spread']:.4f}",
                f"{100 * found[variant]['left']:.1f} %",
                f"{found[variant]['sent']:,.0f}",
            )
            for variant in VARIANTS
        ],
    )
    for what, label in (("single", "one replica"), ("mean", "averaged"), ("spread", "spread")):
        outcome.figures[f"{label} against steps"] = lines(
            {v: ([p["step"] for p in f["curve"]], [p[what] for p in f["curve"]]) for v, f in found.items()},
            "step",
            label,
        )
    judge = not context.quick
    own, alone = last[PUBLISHED], last[ALONE]
    gained = 100 * (own["single"] - alone["single"])
    lost = 100 * (last[DENSE]["single"] - own["single"])
    outcome.claims = [
        Claim(
            "bytes a step do not depend on the model",
            "two numbers: 64 bits",
            f"{found[PUBLISHED]['sent']:,.0f} bytes sent a step, {8} of them payload",
            (found[PUBLISHED]["sent"] < 100) if judge else None,
        ),
        Claim(
            "accuracy close to dense SGD, with the two means alone",
            "close to dense (remembered; figures not recovered)",
            f"{100 * own['single']:.2f} % for one replica, {lost:+.2f} points below dense",
            (lost <= 0.5) if judge else None,
            "replicas are never brought together, so each has learned from its own batches only",
        ),
        Claim(
            "the two means add something to training without communication",
            "implied by the method",
            f"{gained:+.2f} points over no communication, spread {own['spread']:.3f} against "
            f"{alone['spread']:.3f}",
            (gained > 0.3) if judge else None,
            f"after it {100 * found[PUBLISHED]['left']:.1f} % of a gradient's distance to the mean of all "
            "gradients is left: two numbers cannot say where the others' gradients differ",
        ),
    ]
    outcome.notes.append(
        "Verdict: with the averaging of parameters that thinwire adds (every 32 steps), A2SGD does what "
        "averaging the parameters every 32 steps does by itself; compare the last two rows."
    )
    return outcome


REPRODUCTION = Reproduction(
    "Two means in place of a gradient",
    "Bhattacharya, Yu and Chowdhury, O(1) communication for distributed SGD through two-level gradient "
    "averaging, 2021.",
    run,
    methods=("a2sgd",),
)
