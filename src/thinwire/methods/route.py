"""Different methods for different tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from thinwire.core import Channel, Exchange, Layout, Link, Slot, Traits, checks
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.families.route_rules import Rules, checked_rules, fits, joint_traits
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class Route(Exchange):
    """Picks a method for each tensor by rules, and a default for tensors that no rule fits.

    The first rule that fits decides. A rule is a pair of a condition and a method. The condition is a pattern
    for the parameter's name ("*.bias", "embed*"), or a comparison of its size ("numel<10000") or of its
    number of dimensions ("ndim<=1"). Small tensors that no rule fits are sent dense, as always.

    Args:
        default: the method for all tensors that no rule fits.
        rules: pairs of a condition and a method.

    Example:
        >>> import thinwire
        >>> str(thinwire.parse("route(default=topk(ratio=0.01), rules=(('embed*', qsgd(bits=8)),))"))
        "route(default=topk(ratio=0.01), rules=(('embed*', qsgd(bits=8)),))"
    """

    name = "route"
    family = "combining"
    use_when = """Layers need different care: for example quantised embeddings, low-rank matrices and dense
    norms."""
    avoid_when = """One method suits all tensors. A pattern that fits no parameter has no effect and is not
    reported, so check the rules again after you rename layers."""
    formula = ""
    formula_note = "the bytes of each tensor's method"
    rounds_per_step = "those of the methods; requests of the same round are sent together"
    compute = "that of each tensor's method"
    default: Exchange = TopK()
    rules: Rules = ()

    def __post_init__(self) -> None:
        checks.exchange(self.name, "default", self.default)
        object.__setattr__(self, "rules", checked_rules(self.rules))
        if any(isinstance(method, Route) for method in self._exchanges()):
            raise ConfigError("route: a route cannot be inside a route; write all rules into one")

    @property
    def traits(self) -> Traits:
        return joint_traits([exchange.traits for exchange in self._exchanges()])

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
        raise ThinwireError("a route does not run itself: the session asks it for the method of each tensor")

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        parts: list[int | None] = []
        for slot in layout.slots:
            exchange, alone = self.assign(slot, small=False), layout.pick([slot])
            known = alone.dense_bytes if exchange is None else exchange.payload_bytes(alone, size, link)
            parts.append(known)
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
