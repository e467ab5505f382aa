"""ScaleCom: accuracy at high compression, how alike workers' largest entries are, cost in workers, beta."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import msgspec
import torch

from reproductions import growth
from reproductions.base import Claim, Outcome, Reproduction, percent
from reproductions.cohort import Cohort, Gradients, Recipe, Training, images, loss_curves, train
from reproductions.parts import Context
from thinwire.methods import ScaleCom
from thinwire.tools.workloads import Dataset

RATES = (70, 100, 150)
LEADER, LOCAL = "scalecom(ratio=0.01)", "topk(ratio=0.01, reduce='gather')"
FILTERED = "scalecom(ratio=0.01, beta=0.1)"
# Of the entries; two random sets of that size have a distance of 1 - KEPT.
KEPT = 0.01
BETAS = (1.0, 0.3, 0.1)


class Likeness(msgspec.Struct):
    """How alike two workers are at some steps of a run, on the largest tensor.

    memories, gradients: the cosine distance of two workers' residuals, and of their gradients.
    workers: 1 - |A & B| / k for the k largest entries of two workers' memory + gradient, which is the
    normalised Hamming distance of the two sets. leader: the same for a worker and the mean of all.
    """

    steps: list[int] = []
    memories: list[float] = []
    gradients: list[float] = []
    workers: list[float] = []
    leader: list[float] = []


def similarity(method: str, recipe: Recipe, data: Dataset) -> Likeness:
    cohort = Cohort(method, recipe, data)
    beta = cast(ScaleCom, cohort.exchange).beta
    parameters = dict(cohort.models[0].named_parameters())
    name = max(parameters, key=lambda n: parameters[n].numel())
    k = max(1, int(KEPT * parameters[name].numel()))
    found = Likeness()

    def watch(gradients: Gradients) -> None:
        if cohort.steps == 0 or cohort.steps % max(1, recipe.steps // 20):
            return
        own = [g[name].flatten() for g in gradients]
        # The residual is the memory over beta.
        memories = [beta * session.residuals()[name].flatten() for session in cohort.sessions]
        both = [gradient + memory for gradient, memory in zip(own, memories, strict=True)]
        found.steps.append(cohort.steps)
        found.memories.append(_cosine_distance(memories[0], memories[1]))
        found.gradients.append(_cosine_distance(own[0], own[1]))
        found.workers.append(hamming(both[0], both[1], k))
        found.leader.append(hamming(both[0], torch.stack(both).mean(0), k))

    cohort.watched(watch)
    return found


def hamming(a: torch.Tensor, b: torch.Tensor, k: int) -> float:
    """The part of the k largest entries of `a` that are not among those of `b`."""
    first, second = (x.abs().topk(k).indices for x in (a, b))
    return 1 - float(torch.isin(first, second).float().mean())


def _cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return 1 - float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def run(context: Context) -> Outcome:
    quick = context.quick
    data = images(context)
    steps, hidden = (60, 64) if quick else (3200, 200)
    recipe = Recipe("mlp", 4, steps, batch=32, learning_rate=0.1, hidden=(hidden,))
    mild = replace(recipe, steps=recipe.steps // 4 if quick else 1600, batch=320, learning_rate=0.4)
    steep = replace(mild, learning_rate=1.0)
    methods = {
        "dense": "dense",
        **{f"{rate}x": f"scalecom(ratio={1 / rate:.6g})" for rate in RATES},
        "100x, chunks": "scalecom(chunk=100)",
        "100x, own top-k": LOCAL,
    }
    large = {
        "dense": "dense",
        **{f"100x, beta={beta:g}": f"scalecom(ratio=0.01, beta={beta})" for beta in BETAS},
    }
    short = replace(recipe, steps=40 if quick else 400)

    def trained(how: Recipe, methods: dict[str, str]) -> dict[str, Training]:
        parts = {label: partial(train, method, how, data) for label, method in methods.items()}
        return context.each(parts, f"batch {how.batch}, step size {how.learning_rate:g}:")

    runs = trained(recipe, methods)
    calm, wild = trained(mild, large), trained(steep, large)
    alike = context.each(
        {
            f"step size {rate:g}, beta={beta:g}": partial(
                similarity, method, replace(short, learning_rate=rate), data
            )
            for rate in (0.01, 0.1)
            for beta, method in ((1.0, LEADER), (0.1, FILTERED))
        },
        "likeness,",
    )
    outcome = Outcome(judged=not quick)
    _accuracy(outcome, recipe, data, runs)
    _likeness(outcome, alike)
    _constant(context, outcome)
    _filter(outcome, {mild: calm, steep: wild})
    outcome.figure("loss", loss_curves(runs), "step", "loss")
    return outcome


def _accuracy(outcome: Outcome, recipe: Recipe, data: Dataset, found: dict[str, Training]) -> None:
    dense = found["dense"]
    outcome.table(
        f"{data.name}, {recipe.workers} workers, batches of {recipe.batch}, step size "
        f"{recipe.learning_rate:g}: test accuracy",
        {"": "", **dense.accuracy_columns(), "payload per step": ",.0f", "of dense": ""},
        [
            (label, *one.accuracy_cells(), one.payload, f"1 / {dense.payload / one.payload:.0f}")
            for label, one in found.items()
        ],
    )
    late, early = (max(found[f"{rate}x"].behind(dense, look) for rate in RATES) for look in (-1, 0))
    outcome.claim(
        "no loss of accuracy at 70 to 150 times less data",
        "-0.5 to +0.2 points at 92-155x, trained to the end (secondary source)",
        f"at most {late:.2f} points below dense at {RATES[0]}-{RATES[-1]}x",
        late <= 0.5,
        f"after {dense.accuracies[0][0]:,} steps it is {early:.2f} points "
        f"({found['100x'].behind(dense, 0):.2f} at 100x, and "
        f"{found['100x, own top-k'].behind(dense, 0):.2f} with own top-k there): residuals are "
        "sent about a hundred steps late, which costs most at the beginning, whoever selects",
    )


def _likeness(outcome: Outcome, alike: dict[str, Likeness]) -> None:
    middle = len(next(iter(alike.values())).steps) // 2
    everything, first, half = slice(None), slice(None, middle), slice(middle, None)

    def mean(label: str, what: str, part: slice = everything) -> float:
        values = getattr(alike[label], what)[part]
        return sum(values) / len(values)

    outcome.table(
        "how alike two workers are, first half / second half: cosine distance of memories and gradients, "
        f"Hamming distance of the largest {100 * KEPT:g} % of two workers, and of a worker and the mean "
        f"(random sets: {1 - KEPT:g})",
        ("", "memories", "gradients", "two workers", "worker and mean"),
        [
            (
                label,
                *(
                    f"{mean(label, what, first):.2f} / {mean(label, what, half):.2f}"
                    for what in ("memories", "gradients", "workers", "leader")
                ),
            )
            for label in alike
        ],
    )
    memories = {label: (one.steps, one.memories) for label, one in alike.items()}
    outcome.figure("Cosine distance of two workers' memories", memories, "step", "cosine distance")
    leader = {label: (one.steps, one.leader) for label, one in alike.items()}
    title = "Hamming distance of a worker's largest 1 % and the mean's"
    outcome.figure(title, leader, "step", "Hamming distance")
    slow, fast, filtered = ("step size 0.01, beta=1", "step size 0.1, beta=1", "step size 0.1, beta=0.1")
    outcome.claim(
        "error feedback makes the workers' memories alike",
        "cosine distance falls towards 0 (remembered)",
        f"{mean(slow, 'memories'):.2f} on average with a step size of 0.01, gradients "
        f"{mean(slow, 'gradients'):.2f}; {mean(fast, 'memories'):.2f} with 0.1",
        mean(slow, "memories") < 0.5 * mean(slow, "gradients"),
        f"it rises again ({mean(slow, 'memories', first):.2f}, then {mean(slow, 'memories', half):.2f}) "
        "once the task is learned and gradients are mostly noise"
        if mean(slow, "memories", half) > mean(slow, "memories", first)
        else "",
    )
    outcome.claim(
        "beta = 0.1 keeps memories alike at ten times the step size",
        "the filter restores the similarity that large steps destroy (remembered)",
        f"cosine distance {mean(filtered, 'memories'):.2f} against {mean(fast, 'memories'):.2f}; "
        f"worker and mean {mean(filtered, 'leader'):.2f} against {mean(fast, 'leader'):.2f}",
        mean(filtered, "memories") < 0.5 * mean(fast, "memories"),
    )
    outcome.claims.append(
        Claim(
            "workers' largest entries are alike",
            "normalised Hamming distance 0.6 to 0.8 (remembered, not certain)",
            f"{mean(slow, 'workers'):.2f} between workers, {mean(slow, 'leader'):.2f} between a worker and "
            f"the mean, with a step size of 0.01; {mean(fast, 'workers'):.2f} and "
            f"{mean(fast, 'leader'):.2f} with 0.1",
            None,
            "not judged: the paper's figure is not certain. The sets differ far more than the memories they "
            "come from: many entries are close to the k-th largest, and a little noise decides among them",
        )
    )


def _constant(context: Context, outcome: Outcome) -> None:
    sizes = growth.received(context, outcome, (LEADER, LOCAL))
    ours, theirs = growth.factor(sizes[LEADER]), growth.factor(sizes[LOCAL])
    outcome.claim(
        "constant cost in workers",
        "O(1), while own top-k builds up to O(W)",
        f"{ours:.2f} x from {min(sizes[LEADER])} to {max(sizes[LEADER])} workers; own top-k {theirs:.0f} x",
        ours < 2.5 and theirs > 10,
        "(W-1)/W of an all-reduce, and a broadcast that only the tree's inner ranks forward",
    )


def _filter(outcome: Outcome, wide: dict[Recipe, dict[str, Training]]) -> None:
    for how, runs in wide.items():
        outcome.table(
            f"ten times the batch: {how.batch} rows per worker, step size {how.learning_rate:g}",
            {"": "", **runs["dense"].accuracy_columns(), "last loss": ".4f"},
            [
                (label, *one.accuracy_cells(), sum(one.losses[-20:]) / len(one.losses[-20:]))
                for label, one in runs.items()
            ],
        )
    (mild, calm), (steep, wild) = wide.items()

    def accuracy(runs: dict[str, Training], beta: float) -> float:
        return 100 * runs[f"100x, beta={beta:g}"].accuracy

    def summary(how: Recipe) -> str:
        each = (f"{accuracy(wide[how], beta):.2f} % with beta = {beta:g}" for beta in BETAS)
        return f"step size {how.learning_rate:g}: {', '.join(each)}"

    def gain(beta: float) -> float:
        return accuracy(wild, beta) - accuracy(wild, 1.0)

    outcome.claim(
        "beta = 0.1 helps at ten times the batch",
        "needed at large batch; 0.1 to 0.3 (secondary source)",
        f"{summary(mild)}; {summary(steep)}",
        accuracy(calm, 0.1) > accuracy(calm, 1.0),
        f"judged at a step size of {mild.learning_rate:g}, with which dense reaches "
        f"{percent(calm['dense'].accuracy, 1)}: the residual is sent after {1 / KEPT / 0.1:,.0f} "
        f"steps instead of {1 / KEPT:,.0f}, which costs more than the noise it filters. At "
        f"{steep.learning_rate:g}, too long for dense ({percent(wild['dense'].accuracy, 1)}), it "
        f"is worth {gain(0.3):+.2f} points with 0.3 and {gain(0.1):+.2f} with 0.1",
    )


REPRODUCTION = Reproduction(
    "Indices of one leader in turn, for all workers",
    "Chen et al., ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
    "training, NeurIPS 2020.",
    run,
    methods=("scalecom",),
)
