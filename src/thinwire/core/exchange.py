"""An Exchange turns this rank's tensor into the group's estimate of the mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, cast

import torch

from thinwire.core.channel import Channel, StepContext
from thinwire.core.config import Configured
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.net.costs import Link


def residual() -> Any:
    """A state field with one number per coordinate, in units of the gradient, that adds up over ranks."""
    return field(metadata={"kind": "residual"})


def momentum() -> Any:
    """A state field like `residual()` that is not sent later: it is not part of the mean."""
    return field(metadata={"kind": "momentum"})


def shared() -> Any:
    """A state field like `momentum()`, but equal on all ranks, or every rank's estimate of the same thing.

    It does not add up: a rank that has none, because it is new, takes that of any other.
    """
    return field(metadata={"kind": "shared"})


def replicated() -> Any:
    """A state field that is equal on all ranks and belongs to the layout as a whole."""
    return field(metadata={"kind": "replicated"})


def own() -> Any:
    """A state field of this rank alone, not per coordinate of the mean, such as a counter or an old copy.

    With another world size it has the value of one of the old ranks: a method must detect this and restart.
    """
    return field(metadata={"kind": "own"})


def hint(default: Any) -> Any:
    """A field that is no tensor: what this process knows of the others without reading them.

    It is not saved, and forgotten when the tensors are restored. It spares the host a wait for a device.
    """
    return field(default=default, metadata={"hint": default}, kw_only=True)


@dataclass
class State:
    """Base class of states: a dataclass of tensors, each declared with one of the functions above."""

    @property
    def parts(self) -> tuple[State, ...]:
        """This state and those inside of it."""
        return (self,)

    def tensors(self, *kinds: str) -> dict[str, torch.Tensor]:
        """The fields of these kinds: "residual", "momentum", "shared", "replicated" or "own"."""
        return {
            f.name: getattr(part, f.name)
            for part in self.parts
            for f in fields(part)
            if f.metadata.get("kind") in kinds
        }

    def additive(self) -> dict[str, torch.Tensor]:
        """The fields per coordinate that add up over ranks."""
        return self.tensors("residual", "momentum")

    def coordinates(self) -> dict[str, torch.Tensor]:
        """The fields with one number per coordinate: they follow their parameters, by name."""
        return self.additive() | self.tensors("shared")

    def by_layout(self) -> dict[str, torch.Tensor]:
        """The other fields: they belong to the layout as a whole."""
        return self.tensors("replicated", "own")

    def copies(self) -> dict[str, torch.Tensor]:
        """A copy of every field."""
        return {name: tensor.clone() for name, tensor in (self.coordinates() | self.by_layout()).items()}

    def restore(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Undo all changes since these copies were made."""
        tensors = self.coordinates() | self.by_layout()
        for name, copy in copies.items():
            tensors[name].copy_(copy)
        self.forget_hints()

    def forget_hints(self) -> None:
        """Set the fields made with `hint()` back: they do not change results, and are not saved."""
        for part in self.parts:
            for each in fields(part):
                if "hint" in each.metadata:
                    setattr(part, each.name, each.metadata["hint"])


@dataclass(frozen=True)
class Levels:
    """Of a method with two levels: the exact mean inside a host, and how many ranks a host has."""

    inner: Exchange
    local: int


@dataclass(frozen=True)
class Exchange(Configured, ABC):
    """A method: a frozen configuration that can run.

    Subclasses are frozen dataclasses with validated fields; method strings, JSON, command-line flags and
    `repr` come from the fields.
    """

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What this configuration guarantees and requires."""

    @abstractmethod
    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Any, ch: Channel) -> None:
        """Write the estimate of the mean of `x` over all ranks into `out`.

        `x` and `out` are flat and of one dtype; `out` may be `x`, so write it only after the last read of
        `x`, which is otherwise left untouched. `state` changes only after `await ch.commit(...)` has
        returned True.
        """

    @abstractmethod
    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        """Bytes that a rank passes to the channel per step, without frame headers; None if data-dependent.

        `link` is `ch.link` of the step: what decides by it in `run` decides alike here. This is the payload
        after a warm-up; if it is alternating, the largest over all ranks and steps. What is renewed more and
        more rarely (`adam(refresh=2)`) is not in it.
        """

    # -- what a method may override ----------------------------------------------------------------------

    reads_early: ClassVar[bool] = False
    """Whether `run` has read all of a float32 `x` when it awaits the channel for the first time, and gets the
    memory for its result from `ch.output(out)` after the commit. With a delay it then needs no copies."""

    def init(self, layout: Layout) -> State:
        """The state that is kept between steps for the tensors of `layout`."""
        del layout
        return State()

    async def reduce_scatter(
        self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel
    ) -> bool | torch.Tensor | None:
        """Write the estimate of the mean of this rank's piece, `pieces[ch.rank]`, over all ranks into `out`.

        All pieces are flat and of one length. Returns whether all pieces of all ranks were finite, the same
        on all ranks: a rank with a number that is not finite tells all others. None for a mean without state,
        of which `out` says enough. Asked only of methods whose traits say `scatters`.
        """
        raise NotImplementedError(f"{self.name} has no reduce-scatter")

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        """The exchange that serves a tensor; None for the plain dense mean.

        `small` is True if the tensor has few entries or is a short vector, so that compression does not pay.
        """
        del slot
        return None if small and not self.traits.elementwise else self

    def exact(self) -> Exchange | None:
        """This method configured to lose nothing, so that it equals the dense mean; None if it cannot."""
        return None

    def residual(self, state: Any) -> torch.Tensor | None:
        """The part of past gradients that this rank has not sent yet, per coordinate."""
        kept = list(cast(State, state).tensors("residual").values())
        return sum(kept[1:], kept[0]) if kept and kept[0].numel() else None

    def stale_parameters(self, state: Any) -> torch.Tensor | None:
        """The parameters at this rank's last upload, flat, if the method keeps them."""
        del state
        return None

    def wants_gradient(self, state: Any, context: StepContext) -> bool:
        """Whether the next step needs this rank's gradient; False lets the rank skip computing it.

        Asked only of methods with `scope="model"`, from the third step on.
        """
        del state, context
        return True

    def resolved(self, local: int | None = None) -> Exchange:
        """This method with the options that it takes from the environment filled in.

        `local` is the number of ranks per host, if the session was given the groups of the hosts.
        """
        del local
        return self

    @property
    def levels(self) -> Levels | None:
        """If only one rank of each host takes part in the exchange; asked of a resolved method."""
        return None

    @property
    def kernel_families(self) -> tuple[str, ...]:
        """The modules of `thinwire.kernels.cpu` it uses, to be compiled before the first step."""
        return ()

    @property
    def rounding(self) -> float:
        """Relative error of one sum on the wire: float32's, unless the method sends narrower numbers."""
        return 2.0**-24

    @property
    def reconcile_every(self) -> int | None:
        """If replicas drift apart: the number of steps after which their parameters are averaged."""
        return None

    @property
    def warning(self) -> str | None:
        """What a user should know before relying on this configuration; logged when a session begins."""
        return None
