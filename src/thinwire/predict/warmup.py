"""The steps with which some methods begin, before they save bytes."""

from __future__ import annotations

from typing import NamedTuple

from thinwire.averaging.base import Schedule
from thinwire.core.config import Configured
from thinwire.core.exchange import Exchange
from thinwire.methods.adam import Adam
from thinwire.methods.dense import Dense


class WarmUp(NamedTuple):
    """So many steps that average gradients by an exchange."""

    steps: int
    exchange: Exchange


def warm_up_of(method: Configured) -> WarmUp:
    """Of `adam`, and of schedules that average gradients first; of others there are no steps."""
    if isinstance(method, Adam):
        return WarmUp(method.warmup, Dense())
    if isinstance(method, Schedule) and method.gradient_warmup:
        return WarmUp(method.warmup, method.warmup_exchange or Dense())
    return WarmUp(0, Dense())
