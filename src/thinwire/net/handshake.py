"""At attach the ranks compare their settings, so that a difference is found before it does harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.errors import DisagreementError
from thinwire.net import frames
from thinwire.net.secret import FILE_VARIABLE, VARIABLE, Secret, prove_to_all

LONGEST = 2**26
"""Bytes of a description; that of a model with 100,000 parameters has a tenth of it."""
_SECRET = "secret"


def agree(
    descriptor: dict[str, Any], execute: Callable[[frames.Primitive], object], ranks: Sequence[int]
) -> None:
    """Raise `DisagreementError` on every rank if any two ranks differ, naming the ranks and the difference.

    Lengths, then padded JSON text, both by plain all-gather: this must work between ranks whose library
    versions differ, so it uses none of the frames that may change between versions. If this rank has a secret
    (`THINWIRE_SECRET`), all ranks must prove that they know it and said what this rank received.
    """
    secret = Secret.find()
    text = json.dumps(descriptor | {_SECRET: secret is not None}, sort_keys=True).encode()
    if len(text) > LONGEST:
        raise DisagreementError(f"a description of {len(text)} bytes is longer than {LONGEST}")
    length = torch.tensor([len(text)], dtype=torch.int64)
    gathered = _gather(frames.as_bytes(length), execute).view(torch.int64).flatten()
    lengths = cast("list[int]", gathered.tolist())
    for rank, announced in zip(ranks, lengths, strict=True):
        if not 0 < announced <= LONGEST:
            raise DisagreementError(
                f"rank {rank} announces a description of {announced} bytes: not a thinwire session"
            )
    block = torch.zeros(max(lengths), dtype=torch.uint8)
    block[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = _gather(block, execute)
    said = [frames.to_bytes(row[:n]) for row, n in zip(rows, lengths, strict=True)]
    described = [_described(rank, text) for rank, text in zip(ranks, said, strict=True)]
    _check_secrets([one.get(_SECRET) is True for one in described], ranks)
    difference = first_difference(described, ranks)
    if difference:
        raise DisagreementError(f"the ranks disagree on {difference}; set them up alike")
    if secret is not None:
        _prove(secret, said[0], execute, ranks)


def _described(rank: int, text: bytes) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    fits = isinstance(given, dict) and _are_parameters(cast("dict[str, Any]", given).get("parameters", []))
    if not fits:
        raise DisagreementError(f"rank {rank} does not describe a thinwire session")
    return cast("dict[str, Any]", given)


def _are_parameters(given: object) -> bool:
    """Whether these are names, shapes and types."""
    if not isinstance(given, list):
        return False
    for each in cast("list[Any]", given):
        match each:
            case [str(), list(), str()]:
                continue
            case _:
                return False
    return True


def _check_secrets(given: Sequence[bool], ranks: Sequence[int]) -> None:
    if any(given) and not all(given):
        without = ", ".join(str(rank) for rank, has in zip(ranks, given, strict=True) if not has)
        raise DisagreementError(
            f"rank {without} has no secret, and the others have one: set {VARIABLE} or {FILE_VARIABLE} on "
            "all ranks, or on none"
        )


def _prove(
    secret: Secret, content: bytes, execute: Callable[[frames.Primitive], object], ranks: Sequence[int]
) -> None:
    """All ranks prove that they know the secret; who does not is named by its number in the world."""

    def gather(mine: bytes) -> list[bytes]:
        block = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [frames.to_bytes(row) for row in _gather(block, execute)]

    prove_to_all(secret, ranks.index(dist.get_rank()), content, gather, names=ranks)


def _gather(block: torch.Tensor, execute: Callable[[frames.Primitive], object]) -> torch.Tensor:
    return cast(torch.Tensor, execute(frames.AllGather(block, 0)))


def first_difference(described: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str | None:
    """The first difference, and the value of each rank; None if all are equal."""
    keys = sorted({key for one in described for key in one}, key=lambda key: (key == "parameters", key))
    for key in keys:
        values = [one.get(key) for one in described]
        if key == "parameters":
            difference = _parameter_difference(cast("list[list[Any]]", values), ranks)
            if difference:
                return difference
        elif any(value != values[0] for value in values):
            return f"{key}: {by_value([str(value) for value in values], ranks)}"
    return None


def _parameter_difference(lists: Sequence[list[Any]], ranks: Sequence[int]) -> str | None:
    for position in range(max(len(one) for one in lists)):
        entries = [one[position] if position < len(one) else None for one in lists]
        if any(entry != entries[0] for entry in entries):
            texts = [
                f"{entry[0]} of shape {tuple(entry[1])}, {entry[2]}" if entry else "no such parameter"
                for entry in entries
            ]
            return f"parameter number {position}: {by_value(texts, ranks)}"
    return None


def by_value(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """ "rank 0, 2: a; rank 1: b" """
    holders: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        holders.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in holders.items())
