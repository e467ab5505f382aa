"""Sparse communication: which entries, whose, over what, with or without feedback, where the momentum."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch

from reproductions.base import Claim, Context, Outcome, Reproduction, percent
from reproductions.cohort import Cohort, Recipe, train
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.feedback import Residual
from thinwire.methods.families.sparse import count_of
from thinwire.tools.report.figures import lines
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.data import cifar10, digits, mnist

Rule = Literal["top-k", "random-k", "random block"]
RULES: tuple[Rule, ...] = ("top-k", "random-k", "random block")
RATIO = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True, order=True)
class Cell:
    """One configuration of the study."""

    rule: Rule
    shared: bool
    whole: bool
    feedback: bool
    before: bool

    def exchange(self) -> Exchange | str:
        """thinwire's own method where there is one; two corners of the study are nobody's method."""
        scope = "model" if self.whole else "tensor"
        options = f"ratio={RATIO}, feedback={self.feedback}, scope={scope!r}"
        if self.rule == "random-k":
            return f"randomk({options}, shared={self.shared})"
        if self.rule == "random block" and self.shared:
            return f"randomblock({options})"
        if self.rule == "top-k" and not self.shared:
            return f"topk({options})"
        if self.rule == "top-k" and self.feedback:
            return f"scalecom(ratio={RATIO}, scope={scope!r})"
        return Corner(self.rule, self.shared, self.feedback, scope)

    @property
    def is_corner(self) -> bool:
        return isinstance(self.exchange(), Corner)

    def recipe(self, base: Recipe) -> Recipe:
        if self.before:
            return replace(base, momentum_before=MOMENTUM)
        return replace(base, momentum=MOMENTUM)

    def __str__(self) -> str:
        return ", ".join(self.row())

    def row(self) -> tuple[str, ...]:
        return (
            self.rule,
            "shared" if self.shared else "own",
            "model" if self.whole else "layer",
            "on" if self.feedback else "off",
            "before" if self.before else "after",
        )


@dataclass(frozen=True)
class Corner(Exchange):
    """What only this study asks for: a leader's top-k without feedback, and blocks that each rank draws.

    Written in plain torch, over one mean: it shows what becomes of the accuracy, not what would travel.
    """

    name: ClassVar[str] = "corner"
    rule: Rule = "random block"
    shared: bool = False
    feedback: bool = True
    scope: Scope = "tensor"

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback, scope=self.scope)

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        u = x + state.error if self.feedback else x.clone()
        k = count_of(RATIO, u.numel())
        if self.rule == "top-k":
            chosen = u.abs().topk(k).indices.to(torch.int32)
            (chosen,) = await ch.broadcast([chosen], ch.step % ch.size)
            chosen, scale = chosen.long(), 1.0
        else:
            start = int(torch.randint(u.numel(), (1,), generator=ch.private_rng()))
            chosen = (start + torch.arange(k)) % u.numel()
            scale = 1.0 if self.feedback else u.numel() / k
        sent = torch.zeros_like(u)
        sent[chosen] = scale * u[chosen]
        mean = await ch.mean(sent)
        if await ch.commit(bool(mean.isfinite().all())) and self.feedback:
            state.error.copy_(u - sent)
        out.copy_(mean)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return 4 * layout.numel + (4 * count_of(RATIO, layout.numel) if self.rule == "top-k" else 0)


def cells(*, momenta: tuple[bool, ...]) -> list[Cell]:
    both = (True, False)
    return [Cell(*values) for values in itertools.product(RULES, both, both, both, momenta)]


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
        _study(context, outcome, digits(), recipe, cells(momenta=(False,) if context.quick else both))
        return outcome
    recipe = Recipe("mlp", workers=4, steps=400, hidden=(200, 100), batch=16, learning_rate=0.01)
    _study(context, outcome, mnist(context.data / "mnist"), recipe, cells(momenta=both))
    small = Recipe("resnet20", workers=4, steps=400, batch=8, learning_rate=0.02, decay_at=0.75)
    colours = cifar10(context.data / "cifar10")
    _study(context, outcome, colours, small, cells(momenta=both), test_rows=4000)
    outcome.figures = dict(reversed(outcome.figures.items()))  # the page shows the larger study
    return outcome


Accuracies = dict[Cell, float]
Times = dict[Cell, float]


def _study(
    context: Context, outcome: Outcome, data: Dataset, base: Recipe, todo: list[Cell], test_rows: int = 0
) -> None:
    trained = partial(train, looks=1, test_rows=test_rows)
    after = replace(base, momentum=MOMENTUM)
    dense, other = (
        context.once(train, "dense", recipe, data, looks=1, test_rows=test_rows)
        for recipe in (after, replace(after, seed=after.seed + 1))
    )
    outcome.notes.append(
        f"{data.name}: one seed a cell. Dense reaches {percent(other.accuracy, 1)} with another one, "
        f"against {percent(dense.accuracy, 1)}: that much is chance."
    )
    found = context.each(
        {cell: partial(trained, cell.exchange(), cell.recipe(base), data) for cell in todo}, f"{data.name}:"
    )
    repeats = 3 if context.quick else 20
    times = context.each(
        {cell: partial(compression_time, cell.exchange(), base, data, repeats) for cell in todo},
        f"{data.name}, time:",
    )
    accuracies = {cell: one.accuracy for cell, one in found.items()}
    outcome.table(
        f"{data.name}, {base.model}, {base.workers} workers, {base.steps} steps, {100 * RATIO:g} % sent",
        dict.fromkeys(("rule", "indices", "over", "feedback", "momentum"), "")
        | {"accuracy": ".1%", "payload a step": ",.0f", "time a step": ""},
        [
            ("dense", "", "", "", "after", dense.accuracy, dense.payload, ""),
            *(
                (
                    *cell.row(),
                    accuracy,
                    *(("-", "-") if cell.is_corner else (found[cell].payload, f"{1e3 * times[cell]:.2f} ms")),
                )
                for cell, accuracy in sorted(accuracies.items(), key=lambda item: -item[1])
            ),
        ],
    )
    effects = _effects(accuracies)
    outcome.table(
        f"{data.name}: what a change does to the accuracy, all else equal: the median, in points, and in how "
        "many pairs it helps",
        ("change", *RULES),
        [(what, *(_told(values[rule]) for rule in RULES)) for what, values in effects.items()],
    )
    own = {rule: [c for c in todo if c.rule == rule and not c.is_corner] for rule in RULES}
    outcome.figures[f"Accuracy against compression time, {data.name}"] = lines(
        {rule: ([1e3 * times[c] for c in own[rule]], [accuracies[c] for c in own[rule]]) for rule in RULES},
        "milliseconds of a worker's own work a step",
        "test accuracy",
        log_x=True,
        only_markers=True,
    )
    _judge_effects(outcome, data.name, effects)
    _judge_blocks(outcome, data.name, dense.accuracy, accuracies, times)
    if effects["momentum after"]["top-k"]:
        outcome.claims.append(
            Claim(
                f"{data.name}: momentum after the exchange, or before",
                "one of the questions",
                f"after against before: {_by_rule(effects, 'momentum after')}",
                None,
                "reported, not judged: the paper's own answer is not known to us",
            )
        )


CHANGES: dict[str, tuple[str, bool]] = {
    "error feedback on": ("feedback", True),
    "indices shared": ("shared", True),
    "layer by layer": ("whole", False),
    "momentum after": ("before", False),
}
Effects = dict[str, dict[Rule, list[float]]]


def _effects(found: Accuracies) -> Effects:
    """What each change of one parameter does, by rule: points of accuracy in every pair of cells."""
    effects: Effects = {}
    for what, (name, value) in CHANGES.items():
        by_rule = effects[what] = {rule: list[float]() for rule in RULES}
        for cell, accuracy in found.items():
            other = replace(cell, **{name: not value})
            if getattr(cell, name) == value and other in found:
                by_rule[cell.rule].append(100 * (accuracy - found[other]))
    return effects


def _told(points: list[float]) -> str:
    wins = sum(value > 0 for value in points)
    return f"{statistics.median(points):+.1f}, {wins} of {len(points)}" if points else ""


def _by_rule(effects: Effects, what: str) -> str:
    return "; ".join(f"{rule} {_told(values)}" for rule, values in effects[what].items() if values)


def _judge_effects(outcome: Outcome, name: str, effects: Effects) -> None:
    def largest(what: str) -> float:
        return max(abs(statistics.median(values)) for values in effects[what].values())

    outcome.claim(
        f"{name}: error feedback is a key parameter",
        "one of the three (which three is remembered)",
        f"on against off: {_by_rule(effects, 'error feedback on')}",
        largest("error feedback on") > 1,
        "what random rules send without feedback is scaled by n / k, and unbiased",
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
    fed, unfed = (
        [100 * value for c, value in found.items() if c.rule == "random block" and c.feedback == on]
        for on in (True, False)
    )
    outcome.claim(
        f"{name}: random block performs close to dense SGD",
        "close to SGD; other studies: 1 to 6 points behind, with feedback",
        f"best {percent(of_block, 1)} ({', '.join(block_cell.row()[1:])}) against dense {percent(dense, 1)}, "
        f"top-k {percent(best['top-k'][0], 1)}, random-k {percent(best['random-k'][0], 1)}",
        100 * (dense - of_block) < 2,
        f"its cells: {min(fed):.1f} to {max(fed):.1f} % with feedback, {min(unfed):.1f} to {max(unfed):.1f} "
        "% without. A block brings what has piled up in 1 / ratio steps, or is scaled as much, in one place, "
        "and momentum behind it multiplies that by up to ten",
    )
    block, top = (
        min(time for c, time in times.items() if c.rule == rule and c.shared == shared and c.feedback)
        for rule, shared in (("random block", True), ("top-k", False))
    )
    outcome.claim(
        f"{name}: random block is the cheapest to select",
        "contiguous memory, no index",
        f"{1e3 * block:.2f} ms a step against {1e3 * top:.2f} of top-k: {block / top:.2f}",
        block < top,
    )


REPRODUCTION = Reproduction(
    "Sparse communication and its three key parameters",
    "Eghlidi and Jaggi, Sparse communication for training deep networks, 2020.",
    run,
    methods=("randomblock", "randomk", "topk"),
)
