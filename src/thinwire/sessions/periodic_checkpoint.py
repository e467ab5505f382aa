"""Saving and loading a schedule's session; everything is checked before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from thinwire.averaging.clock import COUNTERS
from thinwire.averaging.fragments import Block
from thinwire.averaging.sync_round import Meeting
from thinwire.errors import StateError
from thinwire.sessions.checkpoint import OnResize

if TYPE_CHECKING:
    from thinwire.sessions.periodic import PeriodicSession

FORMAT = 1
KEYS = (
    "format",
    "schedule",
    "parameters",
    "clock",
    "meetings",
    "dropped",
    "exchanges",
    "anchors",
    "velocities",
    "replica",
    "buffers",
    "optimizer",
    "under_way",
)
Tensors = dict[str, torch.Tensor]


def save(session: PeriodicSession) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "schedule": repr(session.method),
        "parameters": session.describe()["parameters"],
        "clock": session.clock.save(),
        "meetings": session.meetings,
        "dropped": session.dropped,
        "exchanges": session.exchanges.state_dict(),
        "anchors": _copy(_anchors(session.blocks)),
        "velocities": _copy(_velocities(session.blocks)),
        "replica": _drifted(session.blocks),
        "buffers": _copy(session.all_buffers),
        "optimizer": copy.deepcopy(session.optimizer.state_dict()),
        "under_way": [_saved_meeting(meeting) for meeting, _ in session.under_way],
    }


def load(
    session: PeriodicSession,
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    on_resize: OnResize | None,
) -> None:
    states = [given] if isinstance(given, Mapping) else list(given)
    if not states:
        raise StateError("no state was given: a rank without one of its own loads any with on_resize='drop'")
    for state in states:
        _check(session, state)
    first = states[0]
    resized = len(states) > 1 or first["exchanges"]["size"] != session.rank_info.size
    if resized and on_resize != "drop" and any(state["replica"] or state["under_way"] for state in states):
        raise StateError(
            "the checkpoint was written by another number of ranks, between two meetings: what they had done "
            "since the last one belongs to nobody here. Call session.sync() before it is written, or load it "
            "with on_resize='drop', which goes on from the last common model"
        )
    for key in ("clock", "meetings"):
        if any(state[key] != first[key] for state in states):
            raise StateError(f"the given states are not of one moment: they differ in {key!r}")
    meetings = [] if resized else [_loaded_meeting(session, one) for one in first["under_way"]]
    inner = [state["exchanges"] for state in states]
    # The last thing that may be refused; it changes nothing unless all of it fits.
    session.exchanges.load_state_dict(inner if len(inner) > 1 else inner[0], on_resize=on_resize)
    session.optimizer.load_state_dict(copy.deepcopy(first["optimizer"]))
    session.clock.load(first["clock"])
    session.meetings, session.dropped = int(first["meetings"]), int(first["dropped"])
    with torch.no_grad():
        _fill(_anchors(session.blocks), first["anchors"])
        _fill(_velocities(session.blocks), first["velocities"])
        _fill(session.all_buffers, first["buffers"])
        for block in session.blocks:
            block.write(block.anchor)
            for piece in block.pieces:
                if piece.key in first["replica"] and not resized:
                    piece.of(piece.parameter).copy_(first["replica"][piece.key])
    session.under_way[:] = [(meeting, _arrived) for meeting in meetings]


def _arrived() -> None:
    """A meeting from a checkpoint has taken place: nothing to wait for."""


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


def _drifted(blocks: Sequence[Block]) -> Tensors:
    """The parameters, or stretches of them, that are not what the anchor says."""
    found: Tensors = {}
    for block in blocks:
        anchors = _parts(block, block.anchor)
        for piece in block.pieces:
            own = piece.of(piece.parameter)
            common = anchors[piece.key].to(own.device, own.dtype).view(own.shape)
            if not torch.equal(own, common):
                found[piece.key] = own.clone()
    return found


def _saved_meeting(meeting: Meeting) -> dict[str, Any]:
    return {
        "step": meeting.step,
        "number": meeting.number,
        "due": meeting.due,
        "fragments": list(meeting.numbers),
        "changes": [change.clone() for change in meeting.changes],
        "buffers": _copy(dict(zip(meeting.targets, meeting.beside, strict=True))),
    }


def _loaded_meeting(session: PeriodicSession, given: Mapping[str, Any]) -> Meeting:
    numbers = cast("list[int]", given["fragments"])
    fragments = [session.fragments[number] for number in numbers]
    targets = {name: session.all_buffers[name] for name in given["buffers"]}
    meeting = Meeting(given["step"], given["number"], list(numbers), fragments, targets, given["due"])
    meeting.snapshot()
    for mine, saved in zip(meeting.changes, given["changes"], strict=True):
        mine.copy_(saved)
    for mine, saved in zip(meeting.beside, given["buffers"].values(), strict=True):
        mine.copy_(saved)
    return meeting


# -- checks ------------------------------------------------------------------------------------------------


def _check(session: PeriodicSession, state: object) -> None:
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state is what state_dict() returned, or a list of such, not {type(state).__name__}"
        )
    found = cast("Mapping[str, Any]", state)
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise StateError(f"this is not a checkpoint of a thinwire schedule: it has no {missing[0]!r}")
    if found["format"] != FORMAT:
        raise StateError(f"the checkpoint has format {found['format']!r}, this version reads {FORMAT}")
    if found["schedule"] != repr(session.method):
        raise StateError(
            f"the checkpoint's method is {found['schedule']!r}, this session's is {session.method!r}"
        )
    ours = session.describe()["parameters"]
    if [list(one) for one in _list(found["parameters"], "parameters")] != ours:
        raise StateError(
            "the checkpoint is of another model: its parameters have other names, shapes or types"
        )
    clock = found["clock"]
    if not isinstance(clock, Mapping) or set(cast("Mapping[str, Any]", clock)) != set(COUNTERS):
        raise StateError("the checkpoint's clock is not one")
    counts = {**cast("Mapping[str, Any]", clock), "meetings": found["meetings"], "dropped": found["dropped"]}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise StateError(f"the checkpoint's {name} is {count!r}, which cannot be")
    if max(counts["start"], counts["met"]) > counts["step"]:
        raise StateError("the checkpoint's cycle begins after its last step, which cannot be")
    anchors = _anchors(session.blocks)
    _check_tensors(found["anchors"], anchors, "anchors")
    _check_tensors(found["velocities"], _velocities(session.blocks), "velocities")
    _check_tensors(found["buffers"], session.all_buffers, "buffers")
    pieces = {p.key: p.of(p.parameter) for block in session.blocks for p in block.pieces}
    _check_tensors(found["replica"], pieces, "replica", all_of_them=False)
    exchanges = found["exchanges"]
    if not isinstance(exchanges, Mapping) or "size" not in exchanges:
        raise StateError("the checkpoint's part of the exchanges is not one")
    _check_optimizer(session.optimizer, found["optimizer"])
    for one in _list(found["under_way"], "under_way"):
        _check_meeting(session, one)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise StateError(f"the checkpoint's {name} is not a list")
    return list(cast("Sequence[Any]", value))


def _check_tensors(given: object, like: Tensors, what: str, *, all_of_them: bool = True) -> None:
    if not isinstance(given, Mapping):
        raise StateError(f"the checkpoint's {what} are not a mapping of tensors")
    found = cast("Mapping[str, object]", given)
    lacking = [name for name in like if name not in found] if all_of_them else []
    unknown = [name for name in found if name not in like]
    if lacking or unknown:
        name = (lacking or unknown)[0]
        raise StateError(f"the checkpoint's {what} {'lack' if lacking else 'have an unknown'} {name!r}")
    for name, value in found.items():
        _check_tensor(value, like[name], f"{what} of {name!r}")


def _check_tensor(value: object, like: torch.Tensor, what: str) -> None:
    fits = isinstance(value, torch.Tensor) and value.shape == like.shape and value.dtype == like.dtype
    if not fits:
        raise StateError(
            f"the checkpoint's {what} must be a {like.dtype} tensor of shape {tuple(like.shape)}"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, given: object) -> None:
    """What torch's own `load_state_dict` would find only half-way, or not at all."""
    own = optimizer.state_dict()["param_groups"]
    found = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
    groups, state = found.get("param_groups"), found.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise StateError("the checkpoint's optimizer state is not one")
    listed = cast("list[Any]", groups)
    theirs = [_length(group) for group in listed]
    ours = [len(group["params"]) for group in own]
    if theirs != ours:
        raise StateError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, this session's has {ours}"
        )
    parameters = [p for group in optimizer.param_groups for p in cast("list[torch.Tensor]", group["params"])]
    for index, kept in cast("Mapping[Any, Any]", state).items():
        if not isinstance(index, int) or not 0 <= index < len(parameters) or not isinstance(kept, Mapping):
            raise StateError(f"the checkpoint's optimizer remembers something for parameter {index!r}")
        for name, value in cast("Mapping[str, object]", kept).items():
            expected = parameters[index].shape
            if isinstance(value, torch.Tensor) and name in _PER_ENTRY and value.shape != expected:
                raise StateError(
                    f"the checkpoint's optimizer has a {name!r} of shape {tuple(value.shape)} for a "
                    f"parameter of shape {tuple(expected)}"
                )


def _length(group: object) -> int:
    return len(cast("Mapping[str, Any]", group).get("params", ())) if isinstance(group, Mapping) else -1


_PER_ENTRY = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "sum")


def _check_meeting(session: PeriodicSession, given: object) -> None:
    wrong = StateError("the checkpoint has a meeting under way that does not fit this session")
    if not isinstance(given, Mapping):
        raise wrong
    found = cast("Mapping[str, Any]", given)
    if set(found) != {"step", "number", "due", "fragments", "changes", "buffers"}:
        raise wrong
    listed = _list(found["fragments"], "fragments")
    if not all(isinstance(n, int) and 0 <= n < len(session.fragments) for n in listed):
        raise wrong
    numbers = cast("list[int]", listed)
    if not all(isinstance(found[key], int) and found[key] >= 0 for key in ("step", "number", "due")):
        raise wrong
    blocks = [block for number in numbers for block in session.fragments[number].blocks]
    changes = _list(found["changes"], "changes")
    if len(changes) != len(blocks):
        raise wrong
    for block, change in zip(blocks, changes, strict=True):
        _check_tensor(change, block.anchor, "meeting under way")
    flat = {name: buffer.reshape(-1) for name, buffer in session.buffers.items()}
    _check_tensors(found["buffers"], flat, "buffers", all_of_them=False)
