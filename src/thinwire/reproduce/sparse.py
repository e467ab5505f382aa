"""Sparse communication: which entries, whose, over what, with or without feedback, where the momentum."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from thinwire.channel import Channel
from thinwire.exchange import Exchange, Scope, Traits
from thinwire.layout import Layout
from thinwire.parts.memories import Residual
from thinwire.parts.selectors import kept
from thinwire.reproduce.base import Claim, Context, Outcome, Reproduction
from thinwire.reproduce.cohort import Recipe, train
from thinwire.workloads import Dataset
from thinwire.workloads.data import cifar10, digits, mnist

Rule = Literal["top-k", "random-k", "random block"]
RULES: tuple[Rule, ...] = ("top-k", "random-k", "random block")
RATIO = 0.05
MOMENTUM = 0.9


@dataclass(frozen=True)
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
        k = kept(RATIO, u.numel())
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
        if await ch.settled(bool(mean.isfinite().all())) and self.feedback:
            state.error.copy_(u - sent)
        out.copy_(mean)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return 4 * layout.numel + (4 * kept(RATIO, layout.numel) if self.rule == "top-k" else 0)


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
    return outcome


def _study(
    context: Context, outcome: Outcome, data: Dataset, base: Recipe, todo: list[Cell], test_rows: int = 0
) -> None:
    dense_recipe = replace(base, momentum=MOMENTUM)
    dense = context.once(
        dense_recipe.key("dense", data),
        lambda: train("dense", dense_recipe, data, looks=1, test_rows=test_rows),
    )
    found: dict[Cell, dict[str, Any]] = {}
    for number, cell in enumerate(todo):
        context.progress(f"{data.name}: {', '.join(cell.row())}", number, len(todo))
        method, recipe = cell.exchange(), cell.recipe(base)
        found[cell] = context.once(
            recipe.key(repr(method), data),
            lambda m=method, r=recipe: train(m, r, data, looks=1, test_rows=test_rows),
        )
    rows: list[tuple[str, ...]] = [
        ("dense", "", "", "", "after", f"{100 * dense['accuracy']:.1f} %", f"{dense['payload']:,.0f}", "")
    ]
    for cell, one in sorted(found.items(), key=lambda item: -item[1]["accuracy"]):
        corner = isinstance(cell.exchange(), Corner)
        rows.append(
            (
                *cell.row(),
                f"{100 * one['accuracy']:.1f} %",
                "-" if corner else f"{one['payload']:,.0f}",
                "-" if corner else f"{1e3 * one['work_seconds'] / base.steps:.2f} ms",
            )
        )
    outcome.table(
        f"{data.name}, {base.model}, {base.workers} workers, {base.steps} steps, {100 * RATIO:g} % sent",
        ("rule", "indices", "over", "feedback", "momentum", "accuracy", "payload a step", "work a step"),
        rows,
    )
    _judge(context, outcome, data, dense["accuracy"], found)


def _judge(
    context: Context, outcome: Outcome, data: Dataset, dense: float, found: dict[Cell, dict[str, Any]]
) -> None:
    judge = not context.quick

    def gain(name: str, value: object, other: object) -> list[float]:
        """What a change of one parameter does, all others equal."""
        pairs = [
            (one["accuracy"], found[replace(cell, **{name: other})]["accuracy"])
            for cell, one in found.items()
            if getattr(cell, name) == value and replace(cell, **{name: other}) in found
        ]
        return [100 * (a - b) for a, b in pairs]

    def told(values: list[float]) -> str:
        mean = sum(values) / len(values)
        wins = sum(value > 0 for value in values)
        return f"{mean:+.1f} points on average, better in {wins} of {len(values)}"

    feedback = gain("feedback", True, False)
    shared = gain("shared", True, False)
    layer = gain("whole", False, True)
    best = {rule: max(one["accuracy"] for cell, one in found.items() if cell.rule == rule) for rule in RULES}
    block = [
        one["work_seconds"]
        for c, one in found.items()
        if c.rule == "random block" and c.shared and c.feedback
    ]
    top = [
        one["work_seconds"] for c, one in found.items() if c.rule == "top-k" and not c.shared and c.feedback
    ]
    outcome.claims += [
        Claim(
            f"{data.name}: error feedback matters",
            "one of the three key parameters (which three is remembered)",
            told(feedback),
            (sum(feedback) > 0) if judge else None,
        ),
        Claim(
            f"{data.name}: indices may be shared",
            "shared indices allow an all-reduce at little loss",
            f"shared against own: {told(shared)}",
            (sum(shared) / len(shared) > -2) if judge else None,
        ),
        Claim(
            f"{data.name}: layer by layer is better than global",
            "layer-wise is the usual choice",
            told(layer),
            (sum(layer) > 0) if judge else None,
        ),
        Claim(
            f"{data.name}: random block performs close to dense SGD",
            "close to SGD; other studies: 6 points behind at high compression",
            f"best {100 * best['random block']:.1f} % against dense {100 * dense:.1f} %, top-k "
            f"{100 * best['top-k']:.1f} %, random-k {100 * best['random-k']:.1f} %",
            (dense - best["random block"] < 0.02) if judge else None,
            "a block comes with all that has piled up in 1/ratio steps, in one place",
        ),
        Claim(
            f"{data.name}: random block is the cheapest to select",
            "contiguous memory, no index",
            f"{sum(block) / len(block) / (sum(top) / len(top)):.2f} of top-k's work",
            (sum(block) / len(block) < sum(top) / len(top)) if judge else None,
        ),
    ]
    if any(cell.before for cell in found):
        outcome.claims.append(
            Claim(
                f"{data.name}: momentum after the exchange",
                "before or after is one of the questions",
                f"after against before: {told(gain('before', False, True))}",
                None,
                "reported, not judged: the paper's own answer is not known to us",
            )
        )


REPRODUCTION = Reproduction(
    "Sparse communication and its three key parameters",
    "Eghlidi and Jaggi, Sparse communication for training deep networks, 2020.",
    run,
)
