"""A2SGD: what two means per step are worth, against no communication; and the time of a step."""

from __future__ import annotations

from functools import partial

import msgspec
import torch

from reproductions.a2sgd_time import LINK, WORKERS, times
from reproductions.base import Claim, Outcome, Reproduction, percent
from reproductions.cohort import Cohort, Gradients, Recipe, images
from reproductions.parts import Context
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.models import evaluate

PUBLISHED = "a2sgd(average_every=None, allow_drift=True)"
AVERAGED = "a2sgd(average_every=32)"
ALONE = "no communication"
PERIODIC = "no communication, averaged every 32 steps"
DENSE = "dense"
VARIANTS = (DENSE, PUBLISHED, ALONE, AVERAGED, PERIODIC)
PERIOD = 32
LOOKS = 12
TOPK, QSGD = "topk(ratio=0.001, reduce='gather')", "qsgd(bits=4, reduce='gather')"


class Silent(Cohort):
    """Workers that do not communicate, except that their parameters may be averaged periodically."""

    def __init__(self, recipe: Recipe, data: Dataset, every: int | None) -> None:
        # Replicas as A2SGD has them; what it would exchange is left out.
        super().__init__(PUBLISHED, recipe, data)
        self.every = every

    def average(self, gradients: Gradients) -> Gradients:
        if self.every is not None and self.steps and self.steps % self.every == 0:
            self.reconcile()
        return gradients


class Watched(Cohort):
    """Records how much of the distance to the mean of all gradients is left after the exchange.

    `left` has |out_i - mean| / |g_i - mean| of the first worker for each step: 0 is a full mean, 1 no
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


class Look(msgspec.Struct):
    """Test accuracy of one replica (mean over the replicas) and of their mean, and how far they are apart."""

    step: int
    single: float
    mean: float
    spread: float


class Run(msgspec.Struct):
    curve: list[Look]
    sent: float
    left: float


def measure(variant: str, recipe: Recipe, data: Dataset, looks: int) -> Run:
    if variant in (ALONE, PERIODIC):
        cohort = Silent(recipe, data, PERIOD if variant == PERIODIC else None)
    else:
        cohort = Watched(variant, recipe, data)
    curve: list[Look] = []
    for number in cohort.run(looks):
        single = [evaluate(model, data)[1] for model in cohort.models]
        mean = evaluate(cohort.mean_model(), data)[1]
        curve.append(Look(number, sum(single) / len(single), mean, cohort.spread()))
    left = cohort.left if isinstance(cohort, Watched) else [1.0]
    return Run(curve, cohort.spent().sent_bytes / recipe.steps, sum(left) / len(left))


def run(context: Context) -> Outcome:
    data = images(context)
    workers, steps, hidden = (4, 64, 64) if context.quick else (8, 10_000, 200)
    # Every tensor goes through the two means, as in the paper; otherwise small ones are averaged.
    recipe = Recipe("mlp", workers, steps, batch=16, learning_rate=0.05, hidden=(hidden,), dense_below=0)
    found = context.each({variant: partial(measure, variant, recipe, data, LOOKS) for variant in VARIANTS})
    last = {variant: one.curve[-1] for variant, one in found.items()}
    outcome = Outcome(judged=not context.quick)
    outcome.table(
        f"{data.name}, {recipe.workers} workers, {recipe.steps} steps: test accuracy of one replica (mean "
        "over the replicas), of the mean of all replicas, their spread, how much of a gradient's "
        "distance to the mean of all is left after the exchange, and bytes sent per worker and step",
        {
            "method": "",
            "one replica": ".2%",
            "averaged": ".2%",
            "spread": ".4f",
            "left": ".1%",
            "sent": ",.0f",
        },
        [(v, last[v].single, last[v].mean, last[v].spread, one.left, one.sent) for v, one in found.items()],
    )
    for field, label in (("single", "one replica"), ("mean", "averaged"), ("spread", "spread")):
        curves = {
            v: ([p.step for p in f.curve], [getattr(p, field) for p in f.curve]) for v, f in found.items()
        }
        outcome.figure(f"{label} against steps", curves, "step", label)
    own, alone = last[PUBLISHED], last[ALONE]
    sent, left = found[PUBLISHED].sent, found[PUBLISHED].left
    gained = 100 * (own.single - alone.single)
    lost = 100 * (last[DENSE].single - own.single)
    outcome.claim(
        "bytes per step do not depend on the model",
        "two numbers: 64 bits",
        f"{sent:,.0f} bytes sent per step, 8 of them payload",
        sent < 100,
    )
    outcome.claim(
        "accuracy close to dense SGD, with the two means alone",
        "close to dense (remembered; figures not recovered)",
        f"{percent(own.single)} for one replica, {lost:+.2f} points below dense",
        lost <= 0.5,
        "replicas are never averaged, so each learns from its own batches only; without any communication it "
        f"is {100 * (last[DENSE].single - alone.single):+.2f} points",
    )
    outcome.claim(
        "the two means add something to training without communication",
        "implied by the method",
        f"{gained:+.2f} points over no communication, spread {own.spread:.3f} against {alone.spread:.3f}",
        gained > 0.3,
        f"{percent(left, 1)} of a gradient's distance to the mean of all gradients is left after the "
        "exchange: two numbers cannot say where the other gradients differ",
    )
    outcome.notes.append(
        "With the averaging of parameters that thinwire adds (every 32 steps), A2SGD is as good as averaging "
        "the parameters every 32 steps alone; compare the last two rows."
    )
    _speed(context, outcome)
    return outcome


def _speed(context: Context, outcome: Outcome) -> None:
    """The paper's headline is training time; a step's time is its part that depends on the method."""
    hidden, rounds = ((32, 32), 3) if context.quick else ((1500, 1500), 6)
    context.progress("a step of an LSTM", 0, 1)
    found = context.once(times, (DENSE, PUBLISHED, TOPK, QSGD), hidden, rounds, LINK)
    own = found[PUBLISHED]
    outcome.table(
        f"a step of an LSTM language model (two layers of {hidden[0]}, 10,000 words), {WORKERS} workers, "
        f"emulated link of {LINK}, median of {rounds}: seconds of the computation, of the exchange, of its "
        "work and network, and of the step; how many times as long as A2SGD's step and exchange; bytes sent",
        {"method": "", "compute": ".3f", "exchange": ".3f", "work": ".3f", "network": ".3f", "step": ".3f"}
        | {"steps": ".2f", "exchanges": ".1f", "sent": ",.0f"},
        [
            (
                method,
                *(one.compute, one.exchange, one.work, one.network, one.total),
                *(one.total / own.total, one.exchange / own.exchange, one.sent),
            )
            for method, one in found.items()
        ],
    )
    for method, published in ((TOPK, 3.2), (QSGD, 23.2)):
        other = found[method]
        outcome.claims.append(
            Claim(
                f"LSTM of 66 M parameters: {published} times as fast as {method.partition('(')[0]}",
                f"{published} x less training time (abstract), up to 16 workers with GPUs",
                f"{other.total / own.total:.2f} x less time for a step, {other.exchange / own.exchange:.1f} "
                f"x without the computation ({other.exchange:.2f} s against {own.exchange:.2f} s)",
                None,
                "not judged: the paper's factor is of its implementations on its hardware. Here selecting "
                f"and coding take {other.work:.2f} s of {other.exchange:.2f} s; dense sends everything in "
                f"{found[DENSE].exchange:.2f} s",
            )
        )


REPRODUCTION = Reproduction(
    "Two means in place of a gradient",
    "Bhattacharya, Yu and Chowdhury, O(1) communication for distributed SGD through two-level gradient "
    "averaging, 2021.",
    run,
    methods=("a2sgd",),
)
