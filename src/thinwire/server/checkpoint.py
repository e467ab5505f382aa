"""The server's state in a file: arrays and JSON in an npz, without pickle, replaced in one step."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from thinwire.errors import StateError
from thinwire.server.record import EpochRecord
from thinwire.server.server import Server

FORMAT = 1
_ARRAYS = ("x", "y", "snapshot", "full", "total")
_NUMBERS = ("epoch", "version", "applied", "bits_down", "bits_up")


def path_of(path: str | Path, shard: int, shards: int) -> Path:
    """Every shard has a file of its own."""
    path = Path(path)
    return path if shards == 1 else path.with_name(f"{path.name}.{shard}of{shards}")


def save(server: Server, path: Path) -> None:
    state = server.state
    told = {
        "format": FORMAT,
        "agreement": server.agreement.to_json(),
        "shard": server.shard,
        "summed": state.summed,
        "history": [record.to_json() for record in server.history],
        "numbers": {name: getattr(state, name) for name in _NUMBERS},
    }
    meta = np.frombuffer(json.dumps(told).encode(), np.uint8)
    arrays = {name: getattr(state, name) for name in _ARRAYS}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        np.savez(file, meta=meta, staleness=server.staleness, **cast(Any, arrays))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(server: Server, path: Path) -> None:
    """Put a saved state into a new server; StateError if it does not fit, and nothing is changed."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in (*_ARRAYS, "staleness")}
            told = cast("dict[str, Any]", json.loads(found["meta"].tobytes()))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise StateError(f"{path} is not a checkpoint of a parameter server: {error}") from None
    if told.get("format") != FORMAT:
        raise StateError(f"{path} has format {told.get('format')!r}, this version reads {FORMAT}")
    if told.get("shard") != server.shard:
        raise StateError(f"{path} is of shard {told.get('shard')!r}, this is shard {server.shard}")
    difference = server.agreement.difference(str(told.get("agreement")))
    if difference:
        raise StateError(f"{path} is of another run: {difference.replace('the worker', 'the checkpoint')}")
    numbers = cast("dict[str, Any]", told.get("numbers", {}))
    for name in _NUMBERS:
        value = numbers.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StateError(f"{path}: {name} is {value!r}, which cannot be")
    own = server.state
    for name in _ARRAYS:
        array, expected = arrays[name], getattr(own, name)
        if array.shape != expected.shape or array.dtype != expected.dtype or not np.isfinite(array).all():
            raise StateError(f"{path}: {name} is {array.dtype} of {array.shape}, or not finite")
    if arrays["staleness"].shape != server.staleness.shape or arrays["staleness"].dtype != np.int64:
        raise StateError(f"{path}: the histogram of staleness does not fit")
    try:
        history = [EpochRecord(**record) for record in told["history"]]
    except (KeyError, TypeError):
        raise StateError(f"{path}: the history is damaged") from None
    restored = {name: arrays[name] for name in _ARRAYS}
    state = replace(
        own, **restored, **{name: numbers[name] for name in _NUMBERS}, summed=bool(told["summed"])
    )
    server.restore(state, history, arrays["staleness"])
