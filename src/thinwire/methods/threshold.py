"""Everything above a fixed magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.methods.families.selectors import Above, Selector
from thinwire.methods.families.sparse import Sparse


@dataclass(frozen=True)
class _WithValue(Exchange):
    value: float = 1e-3

    def __post_init__(self) -> None:
        given = self.value
        right = isinstance(given, int | float) and not isinstance(given, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not right or not math.isfinite(given) or given < 0:
            raise ConfigError(f"{self.name}: value must be a finite number from 0 up, not {given!r}")


@dataclass(frozen=True)
class Threshold(Sparse, _WithValue):
    """Every rank sends the entries of error + gradient above a fixed magnitude, however many there are.

    u_i = g_i + e_i;  c_i = u_i where |u_i| > value;  e_i = u_i - c_i;  out = (1/W) sum_i c_i

    Args:
        value: the magnitude, in the gradient's unit; 0 sends everything that is not zero.
        feedback, values, scope, reduce: as for all methods that select their own indices. `reduce="auto"`
            gathers, since nobody knows beforehand how much will be sent.

    Reference: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015.

    Differences from the paper: the values are sent as they are, not as plus or minus the threshold
    (`values` can quantise them).
    """

    name: ClassVar[str] = "threshold"

    def selector(self, ch: Channel) -> Selector:
        return Above(self.value * ch.context.scale)

    def density(self) -> float:
        return 1.0

    def splits(self, n: int, k: int, size: int) -> bool:
        return self.reduce == "split" and size > 1

    @property
    def varies(self) -> bool:
        return True

    def exact(self) -> Exchange:
        return replace(self, value=0.0, values=None, reduce="gather")
