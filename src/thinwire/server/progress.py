"""The bar on rank 0: epoch, objective, updates a second, staleness, bits so far."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from thinwire.server.server import Server

REFRESH_SECONDS = 0.2


@contextmanager
def bar(server: Server, shown: bool) -> Generator[Callable[[], None] | None, None, None]:
    """Gives a function to be called often; None if nothing is to be shown."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    begin, before = time.monotonic(), server.state.version
    last = 0.0
    with Progress(*columns, console=console, transient=True, refresh_per_second=5) as progress:
        task = progress.add_task("waiting", total=server.options.epochs * server.options.epoch_length)

        def tick() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < REFRESH_SECONDS:
                return
            last = now
            progress.update(task, description=describe(server, begin, before), completed=server.state.version)

        yield tick


def describe(server: Server, begin: float, before: int = 0) -> str:
    """One line on how the run goes."""
    state, counts = server.state, server.staleness
    objective = f"{server.history[-1].objective:.6g}" if server.history else "?"
    rate = (state.version - before) / max(time.monotonic() - begin, 1e-9)
    applied = int(counts.sum())
    mean = float(counts @ np.arange(len(counts))) / applied if applied else 0.0
    highest = int(np.flatnonzero(counts)[-1]) if applied else 0
    bits = state.bits_down + state.bits_up
    return (
        f"epoch {state.epoch}/{server.options.epochs}, objective {objective}, {rate:,.0f} updates/s, "
        f"staleness {mean:.1f} (at most {highest}), {bits / 8e6:,.2f} MB, {len(server.peers)} workers"
    )
