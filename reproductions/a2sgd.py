"""A2SGD: what two means per step are worth, against no communication; and the time of a step.

Verdicts:
- Bytes that do not depend on the model: fails if a worker sends 100 bytes or more per step.
- Accuracy close to dense SGD: fails if one replica, on average over replicas and 3 seeds, is more than 0.5
  points below dense after 10,000 steps. The same of workers that do not communicate stands beside it.
- The two means add something: fails unless one replica is better than without communication by more than two
  standard errors of the difference over 3 seeds.
- The paper's factors of time against top-k and QSGD: fail if a step of A2SGD on an LSTM of 66 M parameters is
  not faster than a step of the other. The factors themselves are of the paper's implementations and GPUs and
  are not judged.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import fmean

import msgspec
import torch

from reproductions.a2sgd_time import LINK, WORKERS, times
from reproductions.base import Outcome, Reproduction, Section, percent
from reproductions.cohort import Cohort, Gradients, Recipe, images
from reproductions.parts import Context
from reproductions.seeds import SEEDS, deviation, plus_minus
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.models import evaluate

PUBLISHED = "a2sgd(average_every=None, allow_drift=True)"
AVERAGED = "a2sgd(average_every=32)"
ALONE = "no communication"
PERIODIC = "no communication, averaged every 32 steps"
DENSE = "dense"
VARIANTS = (DENSE, PUBLISHED, ALONE, AVERAGED, PERIODIC)
PERIOD = 32
LOOKS = 5
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


class Seeds(msgspec.Struct):
    """The runs of a variant with several seeds."""

    runs: list[Run]

    def last(self, field: str) -> list[float]:
        """At the end, by seed: "single", "mean" or "spread"."""
        return [getattr(run.curve[-1], field) for run in self.runs]

    def mean(self, field: str) -> float:
        return fmean(self.last(field))

    @property
    def sent(self) -> float:
        return fmean(run.sent for run in self.runs)

    @property
    def left(self) -> float:
        return fmean(run.left for run in self.runs)


def _accuracy(context: Context, outcome: Outcome) -> None:
    data = images(context)
    workers, steps, hidden = (4, 64, 64) if context.quick else (4, 10_000, 200)
    seeds = (0,) if context.quick else SEEDS
    # Every tensor goes through the two means, as in the paper; otherwise small ones are averaged.
    recipe = Recipe("mlp", workers, steps, batch=16, learning_rate=0.05, hidden=(hidden,), dense_below=0)
    runs = context.each(
        {
            (variant, "seed", seed): partial(measure, variant, replace(recipe, seed=seed), data, LOOKS)
            for seed in seeds
            for variant in VARIANTS
        }
    )
    found = {variant: Seeds([runs[variant, "seed", seed] for seed in seeds]) for variant in VARIANTS}
    outcome.table(
        f"{data.name}, {recipe.workers} workers, {recipe.steps:,} steps, {len(seeds)} seeds: test accuracy "
        "of one replica (mean over the replicas), of the mean of all replicas, their spread, how much of a "
        "gradient's distance to the mean of all is left after the exchange, and bytes sent per worker and "
        "step",
        {"method": "", "one replica": "", "averaged": "", "spread": ".4f", "left": ".1%", "sent": ",.0f"},
        [
            (
                variant,
                plus_minus(one.last("single")),
                plus_minus(one.last("mean")),
                one.mean("spread"),
                one.left,
                one.sent,
            )
            for variant, one in found.items()
        ],
    )
    for field, label in (("single", "one replica"), ("mean", "averaged"), ("spread", "spread")):
        curves = {
            v: ([p.step for p in f.runs[0].curve], [getattr(p, field) for p in f.runs[0].curve])
            for v, f in found.items()
        }
        outcome.figure(f"{label} against steps", curves, "step", label)
    _judge(outcome, found)


def _judge(outcome: Outcome, found: dict[str, Seeds]) -> None:
    own, alone, dense = found[PUBLISHED], found[ALONE], found[DENSE]
    gained = 100 * (own.mean("single") - alone.mean("single"))
    lost, alone_lost = (100 * (dense.mean("single") - one.mean("single")) for one in (own, alone))
    chance = 2 * math.hypot(
        *(100 * deviation(one.last("single")) / len(one.runs) ** 0.5 for one in (own, alone))
    )
    outcome.claim(
        "bytes per step do not depend on the model",
        "two numbers: 64 bits",
        f"{own.sent:,.0f} bytes sent per step, 8 of them payload",
        own.sent < 100,
    )
    outcome.claim(
        "accuracy close to dense SGD, with the two means alone",
        "close to dense (remembered; figures not recovered)",
        f"{plus_minus(own.last('single'))} for one replica, {lost:+.2f} points below dense",
        lost <= 0.5,
        f"without any communication it is {alone_lost:+.2f} points: each replica learns from its own batches "
        "only, and this task lets it",
    )
    outcome.claim(
        "the two means add something to training without communication",
        "implied by the method",
        f"{gained:+.2f} points over no communication, where two standard errors are {chance:.2f}; spread "
        f"{own.mean('spread'):.3f} against {alone.mean('spread'):.3f}",
        gained > chance,
        f"{percent(own.left, 1)} of a gradient's distance to the mean of all gradients is left after the "
        "exchange: two numbers cannot say where the other gradients differ",
    )
    outcome.notes.append(
        "With the averaging of parameters that thinwire adds (every 32 steps), A2SGD is as good as averaging "
        "the parameters every 32 steps alone; compare the last two rows."
    )


def _speed(context: Context, outcome: Outcome) -> None:
    """The paper's headline is training time; a step's time is its part that depends on the method."""
    hidden, rounds = ((32, 32), 3) if context.quick else ((1500, 1500), 6)
    methods = (DENSE, PUBLISHED, TOPK, QSGD)
    part = {"": partial(times, methods, hidden, rounds, LINK)}
    found = context.each(part, "a step of an LSTM", alone=True)[""]
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
        other, name = found[method], method.partition("(")[0]
        outcome.claim(
            f"LSTM of 66 M parameters: less time for a step than {name}",
            f"{published} x less training time (abstract), up to 16 workers with GPUs",
            f"{other.total / own.total:.2f} x for a step, {other.exchange / own.exchange:.1f} x without the "
            f"computation ({other.exchange:.2f} s against {own.exchange:.2f} s)",
            other.total > own.total,
            f"the factor is of the paper's implementations and GPUs and is not judged: here selecting and "
            f"coding take {other.work:.2f} s of {other.exchange:.2f} s, A2SGD's passes over the gradient "
            f"{own.work:.2f} s; dense sends everything in {found[DENSE].exchange:.2f} s",
        )


REPRODUCTION = Reproduction(
    "Two means in place of a gradient",
    "Bhattacharya, Yu and Chowdhury, O(1) communication for distributed SGD through two-level gradient "
    "averaging, 2021.",
    (
        Section("accuracy of A2SGD against dense SGD and against no communication", _accuracy),
        Section("the time of a step with an LSTM of 66 M parameters, against top-k and QSGD", _speed),
    ),
    __doc__ or "",
    takeaway="Average the parameters from time to time (`average_every`) and count on that alone: two means "
    "per step are next to no communication, and after 10,000 steps replicas end below those that "
    "never communicate.",
    methods=("a2sgd",),
)
