"""What a run leaves behind: its parameters, its history, and how stale the updates were."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.net.meter import Meter

Vector = NDArray[Any]


@dataclass(frozen=True)
class EpochRecord:
    """A snapshot: its objective, and what had been sent by all until it was there.

    `bits_down` and `bits_up` count codes, scales and float32 vectors; `wire_bytes` everything, as the
    server's interface carries it. With several shards they are those of this shard.
    """

    epoch: int
    objective: float
    updates: int
    bits_down: int
    bits_up: int
    wire_bytes: int
    seconds: float

    @property
    def bits(self) -> int:
        return self.bits_down + self.bits_up

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RunResult:
    """How a run ended, on a server or a worker (which knows neither history nor staleness)."""

    parameters: Vector
    history: list[EpochRecord] = field(default_factory=list[EpochRecord])
    staleness: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    updates: int = 0
    dropped: int = 0
    discarded: int = 0
    lost: list[str] = field(default_factory=list[str])
    meter: Meter = field(default_factory=Meter)

    @property
    def objective(self) -> float:
        return self.history[-1].objective if self.history else float("nan")
