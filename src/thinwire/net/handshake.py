"""At attach the ranks compare their settings, so that a difference is found before it does harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from thinwire.errors import DisagreementError
from thinwire.net import frames


def agree(
    descriptor: dict[str, Any], execute: Callable[[frames.Primitive], object], ranks: Sequence[int]
) -> None:
    """Raise `DisagreementError` on every rank if any two ranks differ, naming the ranks and the difference.

    Lengths, then padded JSON text, both by plain all-gather: this must work between ranks whose library
    versions differ, so it uses none of the frames that may change between versions.
    """
    text = json.dumps(descriptor, sort_keys=True).encode()
    length = torch.tensor([len(text)], dtype=torch.int64)
    gathered = _gather(frames.as_bytes(length), execute).view(torch.int64).flatten()
    lengths = cast("list[int]", gathered.tolist())
    longest = max(1, *lengths)
    if longest > 2**30:
        raise DisagreementError(f"a rank announces a description of {longest} bytes: not a thinwire session")
    block = torch.zeros(longest, dtype=torch.uint8)
    block[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = _gather(block, execute)
    described: list[dict[str, Any]] = []
    for rank, row, n in zip(ranks, rows, lengths, strict=True):
        try:
            described.append(cast("dict[str, Any]", json.loads(frames.to_bytes(row[:n]))))
        except ValueError:
            raise DisagreementError(f"rank {rank} does not describe a thinwire session") from None
    difference = first_difference(described, ranks)
    if difference:
        raise DisagreementError(f"the ranks disagree on {difference}; set them up alike")


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
