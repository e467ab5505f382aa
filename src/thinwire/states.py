"""What a session remembers, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from thinwire.errors import StateError
from thinwire.exchange import Exchange, State
from thinwire.layout import Layout, Slot

Entries = dict[str, dict[str, torch.Tensor]]


@dataclass
class _Live:
    layout: Layout
    state: State


class StateStore:
    """Live states of the layouts in use, cut up and joined anew when tensors are grouped differently.

    DDP changes its buckets after the first iteration; a state that spans several tensors follows them,
    because every residual is known by its parameter's name.
    """

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._loose: Entries = {}

    def take(self, exchange: Exchange, layout: Layout) -> State:
        """The state for this layout; made of what is known of its tensors, or fresh."""
        known = self._live.get(layout.key)
        if known is not None:
            return known.state
        names = set(layout.names)
        for key in [k for k, live in self._live.items() if names.intersection(live.layout.names)]:
            self._dissolve(self._live.pop(key))
        state = exchange.init(layout)
        for field, tensor in state.tensors("residual").items():
            for slot in layout.slots:
                kept = self._loose.get(slot.name, {}).pop(field, None)
                if kept is not None:
                    tensor[slot.offset : slot.end] = kept
        for field, tensor in state.tensors("replicated").items():
            kept = self._loose.get(layout.key, {}).pop(field, None)
            if kept is not None:
                tensor.copy_(kept)
        self._live[layout.key] = _Live(layout, state)
        return state

    def entries(self) -> Entries:
        """A copy of everything, by parameter name and field."""
        result: Entries = {
            name: {field: tensor.clone() for field, tensor in kept.items()}
            for name, kept in self._loose.items()
            if kept
        }
        for live in self._live.values():
            for name, field, tensor in _pieces(live):
                result.setdefault(name, {})[field] = tensor.clone()
        return result

    def load(self, entries: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace everything by these entries, which have been checked."""
        self._live.clear()
        self._loose = {
            name: {field: tensor.clone() for field, tensor in kept.items()} for name, kept in entries.items()
        }

    def rescale(self, factor: float) -> None:
        """The unit of the gradients has changed by this factor (a loss scale)."""
        for live in self._live.values():
            for tensor in live.state.tensors("residual").values():
                tensor.mul_(factor)
        for kept in self._loose.values():
            for tensor in kept.values():
                tensor.mul_(factor)

    def _dissolve(self, live: _Live) -> None:
        for name, field, tensor in _pieces(live):
            self._loose.setdefault(name, {})[field] = tensor.clone()


def _pieces(live: _Live) -> list[tuple[str, str, torch.Tensor]]:
    pieces = [
        (slot.name, field, tensor[slot.offset : slot.end])
        for field, tensor in live.state.tensors("residual").items()
        for slot in live.layout.slots
    ]
    pieces += [(live.layout.key, field, t) for field, t in live.state.tensors("replicated").items()]
    return pieces


def check_entries(
    entries: object, slots: Mapping[str, Slot], exchange_for: Callable[[Slot], Exchange]
) -> Entries:
    """The entries of a checkpoint, if every one fits the session; otherwise the first that does not."""
    if not isinstance(entries, Mapping):
        raise StateError(f"the checkpoint's state is {type(entries).__name__}, not a mapping by parameter")
    checked: Entries = {}
    for name, kept in entries.items():
        if not isinstance(name, str) or not isinstance(kept, Mapping):
            raise StateError(f"the checkpoint has an entry {name!r} that is not a mapping of tensors")
        expected = _expected(name, slots, exchange_for)
        checked[name] = {}
        for field, tensor in kept.items():
            if field not in expected:
                raise StateError(
                    f"the checkpoint remembers {field!r} for {name!r}, which this method does not"
                )
            like = expected[field]
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.shape != like.shape
                or tensor.dtype != like.dtype
            ):
                raise StateError(
                    f"the checkpoint's {field!r} of {name!r} is {_describe(tensor)}, "
                    f"this session needs {_describe(like)}"
                )
            checked[name][field] = tensor
    return checked


def _expected(
    name: str, slots: Mapping[str, Slot], exchange_for: Callable[[Slot], Exchange]
) -> dict[str, torch.Tensor]:
    """Field shapes for one parameter (or, for a state of several together, for all of them)."""
    names = name.split("\n")
    unknown = [n for n in names if n not in slots]
    if unknown:
        raise StateError(
            f"the checkpoint remembers something for {unknown[0]!r}, which this session does not have"
        )
    layout = Layout.of(((n, slots[n].shape) for n in names), device="meta")
    state = exchange_for(slots[names[0]]).init(layout)
    replicated = state.tensors("replicated")
    return replicated if len(names) > 1 else state.tensors("residual") | replicated


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
