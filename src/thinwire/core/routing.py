"""Which exchange serves which stretch of memory: planned once per bucket, then looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.errors import ConfigError

# Biases and norm scales are one-dimensional and never this long; a flattened model is.
LONGEST_SMALL_VECTOR = 65_536


@dataclass(frozen=True)
class Router:
    """Asks the method which exchange serves a tensor; small tensors and short vectors usually go dense."""

    method: Exchange
    dense: Exchange
    dense_below: int = 1024

    def __post_init__(self) -> None:
        if self.dense_below < 0:
            raise ConfigError(f"dense_below must not be negative, not {self.dense_below}")

    def exchange_for(self, slot: Slot) -> Exchange:
        return self.method.assign(slot, small=self.is_small(slot)) or self.dense

    def is_small(self, slot: Slot) -> bool:
        short_vector = len(slot.shape) <= 1 and slot.numel <= LONGEST_SMALL_VECTOR
        return slot.numel < self.dense_below or (short_vector and self.dense_below > 0)


@dataclass(frozen=True)
class View:
    """Flat memory with the gradients of `layout`, and the memory for their means (may be the same)."""

    layout: Layout
    x: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Piece:
    """A stretch of one view."""

    view: int
    start: int
    end: int


@dataclass(frozen=True)
class Group:
    """The tensors that one run of one exchange serves."""

    exchange: Exchange
    traits: Traits
    layout: Layout
    pieces: tuple[Piece, ...]

    def memory(self, views: Sequence[View]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Input and output of every piece."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in self.pieces:
            view = views[piece.view]
            if piece.end - piece.start == view.layout.numel:
                found.append((view.x, view.out))
                continue
            x = view.x[piece.start : piece.end]
            found.append((x, x if view.out is view.x else view.out[piece.start : piece.end]))
        return found


def plan(layouts: Sequence[Layout], route: Router, position: Mapping[str, int]) -> list[Group]:
    """One group per tensor, or per exchange where the exchange may or must see tensors together."""
    groups: list[Group] = []
    shared: dict[tuple[Exchange, torch.dtype, torch.device], list[tuple[int, Slot]]] = {}
    for number, layout in enumerate(layouts):
        for slot in layout.slots:
            exchange = route.exchange_for(slot)
            if exchange.traits.elementwise or exchange.traits.scope != "tensor":
                shared.setdefault((exchange, layout.dtype, layout.device), []).append((number, slot))
            elif slot.numel:
                piece = Piece(number, slot.offset, slot.end)
                groups.append(Group(exchange, exchange.traits, layout.pick([slot]), (piece,)))
    for (exchange, dtype, device), members in shared.items():
        if exchange.traits.scope == "model":  # one layout, however DDP cuts and orders its buckets
            members.sort(key=lambda member: position[member[1].name])
        layout = Layout.of(((slot.name, slot.shape) for _, slot in members), dtype, device)
        groups.append(Group(exchange, exchange.traits, layout, _joined(members)))
    return groups


def _joined(members: Sequence[tuple[int, Slot]]) -> tuple[Piece, ...]:
    """Tensors that are neighbours in memory become one piece."""
    pieces: list[Piece] = []
    for number, slot in members:
        last = pieces[-1] if pieces else None
        if last is not None and last.view == number and last.end == slot.offset:
            pieces[-1] = Piece(number, last.start, slot.end)
        else:
            pieces.append(Piece(number, slot.offset, slot.end))
    return tuple(pieces)
