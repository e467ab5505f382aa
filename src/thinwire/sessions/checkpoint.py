"""Saving and loading an engine's state, with every difference named before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from thinwire.core import schema
from thinwire.core.engine import Engine
from thinwire.core.state import Entries, SavedState, check_entries
from thinwire.errors import StateError

FORMAT = 2
OnResize = Literal["sum", "drop"]


def save(engine: Engine) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": repr(engine.method),
        "parameters": engine.described_parameters(),
        "rank": engine.rank_info.rank,
        "size": engine.rank_info.size,
        "seed": engine.seed,
        "step": engine.step,
        "scale": engine.scale,
        "state": engine.states.entries(),
    }


def engine_schema(engine: Engine) -> schema.Schema:
    """The schema of this engine's state; `check_entries` checks its tensors."""
    return {
        "format": schema.version(FORMAT),
        "method": schema.equal(repr(engine.method)),
        "parameters": schema.parameters(engine.described_parameters()),
        "size": schema.whole(1),
        "rank": schema.whole(),
        "seed": schema.equal(engine.seed),
        "step": schema.whole(),
        "scale": schema.positive(),
        "state": schema.mapping(),
    }


def load(engine: Engine, given: object, on_resize: OnResize | None) -> None:
    if on_resize not in (None, "sum", "drop"):
        raise StateError(f'on_resize must be "sum" or "drop", not {on_resize!r}')
    states = schema.as_list(given)
    checked = [_check(engine, state) for state in states]
    first = states[0]
    schema.same(states, ("step", "size", "scale"))
    ranks = [int(state["rank"]) for state in states]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise StateError(f"the state of rank {twice} was given twice: its residuals would count double")
    old_size, new_size = int(first["size"]), engine.rank_info.size
    saved = checked[0]
    if old_size != new_size or len(states) > 1:
        if on_resize is None:
            raise StateError(
                f"the checkpoint was written by {old_size} ranks and this session has {new_size}. Residuals "
                "belong to ranks, so choose: on_resize='sum' (give every old rank's state to exactly one new "
                "rank; nothing is lost) or on_resize='drop' (residuals start at zero)"
            )
        saved = _drop(saved) if on_resize == "drop" else _sum(checked, new_size / old_size)
    elif ranks[0] != engine.rank_info.rank:
        raise StateError(
            f"the checkpoint was written by rank {ranks[0]}, this is rank {engine.rank_info.rank}: "
            "each rank loads its own"
        )
    engine.replace_state(saved, int(first["step"]), float(first["scale"]))


def _check(engine: Engine, state: object) -> SavedState:
    found = schema.check(engine_schema(engine), state)
    if found["rank"] >= found["size"]:
        raise StateError(f"the checkpoint's rank is {found['rank']} of {found['size']}, which cannot be")
    layouts = engine.checkpoint_layouts()
    return check_entries(found["state"], layouts, engine.router.exchange_for, complete=found["step"] > 0)


def _drop(saved: SavedState) -> SavedState:
    """Residuals start at zero; state that is equal on all ranks is kept."""
    zeros = {
        name: {field: torch.zeros_like(tensor) for field, tensor in fields.items()}
        for name, fields in saved.residuals.items()
    }
    return SavedState(zeros, saved.replicated)


def _sum(states: Sequence[SavedState], weight: float) -> SavedState:
    """A residual r on W old ranks stands for r/W in the mean: on W' ranks that is r W'/W."""
    total: Entries = {}
    for name, fields in states[0].residuals.items():
        total[name] = {
            field: torch.stack([state.residuals[name][field] for state in states]).sum(0) * weight
            for field in fields
        }
    return SavedState(total, states[0].replicated)
