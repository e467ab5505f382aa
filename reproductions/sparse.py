"""Sparse communication: which entries, whose, over what, with or without feedback, where the momentum.

CIFAR-10 (10,000 images, halved), a convolutional network, 30 epochs, 3 seeds; every rule and kind of feedback
has the best of three rates, by 10 epochs with a seed that is not among the three; so have dense and a worker
alone.

Verdicts:
- Error feedback, and layers against the whole model, are key parameters: fails if the median effect on the
  accuracy, over pairs of cells that differ in nothing else, is 1 point or less for every rule.
- Indices may be shared: fails if the median effect of sharing them over all pairs is a loss of 1 point or
  more.
- Random block performs close to dense SGD: fails if it is 2 points or more below dense with shared indices
  and feedback, layer by layer, momentum after: not the best of its cells.
- Random block is the cheapest to select: fails if its time is not below that of top-k with own indices.
- Where the momentum belongs: shown, not judged, since the paper's answer is not known.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from reproductions import seeds
from reproductions.base import Outcome, Reproduction, Section, percent
from reproductions.cohort import Cohort, Recipe, train
from reproductions.parts import Context
from reproductions.seeds import SEEDS
from reproductions.small import halved
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.feedback import Residual
from thinwire.methods.families.sparse import count_of
from thinwire.net.costs import Link
from thinwire.tools.compare.study import (
    COLUMNS,
    RULES,
    Cell,
    Effects,
    Feedback,
    Rule,
    cells,
    effects,
    summary,
)
from thinwire.tools.workloads import Dataset

RATIO = 0.05
MOMENTUM = 0.9
DENSE, ALONE = "dense", "a worker alone"
EXTRA = [Cell(rule, rule != "top-k", False, "on", before=True) for rule in RULES]
"""Momentum before the exchange: one cell of each rule."""


def exchange_of(cell: Cell) -> Exchange | str:
    """thinwire's own method where there is one; two corners of the study are nobody's method."""
    scope = "model" if cell.whole else "tensor"
    return cell.method(RATIO) or Corner(cell.rule, cell.shared, cell.feedback, scope)


def is_corner(cell: Cell) -> bool:
    return cell.method(RATIO) is None


def recipe_of(cell: Cell, base: Recipe) -> Recipe:
    if cell.before:
        return replace(base, momentum_before=MOMENTUM)
    return replace(base, momentum=MOMENTUM)


@dataclass(frozen=True)
class Corner(Exchange):
    """What only this study asks for: a leader's top-k without feedback, and blocks that each rank draws.

    Written in plain torch, over one mean: it shows what becomes of the accuracy, not what would travel.
    """

    name: ClassVar[str] = "corner"
    rule: Rule = "random block"
    shared: bool = False
    feedback: Feedback = "on"
    scope: Scope = "tensor"

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback == "on", scope=self.scope)

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        u = x + state.error if self.feedback == "on" else x.clone()
        k = count_of(RATIO, u.numel())
        if self.rule == "top-k":
            chosen = u.abs().topk(k).indices.to(torch.int32)
            (chosen,) = await ch.broadcast([chosen], ch.step % ch.size)
            chosen = chosen.long()
        else:
            start = int(torch.randint(u.numel(), (1,), generator=ch.private_rng()))
            chosen = (start + torch.arange(k)) % u.numel()
        sent = torch.zeros_like(u)
        sent[chosen] = u[chosen]
        mean = await ch.mean(sent)
        if await ch.commit(bool(mean.isfinite().all())) and self.feedback == "on":
            state.error.copy_(u - sent)
        out.copy_(mean)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        return 4 * layout.numel + (4 * count_of(RATIO, layout.numel) if self.rule == "top-k" else 0)


def compression_time(method: str | Exchange, recipe: Recipe, data: Dataset, repeats: int) -> float:
    """Seconds of a worker's own work in a step, the least of several: other programs only add to it."""
    cohort = Cohort(method, recipe, data)
    _, gradients = cohort.gradients()
    best = math.inf
    for _ in range(repeats):
        before = sum(session.meter.work_seconds for session in cohort.sessions)
        cohort.average([{name: g.clone() for name, g in own.items()} for own in gradients])
        after = sum(session.meter.work_seconds for session in cohort.sessions)
        best = min(best, (after - before) / recipe.workers)
    return best


Accuracies = dict[Cell, float]
Times = dict[Cell, float]
RATES = (0.01, 0.03, 0.1)
TUNING_SEED, TUNING_PART = 9, 3
"""Rates are compared by runs of a third of the steps."""
CHANNELS = (16, 32, 32, 64)
"""Of the convolutions, and the width of the hidden layer."""


def _tuned(
    context: Context, data: Dataset, kinds: dict[str, tuple[str | Exchange, Recipe]], rows: int
) -> dict[str, float]:
    """The best rate of each kind, by its accuracy with one seed."""
    rates = RATES[1:2] if context.quick else RATES
    found = context.each(
        {
            (kind, "rate", rate): partial(
                train,
                method,
                replace(recipe, learning_rate=rate, seed=TUNING_SEED, steps=recipe.steps // TUNING_PART),
                data,
                looks=1,
                test_rows=rows,
            )
            for kind, (method, recipe) in kinds.items()
            for rate in rates
        },
        "rates:",
    )
    return {
        kind: max(rates, key=lambda rate, kind=kind: found[kind, "rate", rate].accuracy) for kind in kinds
    }


def _kind(cell: Cell) -> str:
    """What has a rate of its own."""
    return f"{cell.rule}, feedback {cell.feedback}"


def _study(context: Context, outcome: Outcome) -> None:
    quick = context.quick
    data = halved(context)
    workers, batch = 4, 64
    epochs = 30
    steps = 24 if quick else -(-epochs * len(data.inputs) // (workers * batch))
    base = Recipe("cnn", workers, steps, batch, decay_at=0.75, hidden=CHANNELS)
    if quick:
        base = replace(base, model="mlp", hidden=(64, 64))
    after, rows = replace(base, momentum=MOMENTUM), 0 if quick else 4000
    todo = cells() + ([] if quick else EXTRA)
    first = {_kind(cell): cell for cell in reversed(todo) if not cell.before}
    kinds: dict[str, tuple[str | Exchange, Recipe]] = {
        DENSE: (DENSE, after),
        ALONE: (DENSE, replace(after, workers=1)),
    }
    kinds |= {kind: (exchange_of(cell), recipe_of(cell, base)) for kind, cell in first.items()}
    rates = _tuned(context, data, kinds, rows)
    methods = {
        kind: (kinds[kind][0], replace(kinds[kind][1], learning_rate=rates[kind])) for kind in (DENSE, ALONE)
    }
    methods |= {
        str(cell): (exchange_of(cell), replace(recipe_of(cell, base), learning_rate=rates[_kind(cell)]))
        for cell in todo
    }
    how = SEEDS[:1] if quick else SEEDS
    found = seeds.train_all(context, methods, data, f"{data.name}:", seeds=how, looks=1, test_rows=rows)
    repeats = 3 if quick else 20
    times = context.each(
        {cell: partial(compression_time, exchange_of(cell), base, data, repeats) for cell in todo},
        f"{data.name}, time:",
        alone=True,
    )
    runs = {cell: found[str(cell)] for cell in todo}
    accuracies = {cell: seeds.mean(own) for cell, own in runs.items()}
    dense = found[DENSE]
    outcome.table(
        f"{data.name}, {base.model}, {workers} workers, {steps:,} steps, {100 * RATIO:g} % sent, "
        f"{len(how)} seeds",
        dict.fromkeys(COLUMNS, "") | {"rate": "g", "accuracy": "", "payload per step": ",.0f", "time": ""},
        [
            (DENSE, "", "", "", "after", rates[DENSE], seeds.accuracy(dense), seeds.payload(dense), ""),
            (ALONE, "", "", "", "after", rates[ALONE], seeds.accuracy(found[ALONE]), 0, ""),
            *(
                (
                    *cell.row(),
                    rates[_kind(cell)],
                    seeds.accuracy(runs[cell]),
                    *(
                        ("-", "-")
                        if is_corner(cell)
                        else (seeds.payload(runs[cell]), f"{1e3 * times[cell]:.2f} ms")
                    ),
                )
                for cell in sorted(todo, key=lambda cell: -accuracies[cell])
            ),
        ],
    )
    found_effects = effects(accuracies)
    outcome.table(
        f"{data.name}: what a change does to the accuracy, all else equal: the median, in points, and in how "
        "many pairs it helps",
        ("change", *RULES),
        [(what, *(summary(values[rule]) for rule in RULES)) for what, values in found_effects.items()],
    )
    own = {rule: [c for c in todo if c.rule == rule and not is_corner(c)] for rule in RULES}
    outcome.figure(
        f"Accuracy against compression time, {data.name}",
        {rule: ([1e3 * times[c] for c in own[rule]], [accuracies[c] for c in own[rule]]) for rule in RULES},
        "milliseconds of a worker's own work per step",
        "test accuracy",
        log="x",
        mode="markers",
    )
    outcome.notes.append(
        f"A worker alone, with a quarter of the rows per step, reaches {seeds.accuracy(found[ALONE])}, "
        f"dense {seeds.accuracy(dense)}: on so few images more rows do not help. The differences show what "
        "a method loses, not what communication gains."
    )
    _judge_effects(outcome, data.name, found_effects)
    _judge_blocks(outcome, data.name, seeds.mean(dense), accuracies, times)
    if found_effects["momentum after"]["top-k"]:
        outcome.claim(
            f"{data.name}: momentum after the exchange, or before",
            "one of the questions",
            f"after against before: {_by_rule(found_effects, 'momentum after')}",
            None,
            "the paper's answer is not known; its text would settle it",
        )


def _by_rule(effects: Effects, what: str) -> str:
    return "; ".join(f"{rule} {summary(values)}" for rule, values in effects[what].items() if values)


def _judge_effects(outcome: Outcome, name: str, effects: Effects) -> None:
    def largest(what: str) -> float:
        return max(abs(statistics.median(values)) for values in effects[what].values() if values)

    outcome.claim(
        f"{name}: error feedback is a key parameter",
        "one of the three (which three is remembered)",
        f"on against off: {_by_rule(effects, 'error feedback on')}",
        largest("error feedback on") > 1,
        "without feedback entries are sent as they are, not scaled by n / k",
    )
    shared = [value for values in effects["indices shared"].values() for value in values]
    outcome.claim(
        f"{name}: indices may be shared",
        "shared indices allow an all-reduce at little loss",
        f"shared against own: {_by_rule(effects, 'indices shared')}",
        statistics.median(shared) > -1,
    )
    outcome.claim(
        f"{name}: layer by layer or global is a key parameter",
        "one of the three (remembered)",
        f"layer against model: {_by_rule(effects, 'layer by layer')}",
        largest("layer by layer") > 1,
        "judged by more than a point for any rule. A block of the whole model leaves most layers without "
        "an update; as many single entries reach them all",
    )


def _judge_blocks(outcome: Outcome, name: str, dense: float, found: Accuracies, times: Times) -> None:
    best = {rule: max((value, cell) for cell, value in found.items() if cell.rule == rule) for rule in RULES}
    own, (of_block, block_cell) = found[Cell("random block", True, False, "on")], best["random block"]
    fed, unfed = (
        [100 * value for c, value in found.items() if c.rule == "random block" and c.feedback == kind]
        for kind in ("on", "off")
    )
    outcome.claim(
        f"{name}: random block performs close to dense SGD",
        "close to SGD; other studies: 1 to 6 points behind, with feedback",
        f"{percent(own, 1)} with shared indices and feedback, by layer, against dense {percent(dense, 1)}; "
        f"its best cell {percent(of_block, 1)} ({', '.join(block_cell.row()[1:])}); top-k at best "
        f"{percent(best['top-k'][0], 1)}, random-k {percent(best['random-k'][0], 1)}",
        100 * (dense - own) < 2,
        f"its cells: {min(fed):.1f} to {max(fed):.1f} % with feedback, {min(unfed):.1f} to {max(unfed):.1f} "
        "% without",
    )
    block, top = (
        min(time for c, time in times.items() if c.rule == rule and c.shared == shared and c.feedback == "on")
        for rule, shared in (("random block", True), ("top-k", False))
    )
    outcome.claim(
        f"{name}: random block is the cheapest to select",
        "contiguous memory, no index",
        f"{1e3 * block:.2f} ms per step against {1e3 * top:.2f} of top-k: {block / top:.2f}",
        block < top,
    )


REPRODUCTION = Reproduction(
    "Sparse communication and its three key parameters",
    "Eghlidi and Jaggi, Sparse communication for training deep networks, 2020.",
    (Section("the study of three parameters: 30 epochs of CIFAR-10, 3 seeds, tuned rates", _study),),
    __doc__ or "",
    takeaway="With error feedback and a rate of their own, top-k and random-k at 5 % end like dense "
    "training, while random blocks are the cheapest to select, gain most from feedback, and still "
    "end points behind.",
    methods=("randomblock", "randomk", "topk"),
)
