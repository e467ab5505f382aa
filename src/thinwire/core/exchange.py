"""The one noun: an Exchange turns this rank's tensor into the group's estimate of the mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import torch

from thinwire.core.channel import Channel
from thinwire.core.config import Configured
from thinwire.core.layout import Layout, Slot

Scope = Literal["tensor", "bucket", "model"]


@dataclass(frozen=True)
class Traits:
    """What may be relied on. Tests and hosts read traits, never method names.

    - consensus: all ranks get equal bits
    - unbiased: the expectation of the output is the mean of the inputs
    - conserves: nothing is lost, what is not sent comes back later
      (sum of inputs + old errors = size x output + new errors)
    - elementwise: every output coordinate depends on that coordinate only; tensors may be glued together,
      and a non-finite input comes out non-finite by itself
    - plain: the output is the channel's mean of the input and nothing else
    - memoryless: one mean, no state and no randomness, so there is nothing to settle or to wait for
    - ragged: the payload's length depends on the data
    - even: every rank hands over the same number of bytes at every step; otherwise (a leader in turn,
      factors of different lengths) `payload_bytes` is the most that a rank and a step need
    - plain_steps: counts on steps that are the learning rate times its output
    - owns_momentum: does what the optimizer's momentum does, which must then be off
    - reconcile_every: replicas drift apart, and their parameters are averaged every so many steps
    - rounding: relative error of one sum on the wire
    - scope: over what one run extends
    """

    consensus: bool = True
    unbiased: bool = False
    conserves: bool = False
    elementwise: bool = False
    plain: bool = False
    memoryless: bool = False
    ragged: bool = False
    even: bool = True
    plain_steps: bool = False
    owns_momentum: bool = False
    reconcile_every: int | None = None
    rounding: float = 2.0**-24
    scope: Scope = "tensor"


def residual() -> Any:
    """A state field with one number per coordinate, in the gradient's unit, that adds up over ranks."""
    return field(metadata={"kind": "residual"})


def momentum() -> Any:
    """A state field like `residual()`, but for what a rank remembers without owing it to the mean."""
    return field(metadata={"kind": "momentum"})


def replicated() -> Any:
    """A state field that is equal on all ranks."""
    return field(metadata={"kind": "replicated"})


def own() -> Any:
    """A state field of this rank alone, not per coordinate of the mean: counters, an old copy of something.

    With another world size it is whatever one of the old ranks had: a method must notice and begin anew.
    """
    return field(metadata={"kind": "own"})


@dataclass
class State:
    """Base of the states: a dataclass of tensors, each declared by one of the functions above."""

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("kind") == kind}

    def coordinates(self) -> dict[str, torch.Tensor]:
        """The fields with one number per coordinate: they follow their parameters, by name."""
        return self.tensors("residual") | self.tensors("momentum")

    def by_layout(self) -> dict[str, torch.Tensor]:
        """The other fields: they belong to the layout as a whole."""
        return self.tensors("replicated") | self.tensors("own")


@dataclass(frozen=True)
class Exchange(Configured, ABC):
    """A method: a frozen configuration that can run.

    Subclasses are frozen dataclasses with validated fields; method strings, JSON, command-line flags and
    `repr` come from the fields.
    """

    @property
    @abstractmethod
    def traits(self) -> Traits: ...

    @property
    def kernel_families(self) -> tuple[str, ...]:
        """The modules of `thinwire.kernels.cpu` it uses, to be compiled before the first step."""
        return ()

    def init(self, layout: Layout) -> State:
        """What is remembered between steps for the tensors of `layout`."""
        del layout
        return State()

    @property
    def caution(self) -> str | None:
        """What a user should know before relying on this configuration; logged when a session begins."""
        return None

    def rule_for(self, slot: Slot) -> Exchange | None:
        """The exchange that a rule of this method names for a tensor, if there is one."""
        del slot
        return None

    @property
    def default_exchange(self) -> Exchange:
        """What serves the tensors that no rule names."""
        return self

    def accepts(self, slot: Slot) -> bool:
        """Whether this method can serve this tensor; it is sent dense otherwise."""
        del slot
        return True

    def beside(self) -> Exchange | None:
        """What serves the tensors that are not worth this method, if the plain mean will not do."""
        return None

    @abstractmethod
    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        """Write the estimate of the mean of `x` over all ranks into `out`.

        `x` and `out` are flat and of one dtype; `out` may be `x`, so write it only after the last read of
        `x`, which is otherwise left untouched. `state` changes only after `await ch.settled(...)` has
        returned True.
        """

    @abstractmethod
    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        """Bytes that a rank hands to the channel in a step (frame headers apart); None if data-dependent.

        Once a warm-up is over, and the most of all ranks and steps if they are not `even`.
        """

    def exact(self) -> Exchange | None:
        """This method so configured that it loses nothing and equals the dense mean, if that is possible."""
        return None

    def pending(self, state: Any) -> torch.Tensor | None:
        """What this rank still owes the mean, per coordinate and in the gradient's unit."""
        owed = list(cast(State, state).tensors("residual").values())
        return sum(owed[1:], owed[0]) if owed and owed[0].numel() else None

    def stale(self, state: Any) -> torch.Tensor | None:
        """The parameters at this rank's last upload, flat, if the method keeps them."""
        del state
        return None
