"""Sparse communication: which entries, whose, over what, with or without feedback, where the momentum."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from reproductions.base import Claim, Context, Outcome, Reproduction
from reproductions.cohort import Cohort, Recipe, train
from reproductions.plots import lines
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.feedback import Residual
from thinwire.methods.families.sparse import count_of
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


def run(context: Context) -> Outcome:
    quick = context.quick
    outcome = Outcome()
    if quick or not context.has_data:
        recipe = Recipe("mlp", workers=4, steps=40, hidden=(64, 64), learning_rate=0.02)
        _study(
            context,
            outcome,
            digits(),
            recipe,
            cells(momenta=(False,)) if quick else cells(momenta=(False, True)),
        )
        return outcome
    images = mnist(context.data / "mnist")
    recipe = Recipe("mlp", workers=4, steps=400, hidden=(200, 100), batch=16, learning_rate=0.01)
    _study(context, outcome, images, recipe, cells(momenta=(False, True)))
    colours = cifar10(context.data / "cifar10")
    small = Recipe("resnet20", workers=4, steps=400, batch=8, learning_rate=0.02, decay_at=0.75)
    _study(context, outcome, colours, small, cells(momenta=(False, True)), test_rows=4000)
    outcome.figures = dict(reversed(outcome.figures.items()))  # the page shows the larger study
    return outcome


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


Found = dict[Cell, dict[str, Any]]


def _study(
    context: Context, outcome: Outcome, data: Dataset, base: Recipe, todo: list[Cell], test_rows: int = 0
) -> None:
    dense_recipe = replace(base, momentum=MOMENTUM)
    dense = context.once(
        dense_recipe.key("dense", data),
        lambda: train("dense", dense_recipe, data, looks=1, test_rows=test_rows),
    )
    seed = replace(dense_recipe, seed=dense_recipe.seed + 1)
    other = context.once(
        seed.key("dense", data), lambda: train("dense", seed, data, looks=1, test_rows=test_rows)
    )
    outcome.notes.append(
        f"{data.name}: one seed a cell. Dense reaches {100 * other['accuracy']:.1f} % with another one, "
        f"against {100 * dense['accuracy']:.1f} %: that much is chance."
    )
    found: Found = {}
    repeats = 3 if context.quick else 20
    for number, cell in enumerate(todo):
        context.progress(f"{data.name}: {', '.join(cell.row())}", number, len(todo))
        method, recipe = cell.exchange(), cell.recipe(base)
        one = context.once(
            recipe.key(repr(method), data),
            lambda m=method, r=recipe: train(m, r, data, looks=1, test_rows=test_rows),
        )
        time = context.once(
            f"time {repeats} {base.key(repr(method), data)}",
            lambda m=method: compression_time(m, base, data, repeats),
        )
        found[cell] = one | {"time": time}
    rows: list[tuple[str, ...]] = [
        ("dense", "", "", "", "after", f"{100 * dense['accuracy']:.1f} %", f"{dense['payload']:,.0f}", "")
    ]
    for cell, one in sorted(found.items(), key=lambda item: -item[1]["accuracy"]):
        rows.append(
            (
                *cell.row(),
                f"{100 * one['accuracy']:.1f} %",
                "-" if cell.is_corner else f"{one['payload']:,.0f}",
                "-" if cell.is_corner else f"{1e3 * one['time']:.2f} ms",
            )
        )
    outcome.table(
        f"{data.name}, {base.model}, {base.workers} workers, {base.steps} steps, {100 * RATIO:g} % sent",
        ("rule", "indices", "over", "feedback", "momentum", "accuracy", "payload a step", "time a step"),
        rows,
    )
    effects = _effects(found)
    outcome.table(
        f"{data.name}: what a change does to the accuracy, all else equal: the median, in points, and in how "
        "many pairs it helps",
        ("change", *RULES),
        [
            (what, *(_told(values[rule]) if values[rule] else "" for rule in RULES))
            for what, values in effects.items()
        ],
    )
    outcome.figures[f"Accuracy against compression time, {data.name}"] = lines(
        {
            rule: (
                [1e3 * one["time"] for c, one in found.items() if c.rule == rule and not c.is_corner],
                [one["accuracy"] for c, one in found.items() if c.rule == rule and not c.is_corner],
            )
            for rule in RULES
        },
        "milliseconds of a worker's own work a step",
        "test accuracy",
        log_x=True,
        only_markers=True,
    )
    _judge(context, outcome, data, dense["accuracy"], found, effects)


CHANGES: dict[str, tuple[str, bool]] = {
    "error feedback on": ("feedback", True),
    "indices shared": ("shared", True),
    "layer by layer": ("whole", False),
    "momentum after": ("before", False),
}
Effects = dict[str, dict[Rule, list[float]]]


def _effects(found: Found) -> Effects:
    """What each change of one parameter does, by rule: points of accuracy in every pair of cells."""
    effects: Effects = {}
    for what, (name, value) in CHANGES.items():
        by_rule = effects[what] = {rule: list[float]() for rule in RULES}
        for cell, one in found.items():
            other = replace(cell, **{name: not value})
            if getattr(cell, name) == value and other in found:
                by_rule[cell.rule].append(100 * (one["accuracy"] - found[other]["accuracy"]))
    return effects


def _told(points: list[float]) -> str:
    wins = sum(value > 0 for value in points)
    return f"{statistics.median(points):+.1f}, {wins} of {len(points)}"


def _judge(
    context: Context, outcome: Outcome, data: Dataset, dense: float, found: Found, effects: Effects
) -> None:
    judge = not context.quick

    def by_rule(what: str) -> str:
        return "; ".join(f"{rule} {_told(values)}" for rule, values in effects[what].items() if values)

    def overall(what: str) -> float:
        return statistics.median([value for values in effects[what].values() for value in values])

    best = {
        rule: max((one["accuracy"], cell) for cell, one in found.items() if cell.rule == rule)
        for rule in RULES
    }
    behind = 100 * (dense - best["random block"][0])
    by_feedback = {
        on: [
            100 * one["accuracy"] for c, one in found.items() if c.rule == "random block" and c.feedback == on
        ]
        for on in (True, False)
    }
    block, top = (
        min(one["time"] for c, one in found.items() if c.rule == rule and c.shared == shared and c.feedback)
        for rule, shared in (("random block", True), ("top-k", False))
    )
    outcome.claims += [
        Claim(
            f"{data.name}: error feedback is a key parameter",
            "one of the three (which three is remembered)",
            f"on against off: {by_rule('error feedback on')}",
            (max(abs(statistics.median(v)) for v in effects["error feedback on"].values()) > 1)
            if judge
            else None,
            "what random rules send without feedback is scaled by n / k, and unbiased",
        ),
        Claim(
            f"{data.name}: indices may be shared",
            "shared indices allow an all-reduce at little loss",
            f"shared against own: {by_rule('indices shared')}",
            (overall("indices shared") > -1) if judge else None,
        ),
        Claim(
            f"{data.name}: layer by layer or global is a key parameter",
            "one of the three (remembered)",
            f"layer against model: {by_rule('layer by layer')}",
            (max(abs(statistics.median(v)) for v in effects["layer by layer"].values()) > 1)
            if judge
            else None,
            "judged by more than a point for any rule. A block of the whole model leaves most layers without "
            "an update; as many single entries reach them all",
        ),
        Claim(
            f"{data.name}: random block performs close to dense SGD",
            "close to SGD; other studies: 1 to 6 points behind, with feedback",
            f"best {100 * best['random block'][0]:.1f} % ({', '.join(best['random block'][1].row()[1:])}) "
            f"against dense {100 * dense:.1f} %, top-k {100 * best['top-k'][0]:.1f} %, random-k "
            f"{100 * best['random-k'][0]:.1f} %",
            (behind < 2) if judge else None,
            f"its cells: {_range(by_feedback[True])} with feedback, {_range(by_feedback[False])} without. "
            "A block brings what has piled up in 1 / ratio steps, or is scaled as much, in one place, and "
            "momentum behind it multiplies that by up to ten",
        ),
        Claim(
            f"{data.name}: random block is the cheapest to select",
            "contiguous memory, no index",
            f"{1e3 * block:.2f} ms a step against {1e3 * top:.2f} of top-k: {block / top:.2f}",
            (block < top) if judge else None,
        ),
    ]
    if effects["momentum after"]["top-k"]:
        outcome.claims.append(
            Claim(
                f"{data.name}: momentum after the exchange, or before",
                "one of the questions",
                f"after against before: {by_rule('momentum after')}",
                None,
                "reported, not judged: the paper's own answer is not known to us",
            )
        )


def _range(points: list[float]) -> str:
    return f"{min(points):.1f} to {max(points):.1f} %"


REPRODUCTION = Reproduction(
    "Sparse communication and its three key parameters",
    "Eghlidi and Jaggi, Sparse communication for training deep networks, 2020.",
    run,
    methods=("randomblock", "randomk", "topk"),
)
