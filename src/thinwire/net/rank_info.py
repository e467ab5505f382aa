"""Which rank of a group this is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """A rank and the size of its group."""

    rank: int
    size: int
