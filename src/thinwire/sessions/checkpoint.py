"""Saving and loading an engine's state, with every difference named before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thinwire import log
from thinwire.core import schema
from thinwire.core.delay import delay_schema
from thinwire.core.engine import Engine
from thinwire.core.state import Entries, SavedState, check_complete, check_entries
from thinwire.errors import StateError
from thinwire.net.meter import Tally

FORMAT = 4
OnResize = Literal["sum", "drop"]
COUNTERS = schema.record(
    {
        "steps": schema.whole(),
        "skipped_steps": schema.whole(),
        "work_seconds": schema.amount(),
        "network_seconds": schema.amount(),
        "by_operation": schema.each(
            schema.record({**dict.fromkeys(Tally._fields, schema.whole()), "seconds": schema.amount()})
        ),
    }
)
"""What the meter has counted."""


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
        "counters": engine.meter.save(),
        "state": engine.states.entries(),
        **({} if engine.delay is None else {"delay": engine.delay.save()}),
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
        "counters": COUNTERS,
        "state": schema.mapping(),
        **({} if engine.delay is None else {"delay": delay_schema(_flat(engine))}),
    }


def _flat(engine: Engine) -> dict[str, torch.Tensor]:
    layouts = engine.checkpoint_layouts().items()
    return {name: torch.empty(layout.numel, dtype=layout.dtype, device="meta") for name, layout in layouts}


@dataclass
class Checked:
    """States that fit this rank, and the function that puts them in place."""

    apply: Callable[[], None]
    ranks: list[int]
    size: int
    step: int


def load(engine: Engine, given: object, on_resize: OnResize | None) -> None:
    """Check the states of a gradient session, on all ranks if their number changed; then change this one."""

    def checked() -> Checked:
        fields = {**engine_schema(engine), "decided": schema.flag()}
        states = [schema.opened(fields, state) for state in schema.as_list(given)]
        return check(engine, states, on_resize)

    together(engine, on_resize, checked)


def together(engine: Engine, on_resize: OnResize | None, check_here: Callable[[], Checked]) -> None:
    """Apply what this rank has checked. After a resize, no rank does so unless all can.

    The ranks then also compare which old states they were given: twice the same would count double.
    """
    if on_resize is None or not engine.executors:
        check_here().apply()
        return
    call = engine.bulletin("load_state_dict")
    try:
        checked = check_here()
    except StateError as error:
        call.say("load", json.dumps({"error": str(error)}))
        raise
    mine = {"ranks": checked.ranks, "size": checked.size, "step": checked.step, "how": on_resize}
    _compare([json.loads(text) for text in call.all("load", json.dumps(mine))], engine.rank_info.rank)
    checked.apply()


def _compare(said: Sequence[dict[str, Any]], me: int) -> None:
    for rank, one in enumerate(said):
        if "error" in one:
            raise StateError(f"nothing is loaded, because rank {rank} cannot load its state: {one['error']}")
    for key in ("size", "step"):
        values = {rank: one[key] for rank, one in enumerate(said)}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise StateError(f"the ranks load states of different {key}s ({listing})")
    taken: dict[int, int] = {}
    for rank, one in enumerate(said):
        for old in one["ranks"] if one["how"] == "sum" else ():
            if old in taken:
                raise StateError(
                    f"the state of old rank {old} was given to rank {taken[old]} and to rank {rank}: its "
                    "residuals would count double. Give each old state to exactly one rank, and load with "
                    "on_resize='drop' where there is none left"
                )
            taken[old] = rank
    lost = [old for old in range(said[0]["size"]) if old not in taken]
    if me == 0 and taken and lost:
        log.warning("the residuals of old rank %s are lost: no rank was given its state", lost[0])


def check(
    engine: Engine, states: Sequence[Mapping[str, Any]], on_resize: OnResize | None, *, made: bool = False
) -> Checked:
    """The states of an engine, checked. With `made` it has made all its states, so all are in there."""
    if on_resize not in (None, "sum", "drop"):
        raise StateError(f'on_resize must be "sum" or "drop", not {on_resize!r}')
    found = [_check(engine, state, made) for state in states]
    first = states[0]
    schema.same(states, ("step", "size", "scale"))
    ranks = [int(state["rank"]) for state in states]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise StateError(f"the state of rank {twice} was given twice: its residuals would count double")
    old_size, new_size = int(first["size"]), engine.rank_info.size
    if engine.hosts is not None:
        found = _of_leaders(engine, found, on_resize, made or int(first["step"]) > 0)
    saved = found[0]
    if old_size != new_size or len(states) > 1:
        if on_resize is None:
            raise StateError(
                f"the checkpoint was written by {old_size} ranks and this session has {new_size}. Residuals "
                "belong to ranks, so choose: on_resize='sum' (give every old rank's state to exactly one new "
                "rank; nothing is lost) or on_resize='drop' (residuals start at zero)"
            )
        saved = _drop(saved) if on_resize == "drop" else _sum(found, new_size / old_size)
    elif ranks[0] != engine.rank_info.rank:
        raise StateError(
            f"the checkpoint was written by rank {ranks[0]}, this is rank {engine.rank_info.rank}: "
            "each rank loads its own"
        )
    step, scale = int(first["step"]), float(first["scale"])
    counters = first["counters"]

    def apply() -> None:
        engine.replace_state(saved, step, scale, counters)
        if engine.delay is not None:  # the means are equal on all ranks, however many there are
            engine.delay.load(first["delay"], engine.parameters)

    return Checked(apply, ranks, old_size, step)


def _check(engine: Engine, found: Mapping[str, Any], made: bool) -> SavedState:
    if found["rank"] >= found["size"]:
        raise StateError(f"the checkpoint's rank is {found['rank']} of {found['size']}, which cannot be")
    layouts = engine.checkpoint_layouts()
    complete = engine.hosts is None and (made or found["step"] > 0)
    return check_entries(found["state"], layouts, engine.router.exchange_for, complete=complete)


def _of_leaders(
    engine: Engine, found: Sequence[SavedState], on_resize: OnResize | None, complete: bool
) -> list[SavedState]:
    """With two levels only leaders have states, and only leaders can go on with one."""
    kept = [saved for saved in found if saved.residuals or saved.replicated]
    if not engine.keeps_states:
        if kept and on_resize != "drop":
            raise StateError(
                "this rank does not lead its host, so it keeps no residuals: give the states of old leaders "
                "to new leaders, the first ranks of their hosts, and load with on_resize='drop' elsewhere"
            )
        return [SavedState({}, {})]
    for saved in kept or [SavedState({}, {})]:
        try:
            check_complete(saved, engine.checkpoint_layouts(), engine.router.exchange_for, complete)
        except StateError as error:
            raise StateError(
                f"{error}. This rank leads its host: it loads its own state or, with another number of "
                "ranks, that of an old leader"
            ) from None
    return kept or [SavedState({}, {})]


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
