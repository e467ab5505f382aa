"""Damaged checkpoints: every one is refused with a StateError, and nothing is changed.

    python -m tests.fuzz_checkpoints --count 5000 --seed 0

Each trial takes the state of one method or schedule and damages it in one way: a bit flips in a tensor or in
a number, a field is deleted, renamed, duplicated or replaced, a number becomes NaN, a tensor gets another
shape or type. Half of the trials damage the bytes of a file instead: bit flips, truncation, bytes added or
moved.
"""

from __future__ import annotations

import argparse
import copy
import io
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.averaging import cohort as periodic
from tests.laws import cohort as gradient
from thinwire import StateError
from thinwire.core import schema
from thinwire.sessions import checkpoint_file

SHAPES = {"weight": (12, 7), "conv": (4, 3, 3), "bias": (5,)}
METHODS = gradient.CONFIGURATIONS
SCHEDULES = periodic.CONFIGURATIONS


@cache
def source(method: str) -> tuple[Any, dict[str, Any], bytes]:
    """A session, a good state for it, and the state as a file."""
    if method in SCHEDULES:
        old, new = (periodic.Cohort(method, 2, make=periodic.normed) for _ in range(2))
        old.train(range(5))
    else:
        old, new = (gradient.Cohort(method, 2, SHAPES) for _ in range(2))
        for step in range(3):
            old.average(old.inputs(step))
    state = old.sessions[0].sealed()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state"
        checkpoint_file.write(file, state)
        return new.sessions[0], state, file.read_bytes()


# -- damage to a state ---------------------------------------------------------------------------------------

Place = tuple[Any, Any]
"""A mapping or list, and a key of it."""


def places(value: Any) -> Iterator[Place]:
    keys = list(value) if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def flip(rng: random.Random, value: Any) -> Any:
    """The same with one bit changed."""
    if isinstance(value, torch.Tensor):
        data = value.clone().contiguous()
        octets = data.view(-1).view(torch.uint8)
        octets[rng.randrange(octets.numel())] ^= 1 << rng.randrange(8)
        return data
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value ^ (1 << rng.randrange(31))
    if isinstance(value, float):
        return math.ldexp(value, rng.choice((-1, 1, 64))) if value else 1.0
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + chr(ord(value[at]) ^ (1 << rng.randrange(6))) + value[at + 1 :]
    return "something"


def spoil_number(rng: random.Random, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
        data = value.clone().contiguous()
        data.view(-1)[rng.randrange(data.numel())] = rng.choice((math.nan, math.inf, -math.inf))
        return data
    return math.nan


def reshape(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return [value]
    wide = torch.float64 if value.dtype != torch.float64 else torch.float32
    changes = (
        value.to(wide),
        value.reshape(-1, 1),
        torch.cat([value.reshape(-1)] * 2),
        value.reshape(-1)[:-1],
    )
    return rng.choice([each for each in changes if each.shape != value.shape or each.dtype != value.dtype])


def damage(rng: random.Random, state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    damaged = copy.deepcopy(state)
    holder, key = rng.choice(list(places(damaged)))
    value = holder[key]
    kind = rng.choice(("flip", "delete", "rename", "duplicate", "replace", "number", "shape"))
    if kind in ("flip", "number", "shape"):
        change: Callable[[random.Random, Any], Any] = {
            "flip": flip,
            "number": spoil_number,
            "shape": reshape,
        }[kind]
        if isinstance(value, torch.Tensor) and not value.numel():
            kind, change = "replace", lambda rng, value: torch.zeros(1)
        holder[key] = change(rng, value)
    elif kind == "delete":
        del holder[key]
    elif kind == "replace":
        holder[key] = rng.choice((None, 3, "x", [], {}, torch.zeros(3), object()))
    elif isinstance(holder, list):
        kind = "duplicate"
        holder.insert(key, copy.deepcopy(value))
    else:
        holder[f"{key}x"] = holder.pop(key) if kind == "rename" else copy.deepcopy(value)
    return kind, damaged


def damage_bytes(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    kind = rng.choice(("flip in a file", "truncate", "add", "move"))
    at = rng.randrange(len(data))
    if kind == "flip in a file":
        return kind, data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == "truncate":
        return kind, data[:at]
    if kind == "add":
        return kind, data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    other = rng.randrange(len(data) - 16)
    moved = bytearray(data)
    moved[other : other + 16] = data[at : at + 16].ljust(16, b"\1")
    return kind, bytes(moved)


def same(one: Any, other: Any) -> bool:
    """Whether the damage has changed nothing, as when a string is replaced by an equal one."""
    try:
        sealed = schema.seal(one), schema.seal(other)
    except StateError:
        return False
    return sealed[0]["checksums"] == sealed[1]["checksums"]


# -- trials --------------------------------------------------------------------------------------------------


def trial(seed: int) -> str | None:
    """One damaged checkpoint; the kind of damage, or None if there was none. AssertionError if accepted."""
    rng = random.Random(seed)
    method = rng.choice(METHODS + SCHEDULES)
    session, good, data = source(method)
    before = session.sealed()["checksums"]
    try:
        if rng.random() < 0.5:
            kind, spoiled = damage_bytes(rng, data)
            if spoiled == data:
                return None
            state = checkpoint_file.read(spoiled, "the file")
        else:
            kind, state = damage(rng, good)
            if same(state, good):
                return None
        session.load_state_dict(state)
    except StateError:
        assert session.sealed()["checksums"] == before, f"seed {seed}: {method} was changed ({kind})"
        return kind
    except Exception as error:
        raise AssertionError(f"seed {seed}: {method}, {kind}: {type(error).__name__}: {error}") from error
    raise AssertionError(f"seed {seed}: {method} accepted a damaged checkpoint ({kind})")


def intact(method: str) -> None:
    """The control: undamaged, it is accepted, from a file that torch alone reads as well."""
    session, good, data = source(method)
    before = session.sealed()
    session.load_state_dict(checkpoint_file.read(data, "the file"))
    assert session.sealed()["checksums"] == good["checksums"], method
    buffer = io.BytesIO()
    torch.save(good, buffer)
    buffer.seek(0)
    schema.verify(torch.load(buffer, weights_only=True))
    session.load_state_dict(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("LOCAL_WORLD_SIZE", "2")  # for `hierarchical` with its default options
    for method in METHODS + SCHEDULES:
        intact(method)
    kinds = Counter(trial(seed) for seed in range(arguments.seed, arguments.seed + arguments.count))
    changed = {str(kind): count for kind, count in kinds.items() if kind is not None}
    print(f"{sum(changed.values())} damaged checkpoints of {len(METHODS + SCHEDULES)} methods were refused:")
    for kind, count in sorted(changed.items()):
        print(f"  {count:6d} {kind}")
    print(f"  {kinds[None]:6d} trials changed nothing")


if __name__ == "__main__":
    main()
