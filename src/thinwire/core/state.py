"""The states of a session, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from thinwire.core import schema
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout, Slot
from thinwire.errors import StateError

Entries = dict[str, dict[str, torch.Tensor]]


@dataclass
class SavedState:
    """Saved states: what adds up over ranks and what is shared by parameter, the rest by `Layout.key`."""

    additive: Entries
    shared: Entries
    by_layout: Entries

    @classmethod
    def empty(cls) -> SavedState:
        return cls({}, {}, {})

    def __bool__(self) -> bool:
        return any((self.additive, self.shared, self.by_layout))

    def copy(self) -> SavedState:
        return SavedState(_copy(self.additive), _copy(self.shared), _copy(self.by_layout))

    def update(self, other: SavedState) -> None:
        """Add the entries of another one."""
        for mine, theirs in zip(self._all, other._all, strict=True):
            for name, kept in theirs.items():
                mine.setdefault(name, {}).update(kept)

    def entries(self) -> Entries:
        """All of them, by name and field."""
        found: Entries = {}
        for entries in self._all:
            for name, kept in entries.items():
                if kept:
                    found.setdefault(name, {}).update(kept)
        return found

    def of_new_ranks(self) -> SavedState:
        """For a rank that has sent everything: what adds up is zero, the rest stays."""
        zeros = {
            name: {field: torch.zeros_like(tensor) for field, tensor in kept.items()}
            for name, kept in self.additive.items()
        }
        return SavedState(zeros, self.shared, self.by_layout)

    @staticmethod
    def sum_of(states: Sequence[SavedState], weight: float) -> SavedState:
        """For a rank that takes the place of several, `weight` times what adds up."""
        first = states[0]
        total: Entries = {
            name: {
                field: torch.stack([state.additive[name][field] for state in states]).sum(0) * weight
                for field in kept
            }
            for name, kept in first.additive.items()
        }
        return SavedState(total, first.shared, first.by_layout)

    @property
    def _all(self) -> tuple[Entries, Entries, Entries]:
        return self.additive, self.shared, self.by_layout


@dataclass
class _Live:
    exchange: Exchange
    layout: Layout
    state: State


class StateStore:
    """Live states of the layouts in use, split and joined again when tensors are grouped differently.

    DDP changes its buckets after the first iteration; a state that spans several tensors follows them,
    because every residual is stored under its parameter's name.
    """

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._loose = SavedState.empty()

    def take(self, exchange: Exchange, layout: Layout) -> State:
        """The state for this layout: joined from the states of its tensors, or new."""
        known = self._live.get(layout.key)
        if known is not None:
            return known.state
        names = set(layout.names)
        for key in [k for k, live in self._live.items() if names.intersection(live.layout.names)]:
            self._dissolve(self._live.pop(key))
        state = exchange.init(layout)
        for entries, fields in (
            (self._loose.additive, state.additive()),
            (self._loose.shared, state.tensors("shared")),
        ):
            for field, tensor in fields.items():
                for slot in layout.slots:
                    kept = entries.get(slot.name, {}).pop(field, None)
                    if kept is not None:
                        tensor[slot.offset : slot.end] = kept
        for field, tensor in state.by_layout().items():
            kept = self._loose.by_layout.get(layout.key, {}).pop(field, None)
            if kept is not None:
                tensor.copy_(kept)
        self._live[layout.key] = _Live(exchange, layout, state)
        return state

    def entries(self) -> Entries:
        """A copy of everything, by parameter name and field."""
        return self.save().entries()

    def save(self) -> SavedState:
        """A copy of everything."""
        result = self._loose.copy()
        for live in self._live.values():
            result.update(_pieces(live).copy())
        return result

    def residuals(
        self, exchange_for: Callable[[Slot], Exchange], layouts: Mapping[str, Layout]
    ) -> dict[str, torch.Tensor]:
        """The part of past gradients that has not been sent yet, by parameter, also of loaded states."""
        found: dict[str, torch.Tensor] = {}
        for name, kept in self._loose.additive.items():
            if kept:
                device = next(iter(kept.values())).device
                layout = Layout(layouts[name].slots, layouts[name].dtype, device)
                exchange = exchange_for(layout.slots[0])
                found |= _residuals(_Live(exchange, layout, _filled(exchange.init(layout), kept)))
        for live in self._live.values():
            found |= _residuals(live)
        return found

    def load(self, kept: SavedState) -> None:
        """Replace everything with a copy of this state, which has been checked."""
        self._live.clear()
        self._loose = kept.copy()

    def rescale(self, factor: float) -> None:
        """The scale of the gradients has changed by this factor (a loss scale)."""
        for live in self._live.values():
            for tensor in live.state.coordinates().values():
                tensor.mul_(factor)
        for entries in (self._loose.additive, self._loose.shared):
            _scale(entries, factor)

    def reweigh(self, factor: float) -> None:
        """The number of ranks has changed by this factor, and with it the share of each in a mean."""
        for live in self._live.values():
            for tensor in live.state.additive().values():
                tensor.mul_(factor)
        _scale(self._loose.additive, factor)

    def _dissolve(self, live: _Live) -> None:
        self._loose.update(_pieces(live).copy())


def _copy(entries: Entries) -> Entries:
    return {name: {field: tensor.clone() for field, tensor in kept.items()} for name, kept in entries.items()}


def _scale(entries: Entries, factor: float) -> None:
    for kept in entries.values():
        for tensor in kept.values():
            tensor.mul_(factor)


def _filled(state: State, kept: Mapping[str, torch.Tensor]) -> State:
    for field, tensor in state.coordinates().items():
        if field in kept:
            tensor.copy_(kept[field])
    return state


def _residuals(live: _Live) -> dict[str, torch.Tensor]:
    amount = live.exchange.residual(live.state)
    return {} if amount is None else dict(zip(live.layout.names, live.layout.parts(amount), strict=True))


def _pieces(live: _Live) -> SavedState:
    def by_parameter(fields: Mapping[str, torch.Tensor]) -> Entries:
        return {
            slot.name: {field: tensor[slot.offset : slot.end] for field, tensor in fields.items()}
            for slot in live.layout.slots
        }

    state = live.state
    by_layout = {live.layout.key: state.by_layout()}
    return SavedState(by_parameter(state.additive()), by_parameter(state.tensors("shared")), by_layout)


def check_entries(
    entries: Mapping[Any, Any],
    layouts: Mapping[str, Layout],
    exchange_for: Callable[[Slot], Exchange],
    *,
    complete: bool,
) -> SavedState:
    """The entries of a checkpoint. If one does not fit the session, a StateError names it.

    `layouts` has a layout for every parameter of the session, by name. With `complete` every parameter must
    have an entry.
    """
    kept = SavedState.empty()
    for name, fields in entries.items():
        if not isinstance(name, str) or not isinstance(fields, Mapping):
            raise StateError(f"the checkpoint has an entry {name!r} that is not a mapping of tensors")
        expected = _expected(name, layouts, exchange_for)
        additive, shared = (expected.additive(), expected.tensors("shared")) if name in layouts else ({}, {})
        for field, tensor in cast("Mapping[object, object]", fields).items():
            part = kept.additive if field in additive else kept.shared if field in shared else kept.by_layout
            like = (additive | shared | expected.by_layout()).get(cast(str, field))
            if like is None:
                raise StateError(
                    f"the checkpoint remembers {field!r} for {name!r}, which this method does not"
                )
            schema.tensor(like, finite=True)(tensor, f"the checkpoint's {field!r} of {name!r}")
            part.setdefault(name, {})[cast(str, field)] = cast(torch.Tensor, tensor)
        lacking = expected.by_layout().keys() - kept.by_layout.get(name, {}).keys()
        if name in kept.by_layout and lacking:
            raise StateError(f"the checkpoint lacks {min(lacking)!r} of {name!r}")
    check_complete(kept, layouts, exchange_for, complete)
    return kept


def check_complete(
    kept: SavedState, layouts: Mapping[str, Layout], exchange_for: Callable[[Slot], Exchange], complete: bool
) -> None:
    """Raise a StateError if the state must be complete and something is missing."""
    for name, layout in layouts.items() if complete else ():
        exchange = exchange_for(layout.slots[0])
        if exchange.traits.single_mean or not layout.numel:
            continue
        state = exchange.init(layout)
        there = {*kept.additive.get(name, {}), *kept.shared.get(name, {})}
        needed = set(state.coordinates()) - there
        if exchange.traits.scope == "tensor" and not exchange.traits.elementwise:
            needed |= set(state.by_layout()) - set(kept.by_layout.get(name, {}))
        if needed:
            raise StateError(f"the checkpoint lacks {min(needed)!r} of {name!r}")


def _expected(name: str, layouts: Mapping[str, Layout], exchange_for: Callable[[Slot], Exchange]) -> State:
    """The state that an entry belongs to: that of one parameter, or of several together."""
    names = name.split("\n")
    unknown = [n for n in names if n not in layouts]
    if unknown:
        raise StateError(
            f"the checkpoint remembers something for {unknown[0]!r}, which this session does not have"
        )
    first = layouts[names[0]]
    layout = Layout.of(((n, layouts[n].slots[0].shape) for n in names), first.dtype, first.device)
    return exchange_for(first.slots[0]).init(layout)
