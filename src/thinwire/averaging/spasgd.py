"""Sparse parameter averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch

from thinwire.averaging.base import Schedule, ScheduleBase
from thinwire.core import checks
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.methods.dense import Dense


@dataclass(frozen=True)
class _GroupOptions(ScheduleBase):
    groups: int = 8
    order: Literal["cyclic", "shuffled"] = "cyclic"


@dataclass(frozen=True)
class SPASGD(Schedule, _GroupOptions):
    """In every step another part of the coordinates is averaged, so that each has its turn in `groups` steps.

    The coordinates are cut into p groups S_0 ... S_{p-1} of equal size. In step j
    y_i = x_i - gamma g_i(x_i);  x_i[S] = (1/W) sum_l y_l[S] with S = S_{j mod p};  x_i = y_i elsewhere.
    The mean of the replicas moves exactly as with full communication; only 1/p of the bytes is sent.

    Args:
        groups: p.
        order: "cyclic" takes the groups in turn; "shuffled" in another order in every round of p steps, so
            that a coordinate waits for at most 2 p - 1 steps.
        warmup, momentum, buffers, anchor: as for all schedules, see docs/periodic.md; "reset" is refused,
            because an optimizer's state cannot be reset for a part of a tensor.

    Example:
        >>> from thinwire.averaging import SPASGD
        >>> str(SPASGD(groups=16))
        'spasgd(groups=16)'

    Differences from the paper: the analysis asks only that every coordinate be averaged within p steps;
    equal contiguous groups are our choice. The last common values are kept (4 bytes per parameter), so that a
    sync round with a non-finite mean can be aborted.
    """

    name = "spasgd"
    formula = "itemsize * n / groups"
    formula_note = "on average"
    reference = (
        'Jiang and Agrawal, "A linear speedup analysis of distributed deep learning with sparse and '
        'quantized communication", NeurIPS 2018'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "groups", self.groups, 1)
        checks.one_of(self.name, "order", self.order, ("cyclic", "shuffled"))
        if self.momentum == "reset":
            raise ConfigError(
                "spasgd: the optimizer's memory cannot be reset for a part of a tensor: momentum is 'keep' "
                "or 'average'"
            )

    @property
    def inner(self) -> Exchange:
        return Dense()

    @property
    def period(self) -> int:
        return self.groups

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
