"""What a run reports: a record of every epoch, the result, and a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    """A snapshot: its objective, and what all sides had sent by then.

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
        return self.bits_down + self.bits_up


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


@contextmanager
def progress_bar(server: Server, shown: bool) -> Generator[Callable[[], None] | None, None, None]:
    """Gives a function to be called often; None if nothing is to be shown."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begin, before, last = time.monotonic(), server.state.version, 0.0
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as progress:
        task = progress.add_task("waiting", total=server.options.epochs * server.options.epoch_length)

        def tick() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= REFRESH_SECONDS:
                last, version = now, server.state.version
                progress.update(task, description=status(server, begin, before), completed=version)

        yield tick


def status(server: Server, begin: float, before: int = 0) -> str:
    """One line on how the run goes."""
    state, counts = server.state, server.state.staleness
    objective = f"{state.history[-1].objective:.6g}" if state.history else "?"
    rate = (state.version - before) / max(time.monotonic() - begin, 1e-9)
    applied = int(counts.sum())
    mean = float(counts @ np.arange(len(counts))) / applied if applied else 0.0
    highest = int(np.flatnonzero(counts)[-1]) if applied else 0
    return (
        f"epoch {state.epoch}/{server.options.epochs}, objective {objective}, {rate:,.0f} updates/s, "
        f"staleness {mean:.1f} (at most {highest}), {(state.bits_down + state.bits_up) / 8e6:,.2f} MB, "
        f"{len(server.peers)} workers"
    )
