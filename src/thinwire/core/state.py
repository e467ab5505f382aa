"""The states of a session, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Saved states: residuals and momenta by parameter, all other tensors by `Layout.key`."""

    residuals: Entries
    replicated: Entries


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
        self._loose = SavedState({}, {})

    def take(self, exchange: Exchange, layout: Layout) -> State:
        """The state for this layout: joined from the states of its tensors, or new."""
        known = self._live.get(layout.key)
        if known is not None:
            return known.state
        names = set(layout.names)
        for key in [k for k, live in self._live.items() if names.intersection(live.layout.names)]:
            self._dissolve(self._live.pop(key))
        state = exchange.init(layout)
        for field, tensor in state.coordinates().items():
            for slot in layout.slots:
                kept = self._loose.residuals.get(slot.name, {}).pop(field, None)
                if kept is not None:
                    tensor[slot.offset : slot.end] = kept
        for field, tensor in state.by_layout().items():
            kept = self._loose.replicated.get(layout.key, {}).pop(field, None)
            if kept is not None:
                tensor.copy_(kept)
        self._live[layout.key] = _Live(exchange, layout, state)
        return state

    def entries(self) -> Entries:
        """A copy of everything, by parameter name and field."""
        result: Entries = {}
        for pieces in (self._loose, *map(_pieces, self._live.values())):
            for entries in (pieces.residuals, pieces.replicated):
                for name, kept in entries.items():
                    for field, tensor in kept.items():
                        result.setdefault(name, {})[field] = tensor.clone()
        return result

    def save(self) -> SavedState:
        """A copy of everything."""
        result = SavedState(_copy(self._loose.residuals), _copy(self._loose.replicated))
        for live in self._live.values():
            pieces = _pieces(live)
            for name, fields in _copy(pieces.residuals).items():
                result.residuals.setdefault(name, {}).update(fields)
            result.replicated |= _copy(pieces.replicated)
        return result

    def residuals(
        self, exchange_for: Callable[[Slot], Exchange], layouts: Mapping[str, Layout]
    ) -> dict[str, torch.Tensor]:
        """The part of past gradients that has not been sent yet, by parameter, also of loaded states."""
        found: dict[str, torch.Tensor] = {}
        for name, kept in self._loose.residuals.items():
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
        self._loose = SavedState(_copy(kept.residuals), _copy(kept.replicated))

    def rescale(self, factor: float) -> None:
        """The scale of the gradients has changed by this factor (a loss scale)."""
        for live in self._live.values():
            for tensor in live.state.coordinates().values():
                tensor.mul_(factor)
        for kept in self._loose.residuals.values():
            for tensor in kept.values():
                tensor.mul_(factor)

    def _dissolve(self, live: _Live) -> None:
        pieces = _pieces(live)
        for name, kept in _copy(pieces.residuals).items():
            self._loose.residuals.setdefault(name, {}).update(kept)
        for key, kept in _copy(pieces.replicated).items():
            self._loose.replicated.setdefault(key, {}).update(kept)


def _copy(entries: Entries) -> Entries:
    return {name: {field: tensor.clone() for field, tensor in kept.items()} for name, kept in entries.items()}


def _filled(state: State, kept: Mapping[str, torch.Tensor]) -> State:
    for field, tensor in state.coordinates().items():
        if field in kept:
            tensor.copy_(kept[field])
    return state


def _residuals(live: _Live) -> dict[str, torch.Tensor]:
    amount = live.exchange.residual(live.state)
    return {} if amount is None else dict(zip(live.layout.names, live.layout.parts(amount), strict=True))


def _pieces(live: _Live) -> SavedState:
    residuals = live.state.coordinates()
    return SavedState(
        {
            slot.name: {field: tensor[slot.offset : slot.end] for field, tensor in residuals.items()}
            for slot in live.layout.slots
        },
        {live.layout.key: live.state.by_layout()},
    )


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
    kept = SavedState({}, {})
    for name, fields in entries.items():
        if not isinstance(name, str) or not isinstance(fields, Mapping):
            raise StateError(f"the checkpoint has an entry {name!r} that is not a mapping of tensors")
        expected = _expected(name, layouts, exchange_for)
        residuals = expected.coordinates() if name in layouts else {}
        for field, tensor in cast("Mapping[object, object]", fields).items():
            part = kept.residuals if field in residuals else kept.replicated
            like = (residuals | expected.by_layout()).get(cast(str, field))
            if like is None:
                raise StateError(
                    f"the checkpoint remembers {field!r} for {name!r}, which this method does not"
                )
            schema.tensor(like, finite=True)(tensor, f"the checkpoint's {field!r} of {name!r}")
            part.setdefault(name, {})[cast(str, field)] = cast(torch.Tensor, tensor)
        lacking = expected.by_layout().keys() - kept.replicated.get(name, {}).keys()
        if name in kept.replicated and lacking:
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
        needed = set(state.coordinates()) - set(kept.residuals.get(name, {}))
        if exchange.traits.scope == "tensor" and not exchange.traits.elementwise:
            needed |= set(state.by_layout()) - set(kept.replicated.get(name, {}))
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
