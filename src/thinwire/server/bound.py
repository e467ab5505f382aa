"""A bound on the norm of updates: one that is far beyond what is usual is not applied."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

RECENT = 101
FEWEST = 8


class NormBound:
    """Compares each norm with the median of the last `RECENT` ones, `ratio` times which is the bound.

    Norms that exceed the bound count for the median as well. So a lasting change is soon the new normal, and
    the bound holds as long as fewer than half of the updates are bad. Until `FEWEST` updates have come,
    nothing is known and all are accepted. Zeros say nothing and do not count.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def accepts(self, norm: float) -> bool:
        """Whether an update of this norm may be applied; remembers the norm."""
        if norm == 0.0:
            return True
        known = len(self._sorted)
        within = known < FEWEST or norm <= self._ratio * self._sorted[known // 2]
        if known == RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(norm)
        insort(self._sorted, norm)
        return within
