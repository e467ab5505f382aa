"""The rules of `route`, with conditions such as "*.bias", "numel<10000" or "ndim<=1"."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from typing import cast

from thinwire.core import Exchange, Slot, Traits, checks
from thinwire.core.shards import parameter_name
from thinwire.core.traits import OptimizerNeeds, PayloadSize
from thinwire.errors import ConfigError

Rules = tuple[tuple[str, Exchange], ...]

# Ordered by what they require. A route requires what its most demanding method does.
SIZES: tuple[PayloadSize, ...] = ("fixed", "alternating", "data-dependent")
NEEDS: tuple[OptimizerNeeds, ...] = ("any", "no momentum", "plain SGD", "Adam")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_CONDITION = re.compile(r"(numel|ndim)\s*(<=|>=|==|<|>)\s*(\d+)")


def fits(condition: str, slot: Slot) -> bool:
    comparison = _CONDITION.fullmatch(condition.strip())
    if comparison is None:
        return fnmatch.fnmatchcase(parameter_name(slot.name), condition)
    what, sign, number = comparison.groups()
    return _COMPARE[sign](slot.numel if what == "numel" else len(slot.shape), int(number))


def checked_rules(given: object) -> Rules:
    if not isinstance(given, list | tuple):
        raise ConfigError(f"route: rules are pairs of a condition and a method, not {given!r}")
    return tuple(_pair(rule) for rule in cast("Sequence[object]", given))


def _pair(rule: object) -> tuple[str, Exchange]:
    match rule:
        case [str(condition), Exchange() as method]:
            checks.exchange("route", "rules", method)
            return condition, method
        case _:
            raise ConfigError(f"route: a rule is a pair like ('*.bias', Dense()), not {rule!r}")


def joint_traits(every: Sequence[Traits]) -> Traits:
    """What holds if each of these holds for some of the tensors."""
    return Traits(
        consensus=all(traits.consensus for traits in every),
        unbiased=all(traits.unbiased for traits in every),
        conserves=all(traits.conserves for traits in every),
        payload=SIZES[max(SIZES.index(traits.payload) for traits in every)],
        optimizer=NEEDS[max(NEEDS.index(traits.optimizer) for traits in every)],
        scope="model" if any(traits.scope == "model" for traits in every) else "tensor",
        second_gradient=any(traits.second_gradient for traits in every),
    )
