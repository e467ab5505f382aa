"""Different methods for different tensors."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch

from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, Traits
from thinwire.core.layout import Layout, Slot
from thinwire.errors import ConfigError, ThinwireError

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_CONDITION = re.compile(r"(numel|ndim)\s*(<=|>=|==|<|>)\s*(\d+)")


@dataclass(frozen=True)
class Route(Exchange):
    """Picks a method for each tensor by rules; tensors that no rule names get the default.

    The first rule that fits decides. A rule is a condition and a method string; the condition is a pattern
    for the parameter's name ("*.bias", "embed*") or a comparison of its size ("numel<10000") or of its
    number of dimensions ("ndim<=1"). Small tensors that no rule names go dense, as always.

    Args:
        default: the method for all tensors that no rule names.
        rules: pairs of a condition and a method string.

    Example:
        >>> import thinwire
        >>> method = thinwire.parse("route(default='topk(ratio=0.01)', rules=(('embed*', 'qsgd(bits=8)'),))")
        >>> method.rules
        (('embed*', 'qsgd(bits=8)'),)
    """

    name: ClassVar[str] = "route"
    default: str = "topk(ratio=0.01)"
    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        given = cast(object, self.rules)
        pairs: list[tuple[str, str]] = []
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ConfigError(f"route: rules are pairs of a condition and a method, not {given!r}")
        for pair in cast("Sequence[object]", given):
            two = list(cast("Sequence[object]", pair)) if isinstance(pair, list | tuple) else []
            if len(two) != 2 or not all(isinstance(part, str) for part in two):
                raise ConfigError(f"route: a rule is a pair like ('*.bias', 'dense'), not {pair!r}")
            pairs.append((cast(str, two[0]), cast(str, two[1])))
        object.__setattr__(self, "rules", tuple(pairs))
        for _, method in (("", self.default), *self.rules):
            if isinstance(parsed(method), Route):
                raise ConfigError("route: a route inside a route: write all rules into one")

    @property
    def traits(self) -> Traits:
        every = [exchange.traits for exchange in self._exchanges()]
        scopes = [traits.scope for traits in every]
        return Traits(
            consensus=all(traits.consensus for traits in every),
            unbiased=all(traits.unbiased for traits in every),
            conserves=all(traits.conserves for traits in every),
            ragged=any(traits.ragged for traits in every),
            even=all(traits.even for traits in every),
            owns_momentum=any(traits.owns_momentum for traits in every),
            reconcile_every=min((t.reconcile_every for t in every if t.reconcile_every), default=None),
            rounding=max(traits.rounding for traits in every),
            scope="model" if "model" in scopes else "tensor",
        )

    @property
    def default_exchange(self) -> Exchange:
        return parsed(self.default)

    def rule_for(self, slot: Slot) -> Exchange | None:
        for condition, method in self.rules:
            if _fits(condition, slot):
                return parsed(method)
        return None

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        raise ThinwireError("a route does not run itself: a session asks it for each tensor's method")

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        parts = [
            (self.rule_for(slot) or self.default_exchange).payload_bytes(layout.pick([slot]), size)
            for slot in layout.slots
        ]
        return None if None in parts else sum(cast("list[int]", parts))

    def exact(self) -> Exchange | None:
        exact = [exchange.exact() for exchange in self._exchanges()]
        if any(exchange is None for exchange in exact):
            return None
        rules = tuple(
            (condition, str(exchange)) for (condition, _), exchange in zip(self.rules, exact[1:], strict=True)
        )
        return replace(self, default=str(exact[0]), rules=rules)

    def _exchanges(self) -> list[Exchange]:
        return [parsed(self.default), *(parsed(method) for _, method in self.rules)]


@lru_cache(maxsize=256)
def parsed(method: str) -> Exchange:
    """A method inside a method."""
    from thinwire.methods.registry import parse

    return parse(method)


def _fits(condition: str, slot: Slot) -> bool:
    comparison = _CONDITION.fullmatch(condition.strip())
    if comparison is None:
        return fnmatch.fnmatchcase(slot.name, condition)
    what, sign, number = comparison.groups()
    return _COMPARE[sign](slot.numel if what == "numel" else len(slot.shape), int(number))
