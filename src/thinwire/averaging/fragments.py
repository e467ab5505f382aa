"""The model in fragments: tensors that are synchronised together, with their anchors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.averaging.base import Outer
from thinwire.averaging.spares import Spares
from thinwire.core.layout import Layout, Slot
from thinwire.core.shards import local
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """A parameter (of a sharded one: this rank's shard), or a stretch of one."""

    name: str
    parameter: torch.Tensor
    start: int
    stop: int

    @cached_property
    def whole(self) -> bool:
        return self.stop - self.start == local(self.parameter).numel()

    @cached_property
    def key(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.start}:{self.stop}]"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(local(self.parameter).shape) if self.whole else (self.stop - self.start,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same stretch of a tensor with the shape of the parameter; a view of it if it is cut."""
        tensor = local(tensor)
        return tensor.detach() if self.whole else tensor.detach().view(-1)[self.start : self.stop]


class Block:
    """Pieces of one device and precision, concatenated in flat memory."""

    def __init__(self, pieces: Sequence[Piece], anchor_device: torch.device | None, velocity: bool) -> None:
        self.pieces = list(pieces)
        device, dtype = pieces[0].parameter.device, master_dtype(pieces[0].parameter.dtype)
        self.layout = Layout.of(((piece.key, piece.shape) for piece in pieces), dtype, device)
        self.exchanged = self.layout
        """Where each piece is in the flat memory of a change, which is the same or in another order."""
        self.anchor = torch.empty(self.layout.numel, dtype=dtype, device=anchor_device or device)
        self.velocity = torch.zeros_like(self.anchor) if velocity else None
        self.set_anchor()

    def read(self) -> torch.Tensor:
        """This rank's parameters."""
        own = [piece.of(piece.parameter).reshape(-1).to(self.layout.dtype) for piece in self.pieces]
        return torch.cat(own)

    def write(self, flat: torch.Tensor) -> None:
        flat = flat.to(self.layout.device)
        for piece, values in zip(self.pieces, self.layout.parts(flat), strict=True):
            piece.of(piece.parameter).copy_(values.view(piece.shape))

    def set_anchor(self) -> None:
        """Make the current parameters the anchor; they must be equal on all ranks."""
        self.anchor.copy_(self.read())

    def arrange(self, kind: Callable[[Slot], Hashable]) -> None:
        """Let the pieces of each kind lie together in a change: they are exchanged as they are there."""
        kinds: dict[Hashable, list[int]] = {}
        for number, slot in enumerate(self.layout.slots):
            kinds.setdefault(kind(slot), []).append(number)
        order = [number for numbers in kinds.values() for number in numbers]
        moved = dict(zip(order, self.layout.pick(self.layout.slots[n] for n in order).slots, strict=True))
        slots = tuple(moved[number] for number in range(len(order)))
        self.exchanged = Layout(slots, self.layout.dtype, self.layout.device)

    def change(self, spares: Spares, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """anchor - params, laid out as `exchanged`; and with `keep` the parameters, as `read` has them."""
        change, own = spares.lend(self.exchanged), spares.lend(self.layout) if keep else None
        anchors = self.layout.parts(self.anchor.to(self.layout.device))
        copies = [None] * len(self.pieces) if own is None else self.layout.parts(own)
        every = zip(self.pieces, anchors, self.exchanged.parts(change), copies, strict=True)
        for piece, anchor, difference, copy in every:
            values = piece.of(piece.parameter).reshape(-1).to(self.layout.dtype)
            torch.sub(anchor, values if copy is None else copy.copy_(values), out=difference)
        return change, own

    def in_order(self, change: torch.Tensor) -> torch.Tensor:
        """A copy of a change, laid out as the anchor."""
        return torch.cat(self.exchanged.parts(change))

    def set_change(self, change: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a change with what `in_order` returned."""
        for to, part in zip(self.exchanged.parts(change), self.layout.parts(values), strict=True):
            to.copy_(part)

    def apply(self, mean: torch.Tensor, outer: Outer) -> None:
        """Take the outer step, and set the parameters to its result."""
        for piece, anchor in self._outer_steps(mean, outer):
            piece.of(piece.parameter).copy_(anchor.view(piece.shape))

    def apply_late(self, mean: torch.Tensor, outer: Outer, begun: torch.Tensor) -> None:
        """Take the outer step, some local steps after the sync round began with the parameters `begun`.

        What they have changed since then is added to the result.
        """
        for (piece, anchor), before in zip(
            self._outer_steps(mean, outer), self.layout.parts(begun), strict=True
        ):
            target = piece.of(piece.parameter)
            own = target.reshape(-1).to(self.layout.dtype)  # the memory of the parameter, if it can be
            moved = own.sub_(before).add_(anchor)
            if moved.data_ptr() != target.data_ptr():
                target.copy_(moved.view(piece.shape))

    def _outer_steps(self, mean: torch.Tensor, outer: Outer) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The pieces with their new anchors, one after the other: each is used while it is in the cache."""
        parts, velocity = self.layout.parts, self.velocity
        velocities = [None] * len(self.pieces) if velocity is None else parts(velocity)
        means = self.exchanged.parts(mean.to(self.anchor.device))
        every = zip(self.pieces, parts(self.anchor), means, velocities, strict=True)
        for piece, anchor, its_mean, its_velocity in every:
            outer.step(anchor, its_mean, its_velocity)
            yield piece, anchor.to(self.layout.device)


@dataclass(frozen=True)
class Fragment:
    """The part of the model that one sync round synchronises."""

    blocks: tuple[Block, ...]

    @property
    def layouts(self) -> list[Layout]:
        return [block.layout for block in self.blocks]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for block in self.blocks for piece in block.pieces]


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of differences and anchors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cut(
    parameters: Mapping[str, torch.Tensor],
    count: int,
    *,
    whole_tensors: bool,
    anchor_device: torch.device | None,
    velocity: bool,
) -> list[Fragment]:
    """`count` fragments of about equal size, in the order of the parameters."""
    lists = pieces_of(parameters, count, whole_tensors=whole_tensors)
    fragments: list[Fragment] = []
    for pieces in lists:
        alike: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
        for piece in pieces:
            kind = (piece.parameter.device, master_dtype(piece.parameter.dtype))
            alike.setdefault(kind, []).append(piece)
        fragments.append(Fragment(tuple(Block(same, anchor_device, velocity) for same in alike.values())))
    return fragments


def pieces_of(
    parameters: Mapping[str, torch.Tensor], count: int, *, whole_tensors: bool
) -> list[list[Piece]]:
    """What each of `count` fragments consists of."""
    return _by_tensors(parameters, count) if whole_tensors else _by_coordinates(parameters, count)


def _by_tensors(parameters: Mapping[str, torch.Tensor], count: int) -> list[list[Piece]]:
    if count > len(parameters):
        raise ConfigError(
            f"fragments={count}, but the model has only {len(parameters)} tensors; take fewer fragments"
        )
    total = sum(local(parameter).numel() for parameter in parameters.values())
    lists: list[list[Piece]] = [[]]
    before = 0  # entries in the fragments so far
    left = len(parameters)
    for name, parameter in parameters.items():
        full = before >= total * len(lists) / count
        needed = count - len(lists) >= left  # each of the remaining tensors needs its own fragment
        if lists[-1] and len(lists) < count and (full or needed):
            lists.append([])
        size = local(parameter).numel()
        lists[-1].append(Piece(name, parameter, 0, size))
        before += size
        left -= 1
    return lists


def _by_coordinates(parameters: Mapping[str, torch.Tensor], count: int) -> list[list[Piece]]:
    total = sum(local(parameter).numel() for parameter in parameters.values())
    if count > total:
        raise ConfigError(f"groups={count}, but the model has only {total} coordinates; take fewer groups")
    edges = [total * i // count for i in range(count + 1)]
    lists: list[list[Piece]] = [[] for _ in range(count)]
    offset = 0
    for name, parameter in parameters.items():
        end = offset + local(parameter).numel()
        for number in range(count):
            begin, stop = max(offset, edges[number]), min(end, edges[number + 1])
            if begin < stop:
                piece = Piece(name, parameter, begin - offset, stop - offset)
                if not piece.whole and not local(parameter).is_contiguous():
                    raise ConfigError(
                        f"{name!r} is not contiguous in memory and cannot be cut: make it contiguous before "
                        "the session begins, or take localsgd"
                    )
                lists[number].append(piece)
        offset = end
    return lists
