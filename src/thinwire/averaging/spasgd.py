"""Sparse parameter averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch

from thinwire.averaging.base import Schedule, ScheduleBase
from thinwire.core import Exchange, checks
from thinwire.errors import ConfigError
from thinwire.methods.dense import Dense


@dataclass(frozen=True)
class _GroupOptions(ScheduleBase):
    groups: int = 8
    order: Literal["cyclic", "shuffled"] = "cyclic"


@dataclass(frozen=True)
class SPASGD(Schedule, _GroupOptions):
    """Every step averages another part of the parameters, so that each part has its turn in `groups` steps.

        S_0 ... S_{p-1}: the coordinates, cut into p groups of equal size;  in step j, S = S_{j mod p}
        y_i = x_i - gamma g_i(x_i);  x_i[S] = (1/W) sum_l y_l[S];  x_i = y_i elsewhere

    The mean of the replicas moves exactly as with full communication.

    Args:
        groups: p.
        order: "cyclic" takes the groups in turn. "shuffled" takes them in a new order every p steps, so a
            coordinate waits for at most 2 p - 1 steps.
        momentum: "keep" leaves the optimizer's state to each rank, "average" averages it. "reset" is refused,
            because the state cannot be reset for a part of a tensor.

    Example:
        >>> from thinwire.averaging import SPASGD
        >>> str(SPASGD(groups=16))
        'spasgd(groups=16)'

    Differences from the paper: the analysis only requires that every coordinate is averaged within p steps;
    equal contiguous groups are our choice. The last common values are kept, so that a sync round with a
    non-finite mean can be aborted.
    """

    name = "spasgd"
    use_when = """The link is slow and should be used evenly: every step sends the same small part, without
    bursts."""
    avoid_when = """The latency is long: there are rounds in every step. Or there are many groups and the
    workers see very different data: this was far worse than full communication in the reproduction."""
    rounds_per_step = "2 (one to compare the ranks, one mean)"
    formula = "itemsize * n / groups"
    reference = """Jiang and Agrawal, "A linear speedup analysis of distributed deep learning with sparse and
    quantized communication", NeurIPS 2018"""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "groups", self.groups, 1)
        checks.one_of(self.name, "order", self.order, ("cyclic", "shuffled"))
        if self.momentum == "reset":
            raise ConfigError(
                "spasgd: the optimizer's state cannot be reset for a part of a tensor; take momentum='keep' "
                "or 'average'"
            )

    @property
    def inner(self) -> Exchange:
        return Dense()

    @property
    def period(self) -> int:
        return self.groups

    @property
    def staleness(self) -> int:
        return self.groups if self.order == "cyclic" else 2 * self.groups - 1

    @property
    def fragment_count(self) -> int:
        return self.groups

    @property
    def whole_tensors(self) -> bool:
        return False

    def fragment_order(self, cycle: int, seed: int) -> list[int]:
        if self.order == "cyclic":
            return list(range(self.groups))
        rng = torch.Generator().manual_seed((seed << 32) + cycle & (1 << 63) - 1)
        return cast("list[int]", torch.randperm(self.groups, generator=rng).tolist())
