"""A session's state under keys with rank and parameters' names, for a checkpoint that all ranks share.

    {"rank 0 of 2": {"session": (...), "parameter 0.weight": (...), "parameter 0.bias": (...)}}

PyTorch's distributed checkpoint (DCP) merges the states of all ranks by their keys and keeps one value for
each. It takes mappings apart and stores what is in a tuple as one value, whatever its size: so a session that
has not taken a step yet has the same keys as one that has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from thinwire.errors import StateError

_RANK = re.compile(r"rank (\d+) of (\d+)(?: \(group of rank \d+\))?")
REST = "session"
PARAMETER = "parameter "


def key(rank: int, size: int, first: int) -> str:
    """`first` is the group's first rank among all: replicas of shards have a group for each shard."""
    return f"rank {rank} of {size}" + (f" (group of rank {first})" if first else "")


def pack(sealed: Mapping[str, Any], names: Iterable[str], first: int) -> dict[str, Any]:
    """A sealed state by rank and parameter; `names` are all parameters, with entries or without."""
    inside = cast("Mapping[str, Any]", sealed.get("engine", sealed))
    entries = cast("Mapping[str, Any]", inside["state"])
    own = {name: entries.get(name, {}) for name in names}
    rest = {**inside, "state": {name: kept for name, kept in entries.items() if name not in own}}
    if "engine" in sealed:
        rest = {**sealed, "engine": rest}
    parts = {REST: (rest,), **{PARAMETER + name: (kept,) for name, kept in own.items()}}
    return {key(inside["rank"], inside["size"], first): parts}


def template(olds: Iterable[int], size: int, names: Iterable[str], first: int) -> dict[str, Any]:
    """The keys of some ranks of an earlier run, without their values."""
    keys = [REST, *(PARAMETER + name for name in names)]
    return {key(old, size, first): dict.fromkeys(keys, (None,)) for old in olds}


def unpack(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sealed states of the ranks in a packed state; anything else is returned as it is."""
    packed = isinstance(given, Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not packed or not given or not all(_RANK.fullmatch(str(name)) for name in given):
        return [given]
    return [_unpacked(str(rank), parts) for rank, parts in given.items()]


def _unpacked(rank: str, parts: object) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for name, value in cast("Mapping[str, object]", parts if isinstance(parts, Mapping) else {}).items():
        inside = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
        if len(inside) != 1 or not isinstance(inside[0], Mapping):
            raise StateError(f"the checkpoint's {name!r} of {rank} is not as it was saved")
        values[name] = cast("Mapping[str, Any]", inside[0])
    rest = values.pop(REST, None)
    entries = {name.removeprefix(PARAMETER): kept for name, kept in values.items() if kept}
    inside = cast("Mapping[str, Any] | None", rest.get("engine", rest) if rest is not None else None)
    others = inside.get("state") if isinstance(inside, Mapping) else None
    if rest is None or inside is None or not isinstance(others, Mapping):
        raise StateError(f"the checkpoint's state of {rank} has no {REST!r}")
    engine = {**inside, "state": {**cast("Mapping[str, Any]", others), **entries}}
    return {**rest, "engine": engine} if inside is not rest else engine


def ranks_in(checkpoint: str | os.PathLike[str]) -> int:
    """The number of ranks whose states are in a folder of DCP."""
    from torch.distributed.checkpoint import FileSystemReader

    found = {
        int(match[2])
        for name in FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        if (match := _RANK.search(name)) is not None
    }
    if len(found) != 1:
        raise StateError(f"{os.fspath(checkpoint)} has no state of a thinwire session")
    return found.pop()
