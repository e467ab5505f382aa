"""Local SGD: the mean of the replicas every few steps."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import PeriodOptions, ScheduleBase
from thinwire.core.exchange import Exchange
from thinwire.methods.dense import Dense


@dataclass(frozen=True)
class EveryOption(ScheduleBase):
    every: int = 8

    @property
    def period(self) -> int:
        return self.every


@dataclass(frozen=True)
class LocalSGD(PeriodOptions, EveryOption):
    """Every rank trains by itself; after `every` steps the parameters become their mean.

    x_i <- x_i - gamma g_i(x_i) in each step;  x_i <- (1/W) sum_l x_l after `every` of them.

    Args:
        every: optimizer steps between two sync rounds.
        warmup, momentum, buffers, anchor, grow, longest, fragments, overlap, blend: as for all schedules,
            see docs/periodic.md.

    Example:
        >>> from thinwire.averaging import LocalSGD
        >>> str(LocalSGD(every=16, warmup=100))
        'localsgd(every=16, warmup=100)'

    Differences from the paper: any optimizer may take the local steps.
    """

    name = "localsgd"
    formula = "itemsize * n / every"
    reference = 'Stich, "Local SGD converges fast and communicates little", 2019'

    @property
    def inner(self) -> Exchange:
        return Dense()
