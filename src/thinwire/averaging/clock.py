"""Which fragments are synchronised after which step: a pure function of the steps, so equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.averaging.base import Schedule

COUNTERS = ("step", "start", "cycle", "synced")


class Clock:
    """Counts optimizer steps.

    A cycle of P steps synchronises N fragments after the steps ceil((i + 1) P / N), i < N: the last one at
    the end. During the warm-up a cycle is one step. `synced` is the last step after which the whole replicas
    were equal.
    """

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self._schedule = schedule
        self._seed = seed
        self.step = 0
        self.start = 0
        self.cycle = 0
        self.synced = 0
        self.synced_before = 0
        """What `synced` was before the last tick or restart."""

    @property
    def warming_up(self) -> bool:
        return self.start < self._schedule.warmup

    @property
    def steps(self) -> int:
        """The length of the current cycle."""
        return 1 if self.warming_up else self._schedule.period

    @property
    def delay(self) -> int:
        """The number of steps after which a result of this cycle is applied."""
        return 0 if self.warming_up else self._schedule.delay

    @property
    def all_synced(self) -> bool:
        """Whether the whole replicas are equal at this moment."""
        return self.synced == self.step

    def tick(self) -> tuple[list[int], int, bool]:
        """Count a step. Returns the fragments to synchronise now, their delay, and whether the cycle ends."""
        self.synced_before = self.synced
        self.step += 1
        offset, steps, delay = self.step - self.start, self.steps, self.delay
        count = self._schedule.fragment_count
        order = self._schedule.fragment_order(self.cycle, self._seed)
        due = [fragment for i, fragment in enumerate(order) if -(-(i + 1) * steps // count) == offset]
        if len(due) == count and delay == 0:
            self.synced = self.step
        ends = offset >= steps
        if ends:
            self.cycle += 0 if self.warming_up else 1
            self.start = self.step
        return due, delay, ends

    def restart(self) -> None:
        """All fragments are synchronised: a new cycle begins here."""
        self.synced_before = self.synced
        self.start = self.synced = self.step

    def save(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTERS}

    def load(self, saved: Mapping[str, int]) -> None:
        for name in COUNTERS:
            setattr(self, name, int(saved[name]))
