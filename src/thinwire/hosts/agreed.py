"""What the ranks of an automatic session tell each other: their times, and rank 0's decision."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from thinwire.errors import ThinwireError
from thinwire.net import frames
from thinwire.net.rank_info import RankInfo
from thinwire.predict import probe as probing

DECISION_BYTES = 4096
FIELDS = {"method", "reasons", "seconds"}


def slowest(
    mine: Sequence[float], execute: probing.Execute, rank_info: RankInfo, device: torch.device
) -> tuple[float, ...]:
    """The times of the rank whose times add up to most: the others wait for it."""
    table = torch.zeros(rank_info.size, len(mine), dtype=torch.float64, device=device)
    table[rank_info.rank] = torch.tensor(mine, dtype=torch.float64)
    flat = table.view(-1)
    execute(frames.AllReduce(flat, flat.numel() * 8))
    return tuple(cast("list[float]", table[table.sum(1).argmax()].tolist()))


def from_rank_0(told: Mapping[str, Any], execute: probing.Execute, device: torch.device) -> dict[str, Any]:
    """Rank 0's decision on every rank, checked."""
    block = torch.zeros(DECISION_BYTES, dtype=torch.uint8)
    text = json.dumps(told).encode()[:DECISION_BYTES]
    block[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    block = block.to(device)
    execute(frames.Broadcast(block, 0, DECISION_BYTES if told else 0))
    try:
        said = json.loads(frames.to_bytes(block.cpu()).rstrip(b"\0"))
    except ValueError:
        raise ThinwireError("auto: what rank 0 said is not a decision") from None
    if not isinstance(said, dict) or not ("error" in said or set(cast(Any, said)) >= FIELDS):
        raise ThinwireError("auto: what rank 0 said is not a decision")
    return cast("dict[str, Any]", said)
