"""Sparse communication: which entries, whose, over what, with or without feedback, where the momentum."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from reproductions.base import Claim, Outcome, Reproduction, percent
from reproductions.cohort import Cohort, Recipe, train
from reproductions.parts import Context
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.feedback import Residual
from thinwire.methods.families.sparse import count_of
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
from thinwire.tools.workloads.data import cifar10, digits, mnist

RATIO = 0.05
MOMENTUM = 0.9


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
        scale = u.numel() / k if self.feedback == "scaled" else 1.0
        sent = torch.zeros_like(u)
        sent[chosen] = scale * u[chosen]
        mean = await ch.mean(sent)
        if await ch.commit(bool(mean.isfinite().all())) and self.feedback == "on":
            state.error.copy_(u - sent)
        out.copy_(mean)

    def payload_bytes(self, layout: Layout, size: int) -> int:
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


def run(context: Context) -> Outcome:
    outcome = Outcome(judged=not context.quick)
    both = (False, True)
    if context.quick or not context.has_data:
        recipe = Recipe("mlp", workers=4, steps=40, hidden=(64, 64), learning_rate=0.02)
        _study(
            context,
            outcome,
            digits(),
            recipe,
            cells(scaled=True, momenta=(False,) if context.quick else both),
        )
        return outcome
    recipe = Recipe("mlp", workers=4, steps=400, hidden=(200, 100), batch=16, learning_rate=0.01)
    _study(context, outcome, mnist(context.data / "mnist"), recipe, cells(scaled=True, momenta=both))
    small = Recipe("resnet20", workers=4, steps=400, batch=8, learning_rate=0.02, decay_at=0.75)
    colours = cifar10(context.data / "cifar10")
    _study(context, outcome, colours, small, cells(scaled=True, momenta=both), test_rows=4000)
    outcome.figures = dict(reversed(outcome.figures.items()))  # the page shows the larger study
    return outcome


Accuracies = dict[Cell, float]
Times = dict[Cell, float]


def _study(
    context: Context, outcome: Outcome, data: Dataset, base: Recipe, todo: list[Cell], test_rows: int = 0
) -> None:
    trained = partial(train, looks=1, test_rows=test_rows)
    after = replace(base, momentum=MOMENTUM)
    dense, other, alone = (
        context.once(train, "dense", recipe, data, looks=1, test_rows=test_rows)
        for recipe in (after, replace(after, seed=after.seed + 1), replace(after, workers=1))
    )
    outcome.notes.append(
        f"{data.name}: one seed per cell. Dense reaches {percent(other.accuracy, 1)} with another one, "
        f"against {percent(dense.accuracy, 1)}: differences of this size are chance."
    )
    found = context.each(
        {cell: partial(trained, exchange_of(cell), recipe_of(cell, base), data) for cell in todo},
        f"{data.name}:",
    )
    repeats = 3 if context.quick else 20
    times = context.each(
        {cell: partial(compression_time, exchange_of(cell), base, data, repeats) for cell in todo},
        f"{data.name}, time:",
    )
    accuracies = {cell: one.accuracy for cell, one in found.items()}
    outcome.table(
        f"{data.name}, {base.model}, {base.workers} workers, {base.steps} steps, {100 * RATIO:g} % sent",
        dict.fromkeys(COLUMNS, "") | {"accuracy": ".1%", "payload per step": ",.0f", "time per step": ""},
        [
            ("dense", "", "", "", "after", dense.accuracy, dense.payload, ""),
            ("a worker alone", "", "", "", "after", alone.accuracy, 0, ""),
            *(
                (
                    *cell.row(),
                    accuracy,
                    *(
                        ("-", "-")
                        if is_corner(cell)
                        else (found[cell].payload, f"{1e3 * times[cell]:.2f} ms")
                    ),
                )
                for cell, accuracy in sorted(accuracies.items(), key=lambda item: -item[1])
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
    _judge_effects(outcome, data.name, found_effects)
    _judge_blocks(outcome, data.name, dense.accuracy, accuracies, times)
    if found_effects["momentum after"]["top-k"]:
        outcome.claims.append(
            Claim(
                f"{data.name}: momentum after the exchange, or before",
                "one of the questions",
                f"after against before: {_by_rule(found_effects, 'momentum after')}",
                None,
                "reported, not judged: we do not know the paper's answer",
            )
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
        "without feedback entries are sent as they are. Scaled by n / k, which makes random rules unbiased: "
        f"{_by_rule(effects, 'scaled by n/k, no feedback')}",
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
    of_block, block_cell = best["random block"]
    fed, unfed, scaled = (
        [100 * value for c, value in found.items() if c.rule == "random block" and c.feedback == kind]
        for kind in ("on", "off", "scaled")
    )
    outcome.claim(
        f"{name}: random block performs close to dense SGD",
        "close to SGD; other studies: 1 to 6 points behind, with feedback",
        f"best {percent(of_block, 1)} ({', '.join(block_cell.row()[1:])}) against dense {percent(dense, 1)}, "
        f"top-k {percent(best['top-k'][0], 1)}, random-k {percent(best['random-k'][0], 1)}",
        100 * (dense - of_block) < 2,
        f"its cells: {min(fed):.1f} to {max(fed):.1f} % with feedback, {min(unfed):.1f} to {max(unfed):.1f} "
        f"% without, {min(scaled):.1f} to {max(scaled):.1f} % without and scaled by n / k. A block carries "
        "the residual of 1 / ratio steps, or is scaled by as much, in one place, and momentum behind it "
        "multiplies that by up to ten",
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
    run,
    methods=("randomblock", "randomk", "topk"),
)
