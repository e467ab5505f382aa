"""Different methods for different tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import OptimizerNeeds, PayloadSize, Traits
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.families.conditions import fits
from thinwire.methods.topk import TopK

# From the least to the most that a method may ask for: a route asks for what its most demanding method does.
SIZES: tuple[PayloadSize, ...] = ("fixed", "alternating", "data-dependent")
NEEDS: tuple[OptimizerNeeds, ...] = ("any", "no momentum", "plain SGD")


@dataclass(frozen=True)
class Route(Exchange):
    """Picks a method for each tensor by rules; tensors that no rule names get the default.

    The first rule that fits decides. A rule is a condition and a method; the condition is a pattern
    for the parameter's name ("*.bias", "embed*") or a comparison of its size ("numel<10000") or of its
    number of dimensions ("ndim<=1"). Small tensors that no rule names go dense, as always.

    Args:
        default: the method for all tensors that no rule names.
        rules: pairs of a condition and a method.

    Example:
        >>> import thinwire
        >>> str(thinwire.parse("route(default=topk(ratio=0.01), rules=(('embed*', qsgd(bits=8)),))"))
        "route(default=topk(ratio=0.01), rules=(('embed*', qsgd(bits=8)),))"
    """

    name = "route"
    formula = ""
    formula_note = "the bytes of each tensor's method"
    default: Exchange = TopK()
    rules: tuple[tuple[str, Exchange], ...] = ()

    def __post_init__(self) -> None:
        checks.exchange(self.name, "default", self.default)
        given = cast(object, self.rules)
        if not isinstance(given, list | tuple):
            raise ConfigError(f"route: rules are pairs of a condition and a method, not {given!r}")
        rules = tuple(_pair(rule) for rule in cast("Sequence[object]", given))
        object.__setattr__(self, "rules", rules)
        if any(isinstance(method, Route) for method in self._exchanges()):
            raise ConfigError("route: a route inside a route: write all rules into one")

    @property
    def traits(self) -> Traits:
        every = [exchange.traits for exchange in self._exchanges()]
        return Traits(
            consensus=all(traits.consensus for traits in every),
            unbiased=all(traits.unbiased for traits in every),
            conserves=all(traits.conserves for traits in every),
            payload=SIZES[max(SIZES.index(traits.payload) for traits in every)],
            optimizer=NEEDS[max(NEEDS.index(traits.optimizer) for traits in every)],
            scope="model" if any(traits.scope == "model" for traits in every) else "tensor",
        )

    @property
    def rounding(self) -> float:
        return max(exchange.rounding for exchange in self._exchanges())

    @property
    def reconcile_every(self) -> int | None:
        periods = [exchange.reconcile_every for exchange in self._exchanges()]
        return min((period for period in periods if period is not None), default=None)

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        for condition, method in self.rules:
            if fits(condition, slot):
                return method.assign(slot, small=False)
        return self.default.assign(slot, small=small)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        raise ThinwireError("a route does not run itself: a session asks it for each tensor's method")

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        parts: list[int | None] = []
        for slot in layout.slots:
            exchange, alone = self.assign(slot, small=False), layout.pick([slot])
            parts.append(alone.dense_bytes if exchange is None else exchange.payload_bytes(alone, size))
        return None if None in parts else sum(cast("list[int]", parts))

    def exact(self) -> Exchange | None:
        exact = [exchange.exact() for exchange in self._exchanges()]
        if any(exchange is None for exchange in exact):
            return None
        first, *others = cast("list[Exchange]", exact)
        conditions = [condition for condition, _ in self.rules]
        return replace(self, default=first, rules=tuple(zip(conditions, others, strict=True)))

    def _exchanges(self) -> list[Exchange]:
        return [self.default, *(method for _, method in self.rules)]


def _pair(rule: object) -> tuple[str, Exchange]:
    match rule:
        case [str(condition), Exchange() as method]:
            return condition, method
        case _:
            raise ConfigError(f"route: a rule is a pair like ('*.bias', Dense()), not {rule!r}")
