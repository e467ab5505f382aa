"""Saving and loading an engine's state, with every difference named before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thinwire.core import schema
from thinwire.core.delay import delay_schema
from thinwire.core.engine import Engine
from thinwire.core.state import SavedState, check_complete, check_entries
from thinwire.errors import StateError
from thinwire.net.meter import Tally

FORMAT = 5
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
        "keeps": engine.keeps_states,
        "keepers": engine.exchange_ranks.size,
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
        "keeps": schema.flag(),
        "keepers": schema.whole(1),
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
    """States that fit this rank, and the function that puts them in place.

    `keepers` old ranks had residuals, and this rank was given those of `ranks`.
    """

    apply: Callable[[], None]
    ranks: list[int]
    keepers: int
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
    mine = {
        "ranks": checked.ranks if on_resize == "sum" else [],
        "keepers": checked.keepers,
        "size": checked.size,
        "step": checked.step,
    }
    compare([json.loads(text) for text in call.all("load", json.dumps(mine))])
    checked.apply()


def compare(said: Sequence[dict[str, Any]]) -> None:
    """Raise a StateError if the ranks load different steps, or count the residuals of an old rank twice or
    not at all. With "drop" on all ranks nobody asks for them."""
    for rank, one in enumerate(said):
        if "error" in one:
            raise StateError(f"nothing is loaded, because rank {rank} cannot load its state: {one['error']}")
    for key in ("size", "step", "keepers"):
        values = {rank: one[key] for rank, one in enumerate(said)}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise StateError(f"the ranks load states of different {key}s ({listing})")
    taken: dict[int, int] = {}
    for rank, one in enumerate(said):
        for old in one["ranks"]:
            if old in taken:
                raise StateError(
                    f"the state of old rank {old} was given to rank {taken[old]} and to rank {rank}: its "
                    "residuals would count double. Give each old state to exactly one rank, and load with "
                    "on_resize='drop' where there is none left"
                )
            taken[old] = rank
    lost = said[0]["keepers"] - len(taken)
    if not taken or not lost:
        return
    if said[0]["keepers"] < said[0]["size"]:
        whose = f"{lost} of the {said[0]['keepers']} old leaders"
    else:
        whose = f"old rank {next(old for old in range(said[0]['size']) if old not in taken)}"
    raise StateError(
        f"the residuals of {whose} would be lost: no rank was given its state. Give each old state to "
        "exactly one rank, or load with on_resize='drop' on all ranks, which begins without residuals"
    )


def dealt(engine: Engine, size: int) -> list[int]:
    """The old ranks, of `size`, whose states this rank takes: each goes to one rank that keeps states.

    Those of a host go to one leader: only their leader had any.
    """
    local = 1 if engine.hosts is None else engine.hosts.local
    me = engine.exchange_ranks
    return [old for old in range(size) if old // local % me.size == me.rank] if engine.keeps_states else []


def check(
    engine: Engine, states: Sequence[Mapping[str, Any]], on_resize: OnResize | None, *, made: bool = False
) -> Checked:
    """The states of an engine, checked. With `made` it has made all its states, so all are in there."""
    if on_resize not in (None, "sum", "drop"):
        raise StateError(f'on_resize must be "sum" or "drop", not {on_resize!r}')
    found = [_check(engine, state, made) for state in states]
    first = states[0]
    schema.same(states, ("step", "size", "keepers", "scale"))
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
        saved = saved.of_new_ranks() if on_resize == "drop" else SavedState.sum_of(found, new_size / old_size)
    elif ranks[0] != engine.rank_info.rank:
        raise StateError(
            f"the checkpoint was written by rank {ranks[0]}, this is rank {engine.rank_info.rank}: "
            "each rank loads its own"
        )
    keeping = [int(state["rank"]) for state in states if state["keeps"]]
    step, scale = int(first["step"]), float(first["scale"])
    counters = first["counters"]

    def apply() -> None:
        engine.replace_state(saved, step, scale, counters)
        if engine.delay is not None:  # the means are equal on all ranks, however many there are
            engine.delay.load(first["delay"], engine.parameters)

    return Checked(apply, keeping, int(first["keepers"]), old_size, step)


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
    kept = [saved for saved in found if saved]
    if not engine.keeps_states:
        if kept and on_resize != "drop":
            raise StateError(
                "this rank does not lead its host, so it keeps no residuals: give the states of old leaders "
                "to new leaders, the first ranks of their hosts, and load with on_resize='drop' elsewhere"
            )
        return [SavedState.empty()]
    for saved in kept or [SavedState.empty()]:
        try:
            check_complete(saved, engine.checkpoint_layouts(), engine.router.exchange_for, complete)
        except StateError as error:
            raise StateError(
                f"{error}. This rank leads its host: it loads its own state or, with another number of "
                "ranks, that of an old leader"
            ) from None
    return kept or [SavedState.empty()]
