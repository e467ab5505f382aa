"""Saving and loading a periodic session; everything is checked before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from thinwire.averaging.clock import COUNTERS
from thinwire.averaging.fragments import Block
from thinwire.averaging.sync_round import SyncRound
from thinwire.core import schema
from thinwire.core.optimizers import Optimizers, parameters_of
from thinwire.core.shards import local, local_state, sharded_like
from thinwire.errors import StateError
from thinwire.sessions import checkpoint
from thinwire.sessions.checkpoint import Checked, OnResize

if TYPE_CHECKING:
    from thinwire.sessions.periodic import PeriodicSession

FORMAT = 8
Tensors = dict[str, torch.Tensor]


def save(session: PeriodicSession) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "schedule": repr(session.method),
        "parameters": session.describe()["parameters"],
        "clock": session.clock.save(),
        "sync_rounds": session.sync_rounds,
        "aborted": session.aborted,
        "engine": checkpoint.save(session.engine),
        "anchors": _copy(_anchors(session.blocks)),
        "velocities": _copy(_velocities(session.blocks)),
        "noise": _copy(_noise(session)),
        "replica": _drifted(session.blocks),
        "buffers": _copy(session.all_buffers),
        "optimizers": copy.deepcopy([local_state(each.state_dict()) for each in session.optimizers]),
        "under_way": [_saved_round(sync_round) for sync_round, _ in session.under_way],
    }


def periodic_schema(session: PeriodicSession) -> schema.Schema:
    pieces = {p.key: p.of(p.parameter) for block in session.blocks for p in block.pieces}
    return {
        "format": schema.version(FORMAT),
        "schedule": schema.equal(repr(session.method)),
        "parameters": schema.parameters(session.describe()["parameters"]),
        "clock": schema.record(dict.fromkeys(COUNTERS, schema.whole())),
        "sync_rounds": schema.whole(),
        "aborted": schema.whole(),
        "engine": schema.record(checkpoint.engine_schema(session.engine)),
        "anchors": schema.tensors(_anchors(session.blocks), finite=True),
        "velocities": schema.tensors(_velocities(session.blocks), finite=True),
        "noise": schema.tensors(_noise(session), finite=True),
        # Of one rank alone, and it may have diverged: its next sync round is aborted then.
        "replica": schema.tensors(pieces, complete=False),
        "buffers": schema.tensors(session.all_buffers),
        "optimizers": lambda value, what: check_optimizer_states(session.optimizers, value, what),
        "under_way": schema.listing(lambda value, what: _check_round(session, value, what)),
    }


def load(session: PeriodicSession, given: object, on_resize: OnResize | None) -> None:
    checkpoint.together(session.engine, on_resize, lambda: _checked(session, given, on_resize))


def _checked(session: PeriodicSession, given: object, on_resize: OnResize | None) -> Checked:
    states = [schema.opened(periodic_schema(session), state) for state in schema.as_list(given)]
    first = states[0]
    for state in states:
        clock = state["clock"]
        if max(clock["start"], clock["synced"]) > clock["step"]:
            raise StateError("the checkpoint's cycle begins after its last step, which cannot be")
    resized = len(states) > 1 or first["engine"]["size"] != session.rank_info.size
    if resized and on_resize != "drop" and any(state["replica"] or state["under_way"] for state in states):
        raise StateError(
            "the checkpoint was written by another number of ranks, between two sync rounds: the steps since "
            "the last one belong to nobody here. Call session.sync() before it is written, or load it with "
            "on_resize='drop', which goes on from the last common model"
        )
    schema.same(states, ("clock", "sync_rounds"))
    checked = checkpoint.check(session.engine, [state["engine"] for state in states], on_resize, made=True)

    def apply() -> None:
        checked.apply()
        _apply(session, first, resized)

    return replace(checked, apply=apply, step=int(first["clock"]["step"]))


def _apply(session: PeriodicSession, state: Mapping[str, Any], resized: bool) -> None:
    under_way = [] if resized else [_loaded_round(session, one) for one in state["under_way"]]
    for optimizer, saved in zip(session.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_resharded(optimizer, copy.deepcopy(saved)))
    session.clock.load(state["clock"])
    session.sync_rounds, session.aborted = int(state["sync_rounds"]), int(state["aborted"])
    with torch.no_grad():
        _fill(_anchors(session.blocks), state["anchors"])
        _fill(_velocities(session.blocks), state["velocities"])
        _fill(_noise(session), state["noise"])
        _fill(session.all_buffers, state["buffers"])
        for block in session.blocks:
            block.write(block.anchor)
            for piece in block.pieces:
                if piece.key in state["replica"] and not resized:
                    piece.of(piece.parameter).copy_(state["replica"][piece.key])
    session.under_way[:] = [(sync_round, _arrived) for sync_round in under_way]


def _arrived() -> None:
    """A sync round from a checkpoint is over: nothing to wait for."""


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _fill(targets: Tensors, values: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])


def _parts(block: Block, flat: torch.Tensor) -> Tensors:
    return dict(zip(block.layout.names, block.layout.parts(flat), strict=True))


def _anchors(blocks: Sequence[Block]) -> Tensors:
    return {name: part for block in blocks for name, part in _parts(block, block.anchor).items()}


def _velocities(blocks: Sequence[Block]) -> Tensors:
    return {
        name: part
        for block in blocks
        if block.velocity is not None
        for name, part in _parts(block, block.velocity).items()
    }


def _noise(session: PeriodicSession) -> Tensors:
    """Squared norms of gradients that the warm-up has measured."""
    warmup = session.gradient_warmup
    return {} if warmup is None else {"own": warmup.own, "common": warmup.common}


def _drifted(blocks: Sequence[Block]) -> Tensors:
    """The parameters, or parts of them, that differ from the anchor."""
    found: Tensors = {}
    for block in blocks:
        anchors = _parts(block, block.anchor)
        for piece in block.pieces:
            own = piece.of(piece.parameter)
            common = anchors[piece.key].to(own.device, own.dtype).view(own.shape)
            if not torch.equal(own, common):
                found[piece.key] = own.clone()
    return found


# -- sync rounds under way ---------------------------------------------------------------------------------


def _saved_round(sync_round: SyncRound) -> dict[str, Any]:
    return {
        "step": sync_round.step,
        "number": sync_round.number,
        "due": sync_round.due,
        "fragments": list(sync_round.numbers),
        "changes": [block.in_order(change) for block, change in sync_round.results()],
        "begun": [flat.clone() for flat in sync_round.begun],
        "buffers": _copy(dict(zip(sync_round.targets, sync_round.dense, strict=True))),
    }


def _check_round(session: PeriodicSession, given: object, what: str) -> None:
    buffers = {name: buffer.reshape(-1) for name, buffer in session.buffers.items()}
    counts = dict.fromkeys(("step", "number", "due"), schema.whole())
    tensors = dict.fromkeys(("changes", "begun"), schema.listing(schema.anything()))
    lists = {"fragments": schema.listing(schema.whole()), **tensors}
    schema.record({**counts, **lists, "buffers": schema.tensors(buffers, complete=False)})(given, what)
    found = cast("Mapping[str, Any]", given)
    numbers = cast("list[int]", found["fragments"])
    blocks = [block for n in numbers if n < len(session.fragments) for block in session.fragments[n].blocks]
    fits = max(numbers, default=0) < len(session.fragments) and found["due"] > found["step"]
    if not fits or any(len(found[name]) != len(blocks) for name in tensors):
        raise StateError(f"{what} is a sync round that does not fit this session")
    for name in tensors:
        for block, flat in zip(blocks, found[name], strict=True):
            schema.tensor(block.anchor)(flat, f"{what}'s {name}")


def _loaded_round(session: PeriodicSession, given: Mapping[str, Any]) -> SyncRound:
    numbers = cast("list[int]", given["fragments"])
    fragments = [session.fragments[number] for number in numbers]
    targets = {name: session.all_buffers[name] for name in given["buffers"]}
    sync_round = SyncRound(
        given["step"],
        given["number"],
        list(numbers),
        fragments,
        targets,
        given["due"],
        spares=session.spares,
    )
    sync_round.snapshot()
    for (block, mine), saved in zip(sync_round.results(), given["changes"], strict=True):
        block.set_change(mine, saved)
    for mine, saved in zip(sync_round.begun, given["begun"], strict=True):
        mine.copy_(saved)
    for mine, saved in zip(sync_round.dense, given["buffers"].values(), strict=True):
        mine.copy_(saved)
    return sync_round


# -- the optimizer -----------------------------------------------------------------------------------------

_PER_ENTRY = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "sum")


def check_optimizer_states(optimizers: Optimizers, given: object, what: str) -> None:
    """Find errors that torch's own `load_state_dict` finds only half-way, or not at all."""
    if not isinstance(given, list | tuple):
        raise StateError(f"{what} is not a list with the state of every optimizer")
    found = cast("Sequence[object]", given)
    if len(found) != len(optimizers):
        raise StateError(
            f"{what} has the states of {len(found)} optimizers, and this run has {len(optimizers)}"
            + (f" ({optimizers})" if len(optimizers) else "")
            + ": load it with the optimizers that it was written with, in the same order"
        )
    for optimizer, state in zip(optimizers, found, strict=True):
        _check_optimizer_state(optimizer, state, f"the state of {type(optimizer).__name__} in {what}")


def _check_optimizer_state(optimizer: torch.optim.Optimizer, given: object, what: str) -> None:
    own = optimizer.state_dict()["param_groups"]
    found = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
    groups, state = found.get("param_groups"), found.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise StateError(f"{what} is not the state of an optimizer")
    theirs = [_length(group) for group in cast("list[Any]", groups)]
    ours = [len(group["params"]) for group in own]
    if theirs != ours:
        raise StateError(f"{what} has groups of {theirs} parameters, this session's has {ours}")
    if [group["params"] for group in cast("list[dict[str, Any]]", groups)] != [
        group["params"] for group in own
    ]:
        raise StateError(f"{what} numbers its parameters differently from this session's")
    parameters = parameters_of(optimizer)
    for index, kept in cast("Mapping[Any, Any]", state).items():
        if not isinstance(index, int) or not 0 <= index < len(parameters) or not isinstance(kept, Mapping):
            raise StateError(f"{what} has something for parameter {index!r}, which is not there")
        for name, value in cast("Mapping[str, object]", kept).items():
            expected = local(parameters[index]).shape
            if isinstance(value, torch.Tensor) and name in _PER_ENTRY and value.shape != expected:
                raise StateError(
                    f"{what} has a {name!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(expected)}"
                )


def _resharded(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Shards of sharded parameters' states become sharded tensors again."""
    parameters = parameters_of(optimizer)
    for index, kept in cast("dict[int, dict[str, Any]]", state["state"]).items():
        shape = local(parameters[index]).shape
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and name != "step" and value.shape == shape:
                kept[name] = sharded_like(value, parameters[index])
    return state


def _length(group: object) -> int:
    numbers = cast("Mapping[str, Any]", group).get("params") if isinstance(group, Mapping) else None
    return len(cast("list[Any]", numbers)) if isinstance(numbers, list) else -1
