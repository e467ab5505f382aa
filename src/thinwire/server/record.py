"""What a run reports: a record of every epoch, the result, and a line on the terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.net.meter import Meter

if TYPE_CHECKING:
    from thinwire.server.server import Server

Vector = NDArray[Any]
REFRESH_SECONDS = 0.2


@dataclass(frozen=True)
class EpochRecord:
    """A snapshot, or a point of the trace: its objective, and what all sides had sent by then.

    `bits_down` and `bits_up` count codes, scales and float32 vectors; `wire_bytes` everything that the
    server's interface carries. With several shards they are those of this shard.
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
        """Bits both ways."""
        return self.bits_down + self.bits_up


@dataclass
class RunResult:
    """How a run ended, on a server or a worker (which knows neither history nor staleness).

    `history` has the snapshots, `trace` (with `trace_every`) also points within the epochs.
    `rejected` counts, by worker, the updates that were not applied because of their norm.
    """

    parameters: Vector
    history: list[EpochRecord] = field(default_factory=list[EpochRecord])
    staleness: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    updates: int = 0
    dropped: int = 0
    discarded: int = 0
    lost: list[str] = field(default_factory=list[str])
    meter: Meter = field(default_factory=Meter)
    trace: list[EpochRecord] = field(default_factory=list[EpochRecord])
    rejected: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def objective(self) -> float:
        """The last objective, or NaN on a worker."""
        return self.history[-1].objective if self.history else float("nan")


Point = tuple[EpochRecord, Vector]
"""What had been sent at a moment within an epoch, and the parameters then."""


def trace(
    points: Iterable[Point], history: Iterable[EpochRecord], objective: Callable[[Vector], float]
) -> list[EpochRecord]:
    """Snapshots and points within epochs in their order, each with its objective."""
    found = {record.updates: replace(record, objective=objective(x)) for record, x in points}
    found |= {record.updates: record for record in history}
    return [found[updates] for updates in sorted(found)]


class ProgressLine:
    """A line on the terminal, written again some times a second."""

    def __init__(self, server: Server) -> None:
        self._server, self._first, self._begin = server, server.state.version, time.monotonic()
        self._last = 0.0

    def tick(self) -> None:
        """To be called often."""
        if time.monotonic() - self._last >= REFRESH_SECONDS:
            self._last = time.monotonic()
            line = status(self._server, self._begin, self._first)
            sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def status(server: Server, begin: float, before: int = 0) -> str:
    """One line on how the run goes."""
    state, counts = server.state, server.state.staleness
    objective = f"{state.history[-1].objective:.6g}" if state.history else "?"
    seconds, epochs = max(time.monotonic() - begin, 1e-9), server.options.epochs
    done, rate = state.version / (epochs * server.options.epoch_length), (state.version - before) / seconds
    applied = int(counts.sum())
    mean = float(counts @ np.arange(len(counts))) / applied if applied else 0.0
    highest = int(np.flatnonzero(counts)[-1]) if applied else 0
    return (
        f"epoch {state.epoch}/{epochs} ({done:.0%} in {seconds:.0f} s), "
        f"objective {objective}, {rate:,.0f} updates/s, staleness {mean:.1f} (at most {highest}), "
        f"{(state.bits_down + state.bits_up) / 8e6:,.2f} MB, {len(server.peers)} workers"
        + (f", {sum(server.rejected.values())} updates rejected" if server.rejected else "")
    )
