"""How long local steps and sync rounds take, and how many steps a sync round should overlap with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

NOTICEABLE = 0.02
"""A sync round that takes at most this share of its cycle is waited for."""
MARGIN = 1.25
"""A result is awaited this many times as long as the last one took."""


class Pace:
    """This rank's times. In lock-step nothing is measured, and all times are 0."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._resumed: float | None = None
        self._begun = 0.0
        self._steps: list[float] = []
        self._sync = 0.0

    def step_ends(self) -> None:
        """The optimizer has taken a step."""
        if self._resumed is not None:
            self._steps.append(self._clock() - self._resumed)

    def step_begins(self) -> None:
        """Training goes on, after a sync round or without one."""
        self._resumed = self._clock()

    def sync_begins(self) -> None:
        self._begun = self._clock()

    def sync_ends(self) -> None:
        self._sync = self._clock() - self._begun

    def take(self) -> tuple[int, int]:
        """The mean local step since the last call, and the last sync round, in microseconds; 0: unknown."""
        steps, self._steps = self._steps, []
        mean = sum(steps) / len(steps) if steps else 0.0
        return round(1e6 * mean), round(1e6 * self._sync) if steps else 0


def overlap_for(times: Sequence[tuple[int, int]], period: int) -> int:
    """The overlap for `take()` of all ranks: 0 while sync rounds take hardly any time, or are unknown.

    A rank that comes early also measures how long it waits for the others, so the shortest time of a sync
    round is that of the network. The slowest rank sets the pace of the steps.
    """
    step, sync = max(step for step, _ in times), min(sync for _, sync in times)
    if not step or not sync or sync <= NOTICEABLE * period * step:
        return 0
    return min(period - 1, math.ceil(MARGIN * sync / step))
