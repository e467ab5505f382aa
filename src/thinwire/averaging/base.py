"""Periodic averaging: a schedule decides when the replicas average their parameters, and which of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from thinwire.core import Exchange, HostWaits, checks
from thinwire.core.config import Configured
from thinwire.errors import ConfigError

MOMENTA = ("keep", "reset", "average")


@dataclass(frozen=True)
class Outer:
    """The step that the common model takes along the mean of `anchor - params`.

    v <- mu v + g,  anchor <- anchor - lr (g + mu v) (Nesterov). With lr = 1 and mu = 0 this is the mean of
    the replicas.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Update the anchor in place. The inputs are equal on all ranks, and so is the result."""
        if velocity is not None and self.momentum:
            velocity.mul_(self.momentum).add_(mean)
            mean = mean.add(velocity, alpha=self.momentum)
        anchor.sub_(mean, alpha=self.lr)


@dataclass(frozen=True)
class ScheduleBase(Configured, ABC):
    """The interface of a schedule; separate from `Schedule` so that a method's own options come first."""

    @property
    @abstractmethod
    def inner(self) -> Exchange:
        """The exchange for `anchor - params`."""

    @property
    def host_waits(self) -> HostWaits:
        """In a sync round, which first compares where the ranks are, and applies only finite means."""
        inner = self.inner.host_waits
        why = ", ".join(filter(None, ("in a sync round, which compares where the ranks are", inner.why)))
        return inner._replace(per_bucket=inner.per_bucket + 2, why=why)

    @property
    @abstractmethod
    def period(self) -> int:
        """Steps per cycle; in a cycle every coordinate is averaged once."""

    @property
    def staleness(self) -> int:
        """The most steps that a coordinate waits for its next average: p of the analysis."""
        return self.period + self.delay

    @property
    def outer(self) -> Outer:
        """The step of the common model, after the warm-up."""
        return Outer()

    @property
    def gradient_warmup(self) -> bool:
        """Whether the warm-up averages gradients before each step, instead of parameters after it."""
        return False

    @property
    def warmup_exchange(self) -> Exchange | None:
        """What averages gradients of larger tensors in such a warm-up; None: an exact mean."""
        return None

    @property
    def whole_tensors(self) -> bool:
        """Whether fragments consist of whole tensors; if not, they have equally many coordinates."""
        return True

    @property
    def fragment_count(self) -> int:
        return 1

    @property
    def delay(self) -> int:
        """The number of steps between the start of a sync round and applying its result."""
        return 0

    @property
    def patience(self) -> float | None:
        """How long a sync round waits for a late rank, in seconds; None: as long as it takes."""
        return None

    def fragment_order(self, cycle: int, seed: int) -> list[int]:
        """The order in which the fragments of a cycle are synchronised; the first after the warm-up is 0."""
        del cycle, seed
        return list(range(self.fragment_count))


def _aside(default: Any) -> Any:
    """An option that appears in the method string only if it differs from its default."""
    return field(default=default, metadata={"main": False})


@dataclass(frozen=True)
class Schedule(ScheduleBase):
    """A frozen configuration: every rank trains by itself, with a sync round every few steps.

    In a sync round `anchor - params` goes through an exchange, the anchor (the last common model) takes
    the outer step along the mean, and the parameters are set to the anchor: the same bits on all ranks.

    Args:
        warmup: the number of steps at the start with a sync round after each, which takes the plain mean
            instead of an outer step.
        momentum: the optimizer's state (momentum, second moments) in a sync round: "keep" leaves it to each
            rank, "reset" clears it, "average" averages it, which costs a dense mean.
        buffers: average floating-point buffers (batch-norm statistics) as well, once per cycle.
        anchor: "device" stores the last common model on the device of the parameters, "cpu" in main memory,
            in float32 (float64 for float64 parameters).
    """

    family = "periodic"
    formula_note = "on average"
    rounds_per_step = "2 in a sync round (one to compare the ranks, one mean), none in between"
    compute = "a few passes over the parameters per sync round"

    warmup: int = _aside(0)
    momentum: Literal["keep", "reset", "average"] = _aside("keep")
    buffers: bool = _aside(True)
    anchor: Literal["device", "cpu"] = _aside("device")

    def __post_init__(self) -> None:
        checks.whole(self.name, "warmup", self.warmup, 0)
        checks.one_of(self.name, "momentum", self.momentum, MOMENTA)
        checks.flag(self.name, "buffers", self.buffers)
        checks.one_of(self.name, "anchor", self.anchor, ("device", "cpu"))
        traits = self.inner.traits
        if traits.optimizer in ("no momentum", "Adam"):
            raise ConfigError(
                f"{self.name}: {self.inner.name} keeps a momentum of gradients, but periodic averaging "
                "exchanges parameters; take topk or qsgd, with outer_momentum"
            )
        if not traits.consensus:
            raise ConfigError(
                f"{self.name}: {self.inner.name} gives every rank a result of its own, so the replicas "
                "would never be equal; take one that gives all ranks the same result, such as qsgd or topk"
            )


@dataclass(frozen=True)
class PeriodOptions(Schedule):
    """The schedules with a period.

    Args:
        every: the number of optimizer steps between two sync rounds.
        fragments: cut the model into this many sets of tensors. They are synchronised one after the other,
            evenly spread over the cycle, instead of all at its end.
        overlap: apply a result this many steps after its sync round began. The steps in between overlap with
            the communication, and what they have changed is added to the result. None is 1 with several
            fragments, otherwise 0.
        deadline: how long a sync round waits for late ranks, in seconds. A rank that comes later contributes
            its change to the next sync round. Only with torchft's replica groups (`attach(manager=...)`).
    """

    fragments: int = _aside(1)
    overlap: int | None = _aside(None)
    deadline: float | None = _aside(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "every", self.period, 1)
        checks.whole(self.name, "fragments", self.fragments, 1)
        if self.fragments > self.period:
            raise ConfigError(
                f"{self.name}: {self.fragments} fragments cannot be synchronised one by one in a cycle "
                f"of every={self.period} steps"
            )
        checks.optional(checks.whole, self.name, "overlap", self.overlap, 0)
        if self.delay and self.delay >= self.period:
            raise ConfigError(
                f"{self.name}: overlap={self.delay} must be less than every={self.period}: a fragment's "
                "result is applied before the fragment is synchronised again"
            )
        if self.deadline is not None:
            checks.positive(self.name, "deadline", self.deadline)
        if self.delay and self.momentum == "average":
            raise ConfigError(
                f"{self.name}: momentum='average' needs overlap=0: a late mean would undo newer steps"
            )

    @property
    def fragment_count(self) -> int:
        return self.fragments

    @property
    def delay(self) -> int:
        if self.overlap is None:
            return 1 if self.fragments > 1 and self.period > 1 else 0
        return self.overlap

    @property
    def patience(self) -> float | None:
        return self.deadline
