"""Conditions on a tensor's name and size: "*.bias", "numel<10000", "ndim<=1"."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable

from thinwire.core.layout import Slot

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
        return fnmatch.fnmatchcase(slot.name, condition)
    what, sign, number = comparison.groups()
    return _COMPARE[sign](slot.numel if what == "numel" else len(slot.shape), int(number))
