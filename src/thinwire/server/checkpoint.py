"""The server's state in a safetensors file: arrays as tensors, all else as JSON in the metadata."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from thinwire.core import schema
from thinwire.errors import ConfigError, StateError
from thinwire.server.record import EpochRecord
from thinwire.server.server import Server, ServerState

FORMAT = 2
ARRAYS = ("x", "y", "snapshot", "full", "total", "staleness")
COUNTS = ("epoch", "version", "applied", "bits_down", "bits_up")


def require() -> None:
    """A clear error, before any work, if files cannot be written."""
    if find_spec("safetensors") is None:
        raise ConfigError(
            "checkpoints of the parameter server need safetensors: pip install 'thinwire[server]'"
        )


def path_of(path: str | Path, shard: int, shards: int) -> Path:
    """Every shard has a file of its own."""
    path = Path(path)
    return path if shards == 1 else path.with_name(f"{path.name}.{shard}of{shards}")


def save(server: Server, path: Path) -> None:
    """Write the state. The file is replaced in one step, so it is never half written."""
    from safetensors.numpy import save as to_safetensors

    state = server.state
    arrays = {name: np.ascontiguousarray(getattr(state, name)) for name in ARRAYS}
    about: dict[str, object] = {
        "format": FORMAT,
        "shard": server.shard,
        "agreement": server.agreement.to_json(),
        "checksum": _checksum(arrays),
        "summed": state.summed,
        "history": [asdict(record) for record in state.history],
        **{name: getattr(state, name) for name in COUNTS},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(to_safetensors(arrays, {name: json.dumps(value) for name, value in about.items()}))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(server: Server, path: Path) -> None:
    """Put a saved state into a new server once all of it is checked; StateError names what does not fit."""
    import safetensors

    found: dict[str, Any] = {}
    try:
        with cast(Any, safetensors.safe_open)(path, framework="pt") as file:
            for name, text in cast("dict[str, str]", file.metadata() or {}).items():
                found[name] = json.loads(text)
            for name in cast("list[str]", file.keys()):
                found[name] = file.get_tensor(name).clone()
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise StateError(f"{path} is not a checkpoint of a parameter server: {error}") from None
    schema.check(_schema(server), found, str(path))
    arrays = {name: found[name].numpy() for name in ARRAYS}
    if found["epoch"] > server.options.epochs:
        raise StateError(
            f"{path} is of epoch {found['epoch']}, and this run has {server.options.epochs} epochs: "
            "set epochs higher"
        )
    if found["checksum"] != _checksum(arrays):
        raise StateError(f"{path} is damaged: the checksum of its tensors does not fit")
    history = [EpochRecord(**record) for record in found["history"]]
    counts = {name: found[name] for name in COUNTS}
    server.restore(ServerState(**arrays, **counts, summed=found["summed"], history=history))


def _checksum(arrays: Mapping[str, Any]) -> int:
    total = 0
    for name in ARRAYS:
        total = zlib.crc32(arrays[name].data, total)
    return total


def _schema(server: Server) -> schema.Schema:
    def agreement(value: object, what: str) -> None:
        # A run may be continued for more epochs than it was begun with.
        difference = server.agreement.difference(str(value), "the checkpoint", apart_from=("epochs",))
        if difference:
            raise StateError(f"{what} is of another run: {difference}")

    arrays = {name: _finite(getattr(server.state, name)) for name in ARRAYS}
    counts = dict.fromkeys(COUNTS, schema.whole())
    record = dict.fromkeys((f.name for f in fields(EpochRecord)), schema.whole())
    record |= {"objective": _number, "seconds": _number}
    return {
        "format": schema.version(FORMAT),
        "shard": schema.equal(server.shard),
        "agreement": agreement,
        "checksum": schema.whole(),
        **arrays,
        **counts,
        "summed": _boolean,
        "history": schema.listing(schema.record(record)),
    }


def _finite(like: Any) -> schema.Check:
    def fits(value: object, what: str) -> None:
        schema.tensor(torch.from_numpy(like))(value, what)
        if not bool(torch.isfinite(cast(torch.Tensor, value)).all()):
            raise StateError(f"{what} has entries that are not finite")

    return fits


def _number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StateError(f"{what} is {value!r}, not a number")


def _boolean(value: object, what: str) -> None:
    if not isinstance(value, bool):
        raise StateError(f"{what} is {value!r}, not true or false")
