"""Local SGD: the mean of the replicas every few steps."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import PeriodOptions, ScheduleBase
from thinwire.core import Exchange
from thinwire.methods.dense import Dense


@dataclass(frozen=True)
class EveryOption(ScheduleBase):
    every: int = 8

    @property
    def period(self) -> int:
        return self.every


@dataclass(frozen=True)
class LocalSGD(PeriodOptions, EveryOption):
    """Every rank trains by itself; every few steps the parameters become the mean of all replicas.

        x_i <- x_i - gamma g_i(x_i) in each step
        x_i <- (1/W) sum_l x_l after `every` steps

    Example:
        >>> from thinwire.averaging import LocalSGD
        >>> str(LocalSGD(every=16, warmup=100))
        'localsgd(every=16, warmup=100)'

    Differences from the paper: any optimizer may take the local steps.
    """

    name = "localsgd"
    use_when = """The link is slow or its latency is long, and the workers see similar data: one dense mean
    every few steps, and nothing in between."""
    avoid_when = """The workers see very different data or `every` is large: the replicas drift apart between
    sync rounds. Under AdamW each worker has its own moments, which costs accuracy."""
    formula = "itemsize * n / every"
    reference = 'Stich, "Local SGD converges fast and communicates little", 2019'

    @property
    def inner(self) -> Exchange:
        return Dense()
