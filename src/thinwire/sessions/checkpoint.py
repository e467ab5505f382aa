"""Saving and loading what a rank remembers, with every difference named before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from thinwire.core.state import Entries, Kept, check_entries
from thinwire.errors import StateError

if TYPE_CHECKING:
    from thinwire.sessions.gradient import Session

FORMAT = 1
OnResize = Literal["sum", "drop"]


def save(session: Session) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": repr(session.method),
        "parameters": _parameters(session),
        "rank": session.rank_info.rank,
        "size": session.rank_info.size,
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
    states = _as_list(given)
    checked = [_check(session, state) for state in states]
    first = states[0]
    for state in states[1:]:
        for key in ("step", "size", "scale"):
            if state[key] != first[key]:
                raise StateError(f"the given states differ in their {key}: {first[key]} and {state[key]}")
    ranks = [int(state["rank"]) for state in states]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise StateError(f"the state of rank {twice} was given twice: its residuals would count double")
    old_size, new_size = int(first["size"]), session.rank_info.size
    kept = checked[0]
    if old_size != new_size or len(states) > 1:
        if on_resize is None:
            raise StateError(
                f"the checkpoint was written by {old_size} ranks and this session has {new_size}. Residuals "
                "belong to ranks, so choose: on_resize='sum' (give every old rank's state to exactly one new "
                "rank; nothing is lost) or on_resize='drop' (residuals start at zero)"
            )
        kept = _drop(kept) if on_resize == "drop" else _sum(checked, new_size / old_size)
    elif ranks[0] != session.rank_info.rank:
        raise StateError(
            f"the checkpoint was written by rank {ranks[0]}, this is rank {session.rank_info.rank}: "
            "each rank loads its own"
        )
    session.replace_state(kept, int(first["step"]), float(first["scale"]))


def _as_list(given: object) -> list[Mapping[str, Any]]:
    if isinstance(given, Mapping):
        return [cast("Mapping[str, Any]", given)]
    if not isinstance(given, Sequence) or not all(
        isinstance(state, Mapping) for state in cast("Sequence[object]", given)
    ):
        kind = type(cast(object, given)).__name__
        raise StateError(f"a state is what state_dict() returned, or a list of such, not {kind}")
    states = list(cast("Sequence[Mapping[str, Any]]", given))
    if not states:
        raise StateError("no state was given: a rank without one of its own loads any with on_resize='drop'")
    return states


def _check(session: Session, state: Mapping[str, Any]) -> Kept:
    missing = [key for key in save_keys() if key not in state]
    if missing:
        raise StateError(f"this is not a thinwire checkpoint: it has no {missing[0]!r}")
    if state["format"] != FORMAT:
        raise StateError(f"the checkpoint has format {state['format']!r}, this version reads {FORMAT}")
    for key, own in (("method", repr(session.method)), ("seed", session.seed)):
        if state[key] != own:
            raise StateError(f"the checkpoint's {key} is {state[key]!r}, this session's is {own!r}")
    for key, lowest in (("size", 1), ("rank", 0), ("step", 0)):
        value = state[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise StateError(f"the checkpoint's {key} is {value!r}, which cannot be")
    if state["rank"] >= state["size"]:
        raise StateError(f"the checkpoint's rank is {state['rank']} of {state['size']}, which cannot be")
    scale = state["scale"]
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise StateError(f"the checkpoint's scale is {scale!r}, which cannot be")
    _compare_parameters(state["parameters"], _parameters(session))
    layouts = session.checkpoint_layouts()
    return check_entries(state["state"], layouts, session.route.exchange_for, complete=state["step"] > 0)


def save_keys() -> tuple[str, ...]:
    return ("format", "method", "parameters", "rank", "size", "seed", "step", "scale", "state")


def _parameters(session: Session) -> list[list[Any]]:
    return cast("list[list[Any]]", session.describe()["parameters"])


def _compare_parameters(theirs: object, ours: list[list[Any]]) -> None:
    if not isinstance(theirs, Sequence) or isinstance(theirs, str):
        raise StateError("the checkpoint's list of parameters is not a list")
    listed = cast("Sequence[object]", theirs)
    for position in range(max(len(listed), len(ours))):
        saved = _name(listed[position]) if position < len(listed) else "nothing"
        own = _name(ours[position]) if position < len(ours) else "nothing"
        if saved != own:
            raise StateError(
                f"the checkpoint is of another model: parameter number {position} is {saved} there and "
                f"{own} here"
            )


def _name(entry: object) -> str:
    parts = list(cast("Sequence[object]", entry)) if isinstance(entry, list | tuple) else [entry]
    return f"{parts[0]!r} {parts[1]} {parts[2]}" if len(parts) == 3 else repr(parts)


def _drop(kept: Kept) -> Kept:
    """Residuals start at zero; what is equal on all ranks is kept."""
    zeros = {
        name: {field: torch.zeros_like(tensor) for field, tensor in fields.items()}
        for name, fields in kept.residuals.items()
    }
    return Kept(zeros, kept.replicated)


def _sum(states: Sequence[Kept], weight: float) -> Kept:
    """A residual r on W old ranks stands for r/W in the mean: on W' ranks that is r W'/W."""
    total: Entries = {}
    for name, fields in states[0].residuals.items():
        total[name] = {
            field: torch.stack([state.residuals[name][field] for state in states]).sum(0) * weight
            for field in fields
        }
    return Kept(total, states[0].replicated)
