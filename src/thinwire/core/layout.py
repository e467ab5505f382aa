"""The layout of a flat tensor: named parameters, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Slot:
    """One named parameter's place in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The offset after the last entry."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """Describes a flat tensor and the named parameters in it.

    State is keyed by the names in here, never by a bucket's index: DDP rebuilds its buckets after the
    first iteration.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    @staticmethod
    def of(
        named_shapes: Iterable[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Layout:
        """Lay the given parameters out one after the other."""
        slots: list[Slot] = []
        offset = 0
        for name, shape in named_shapes:
            slots.append(Slot(name, tuple(shape), offset))
            offset += slots[-1].numel
        return Layout(tuple(slots), dtype, torch.device(device))

    @cached_property
    def numel(self) -> int:
        """The number of entries of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def key(self) -> str:
        """A key for the whole layout, equal on all ranks and independent of DDP's buckets."""
        return "\n".join(self.names)

    @property
    def dense_bytes(self) -> int:
        """The bytes of the flat tensor."""
        return self.numel * self.dtype.itemsize

    def pick(self, slots: Iterable[Slot]) -> Layout:
        """A layout of some of the slots, laid out anew from offset 0."""
        return Layout.of(((slot.name, slot.shape) for slot in slots), self.dtype, self.device)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One flat view per slot."""
        if self._lengths is None:
            return [flat[slot.offset : slot.end] for slot in self.slots]
        return list(flat.split_with_sizes(self._lengths))

    @cached_property
    def _lengths(self) -> list[int] | None:
        """Of all slots, if they lie one after the other: then one call makes all views."""
        begins = [0, *(slot.end for slot in self.slots)]
        in_order = all(slot.offset == begin for slot, begin in zip(self.slots, begins, strict=False))
        return [slot.numel for slot in self.slots] if in_order else None
