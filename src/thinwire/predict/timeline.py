"""The timeline of a step: threads that compute, lanes that compress, and the link they share.

Nothing is measured here. Threads are generators of segments. Processor and link are shared evenly between
the threads that want them at the same time, and time advances to the next segment that ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.net.costs import TCP_FRAMING, Link
from thinwire.predict.mirror import Job, Round

LANES = 2
Driver = Literal["lanes", "direct", "blocking"]
Want = Literal["cpu", "link", "delay"]


@dataclass(frozen=True)
class Compute:
    """Seconds of a step without communication; communication can overlap with the backward pass."""

    forward: float
    backward: float
    rest: float = 0.0

    @staticmethod
    def of(seconds: float) -> Compute:
        """One third forward and two thirds backward, as for matrix products."""
        return Compute(seconds / 3, 2 * seconds / 3)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.rest


@dataclass
class _Segment:
    want: Want
    amount: float


_Thread = Generator[_Segment | Callable[[], bool], None, None]


def step_seconds(
    jobs: Sequence[Job],
    shares: Sequence[float],
    compute: Compute,
    link: Link,
    driver: Driver,
    cores: float = math.inf,
) -> float:
    """The end of a step that begins at 0.

    Args:
        jobs: in the order of the buckets.
        shares: the part of the backward pass that ends with each job's gradients being ready.
        driver: "lanes" (job i in lane i mod 2), "direct" (the hook does the work before the only operation),
            or "blocking" (one job after the other, after the backward pass, in its thread).
        cores: the number of threads of a worker that run at full speed at the same time.
    """
    return _Step(jobs, shares, compute, link, driver).run(cores)


class _Step:
    def __init__(
        self, jobs: Sequence[Job], shares: Sequence[float], compute: Compute, link: Link, driver: Driver
    ) -> None:
        self.jobs = jobs
        self.shares = shares
        self.compute = compute
        self.link = link
        self.ready = [False] * len(jobs)
        self.communicated = [False] * len(jobs)
        self.done = [False] * len(jobs)
        match driver:
            case "lanes":
                lanes = [self._lane(range(first, len(jobs), LANES)) for first in range(LANES)]
                self.threads = [self._main(), *lanes]
            case "direct":
                self.threads = [self._main(hook=True), *(self._background(i) for i in range(len(jobs)))]
            case "blocking":
                self.threads = [self._main(after=True)]

    def _main(self, *, hook: bool = False, after: bool = False) -> _Thread:
        yield _Segment("cpu", self.compute.forward)
        for number, share in enumerate(self.shares):
            yield _Segment("cpu", self.compute.backward * share)
            if hook and self.jobs[number].rounds:
                yield _Segment("cpu", self.jobs[number].rounds[0].work)
            self.ready[number] = True
        if after:
            yield from self._lane(range(len(self.jobs)))
        yield lambda: all(self.done)
        yield _Segment("cpu", self.compute.rest)

    def _lane(self, numbers: range) -> _Thread:
        """First the rounds of all jobs, then what they do once the step is committed."""
        for number in numbers:
            job = self.jobs[number]
            yield lambda number=number: self.ready[number]
            for each in job.rounds:
                yield _Segment("cpu", each.work)
                yield from self._operation(each)
            yield _Segment("cpu", job.closing)
            self.communicated[number] = True
            self.done[number] = not job.commits
        for number in numbers:
            if self.jobs[number].commits:
                yield lambda: all(self.communicated)
                yield _Segment("cpu", self.jobs[number].finish)
                self.done[number] = True

    def _background(self, number: int) -> _Thread:
        yield lambda: self.ready[number]
        for each in self.jobs[number].rounds:
            yield from self._operation(each)
        yield _Segment("cpu", self.jobs[number].closing + self.jobs[number].finish)
        self.done[number] = self.communicated[number] = True

    def _operation(self, each: Round) -> _Thread:
        yield _Segment("delay", each.hops * self.link.latency)
        yield _Segment("link", transfer_seconds(each, self.link))

    def run(self, cores: float) -> float:
        clock = 0.0
        doing: dict[int, _Segment] = {}
        waiting: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(self.threads)), _at_once)
        while True:
            self._wake(waiting, doing)
            if not doing:
                if waiting:
                    raise AssertionError("the threads of a step wait for each other")
                return clock
            rates = _rates(doing, cores)
            passed = min(segment.amount / rates[number] for number, segment in doing.items())
            clock += passed
            for number, segment in list(doing.items()):
                segment.amount -= passed * rates[number]
                if segment.amount <= 1e-12:
                    del doing[number]
                    waiting[number] = _at_once

    def _wake(self, waiting: dict[int, Callable[[], bool]], doing: dict[int, _Segment]) -> None:
        """Advance all threads that can run, until none can: one may wait for another."""
        while ready := [number for number, condition in waiting.items() if condition()]:
            for number in ready:
                del waiting[number]
                following = next(self.threads[number], None)
                if isinstance(following, _Segment):
                    doing[number] = following
                elif following is not None:
                    waiting[number] = following


def transfer_seconds(each: Round, link: Link) -> float:
    """How long the operation keeps the line busy, with the headers around every packet."""
    return TCP_FRAMING * link.transfer_seconds(each.cost)


def _rates(doing: dict[int, _Segment], cores: float) -> dict[int, float]:
    wanting = {want: sum(s.want == want for s in doing.values()) for want in ("cpu", "link", "delay")}
    rate = {
        "cpu": min(1.0, cores / max(1, wanting["cpu"])),
        "link": 1.0 / max(1, wanting["link"]),
        "delay": 1.0,
    }
    return {number: rate[segment.want] for number, segment in doing.items()}


def _at_once() -> bool:
    return True
