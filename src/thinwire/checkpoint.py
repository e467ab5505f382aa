"""Saving and loading what a rank remembers, with every difference named before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from thinwire.errors import StateError
from thinwire.states import Entries, check_entries

if TYPE_CHECKING:
    from thinwire.session import Session

FORMAT = 1
OnResize = Literal["sum", "drop"]


def save(session: Session) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": str(session.method),
        "parameters": _parameters(session),
        "rank": session.place.rank,
        "size": session.place.size,
        "seed": session.seed,
        "step": session.step,
        "scale": session.scale,
        "state": session.states.entries(),
    }


def load(
    session: Session,
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    on_resize: OnResize | None,
) -> None:
    if on_resize not in (None, "sum", "drop"):
        raise StateError(f'on_resize must be "sum" or "drop", not {on_resize!r}')
    states = [given] if isinstance(given, Mapping) else list(given)
    if not states:
        raise StateError("no state was given: a rank without one of its own loads any with on_resize='drop'")
    checked = [_check(session, state) for state in states]
    first = states[0]
    for state in states[1:]:
        for key in ("step", "size", "scale"):
            if state[key] != first[key]:
                raise StateError(f"the given states differ in their {key}: {first[key]} and {state[key]}")
    old_size, new_size = int(first["size"]), session.place.size
    entries = checked[0]
    if old_size != new_size or len(states) > 1:
        if on_resize is None:
            raise StateError(
                f"the checkpoint was written by {old_size} ranks and this session has {new_size}. Residuals "
                "belong to ranks, so choose: on_resize='sum' (give every old rank's state to exactly one new "
                "rank; nothing is lost) or on_resize='drop' (residuals start at zero)"
            )
        residuals = _residual_fields(session)
        entries = (
            _drop(entries, residuals)
            if on_resize == "drop"
            else _sum(checked, residuals, new_size / old_size)
        )
    elif int(first["rank"]) != session.place.rank:
        raise StateError(
            f"the checkpoint was written by rank {first['rank']}, this is rank {session.place.rank}: "
            "each rank loads its own"
        )
    session.replace_state(entries, int(first["step"]), float(first["scale"]))


def _check(session: Session, state: Mapping[str, Any]) -> Entries:
    needed = save_keys()
    missing = [key for key in needed if key not in state]
    if missing:
        raise StateError(f"this is not a thinwire checkpoint: it has no {missing[0]!r}")
    if state["format"] != FORMAT:
        raise StateError(f"the checkpoint has format {state['format']}, this version reads {FORMAT}")
    for key, own in (("method", str(session.method)), ("seed", session.seed)):
        if state[key] != own:
            raise StateError(f"the checkpoint's {key} is {state[key]!r}, this session's is {own!r}")
    for key, kind in (("rank", int), ("size", int), ("step", int), ("scale", (int, float))):
        if isinstance(state[key], bool) or not isinstance(state[key], kind) or state[key] < 0:
            raise StateError(f"the checkpoint's {key} is {state[key]!r}, which cannot be")
    _compare_parameters(state["parameters"], _parameters(session))
    return check_entries(state["state"], session.checkpoint_slots(), session.route.exchange_for)


def save_keys() -> tuple[str, ...]:
    return ("format", "method", "parameters", "rank", "size", "seed", "step", "scale", "state")


def _parameters(session: Session) -> list[list[Any]]:
    return cast("list[list[Any]]", session.describe()["parameters"])


def _compare_parameters(theirs: object, ours: list[list[Any]]) -> None:
    if not isinstance(theirs, Sequence):
        raise StateError("the checkpoint's list of parameters is not a list")
    listed = cast("Sequence[Sequence[Any]]", theirs)
    for position in range(max(len(listed), len(ours))):
        saved = list(listed[position]) if position < len(listed) else None
        own = ours[position] if position < len(ours) else None
        if saved != own:
            raise StateError(
                f"the checkpoint is of another model: parameter number {position} is "
                f"{_name(saved)} there and {_name(own)} here"
            )


def _name(entry: list[Any] | None) -> str:
    return "nothing" if entry is None else f"{entry[0]!r} {tuple(entry[1])} {entry[2]}"


def _residual_fields(session: Session) -> dict[str, set[str]]:
    from thinwire.layout import Layout

    fields: dict[str, set[str]] = {}
    for name, slot in session.checkpoint_slots().items():
        layout = Layout.of([(name, slot.shape)], device="meta")
        fields[name] = set(session.route.exchange_for(slot).init(layout).tensors("residual"))
    return fields


def _drop(entries: Entries, residuals: Mapping[str, set[str]]) -> Entries:
    return {
        name: {f: t for f, t in kept.items() if f not in residuals.get(name, set())}
        for name, kept in entries.items()
    }


def _sum(states: Sequence[Entries], residuals: Mapping[str, set[str]], weight: float) -> Entries:
    """A residual r on W old ranks stands for r/W in the mean: on W' ranks that is r W'/W."""
    total: Entries = {name: dict(kept) for name, kept in states[0].items()}
    for name, kept in total.items():
        for field in kept:
            if field in residuals.get(name, set()):
                pieces = [state[name][field] for state in states if field in state.get(name, {})]
                kept[field] = torch.stack(pieces).sum(0) * weight
    return total
