"""How long the steps of a training loop take, by the begin of their forward passes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


class LoopClock:
    """The typical step of this rank since the last `restart`, with everything the loop does.

    A step that takes much longer than the others, such as one with an evaluation, hardly counts: steps are
    averaged over a cycle of the method, and the median of all cycles is taken.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stepped: float | None = None
        self._outside: list[float] = []
        self.restart(0)

    def restart(self, steps: int, cycle: int = 1) -> None:
        """Forget everything; so many steps have been taken, and the method takes turns in a cycle."""
        self._cycle = max(1, cycle)
        self._first = self._last = steps
        self._begun: float | None = None
        self._times: list[float] = []

    def begins(self, steps: int) -> int:
        """A forward pass begins after so many steps. Returns their number since the restart."""
        now = self._clock()
        if self._stepped is not None:
            self._outside.append(now - self._stepped)
            self._stepped = None
        if steps == self._last and self._begun is not None:
            return steps - self._first  # a further forward pass of the same step
        if self._begun is not None and steps == self._last + 1:
            self._times.append(now - self._begun)
        self._last, self._begun = steps, now
        return steps - self._first

    def stepped(self) -> None:
        """The optimizer has taken a step."""
        self._stepped = self._clock()

    def typical(self) -> float:
        """Seconds of a step; 0 if not even a cycle was seen."""
        whole = len(self._times) // self._cycle
        cycles = [self._times[n * self._cycle : (n + 1) * self._cycle] for n in range(whole)]
        return statistics.median(map(statistics.fmean, cycles)) if cycles else 0.0

    def outside(self) -> float:
        """Seconds from an optimizer step to the next forward pass: loading data, logging. 0 if unknown."""
        return statistics.median(self._outside) if self._outside else 0.0
