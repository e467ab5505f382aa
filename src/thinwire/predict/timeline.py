"""The timeline of a step: threads that compute, lanes that compress, and the link they share.

Nothing is measured here. Threads are generators of segments. Processor and link are shared fairly between
the threads that want them at the same time, and time advances to the next segment that ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from thinwire.net import frames
from thinwire.net.costs import TCP_FRAMING, Link
from thinwire.predict.mirror import Job, Round
from thinwire.predict.stragglers import largest

LANES = 2
# Cycles of a periodic method: the first begins with nothing under way and does not count.
CYCLES = 3
# Steps of a method with a delay: of the first two, nothing or little is under way, and they do not count.
DELAYED_STEPS = 6
# At least this part of an operation's time is not its processor time: several threads may work at once.
IDLE = 0.1
Driver = Literal["lanes", "direct", "blocking", "delayed"]
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

    def times(self, factor: float) -> Compute:
        return Compute(factor * self.forward, factor * self.backward, factor * self.rest)


@dataclass(frozen=True)
class Overheads:
    """What an operation costs a worker besides the latency and the bytes of the link.

    Attributes:
        operation: seconds of an operation, besides its hops: calls, threads that wake each other.
        busy_operation: further seconds while the worker computes beside it: it waits for a core.
        busy_hop: the same for each hop.
        byte: processor seconds per byte that is sent or received.
        work: processor seconds of an operation, which are part of its time.
        sum_work: the same for a sum, which gloo takes in several stages.
    """

    operation: float = 0.0
    busy_operation: float = 0.0
    busy_hop: float = 0.0
    byte: float = 0.0
    work: float = 0.0
    sum_work: float = 0.0

    def times(self, factor: float) -> Overheads:
        return Overheads(*(factor * value for value in astuple(self)))

    def work_of(self, each: Round) -> float:
        return self.sum_work if each.operation == frames.AllReduce.name else self.work


NOTHING = Overheads()
USUAL = Overheads(operation=2e-4, busy_operation=5e-4, busy_hop=2e-4, byte=5e-10)
"""For machines that were not measured: about what gloo takes between two Linux hosts with a core to spare."""


@dataclass(frozen=True)
class Sites:
    """Where operations run.

    Attributes:
        link: of every worker.
        overheads: what operations cost besides.
        inside: the link inside a host; without one, operations inside a host take no time.
        workers: how many may get their messages late, if the link has jitter.
    """

    link: Link
    overheads: Overheads = NOTHING
    inside: Link | None = None
    workers: int = 1

    def of(self, each: Round) -> Link | None:
        return self.inside if each.inside else self.link


@dataclass
class _Segment:
    want: Want
    amount: float
    share: float = 1.0
    """Of a core, while it runs at full speed."""
    busy: float = 1.0
    """How many times as long it takes while all cores are busy."""


_Thread = Generator[_Segment | Callable[[], bool], None, None]


def step_seconds(
    jobs: Sequence[Job],
    shares: Sequence[float],
    compute: Compute,
    where: Link | Sites,
    driver: Driver,
    cores: float = math.inf,
) -> float:
    """The end of a step that begins at 0.

    Args:
        jobs: in the order of the buckets.
        shares: the part of the backward pass that ends with each job's gradients being ready.
        where: the links, and what operations cost besides.
        driver: "lanes" (job i in lane i mod 2), "direct" (the hook does the work before the only operation),
            "blocking" (one job after the other, after the backward pass, in its thread), or "delayed" (in a
            lane beside the next step, whose optimizer waits for them; the mean of several steps).
        cores: the number of threads of a worker that run at full speed at the same time.
    """
    sites = Sites(where) if isinstance(where, Link) else where
    if driver == "delayed":
        return _Delayed(jobs, compute, sites).run_steps(cores)
    return _Step(jobs, shares, compute, sites, driver).run(cores)


@dataclass(frozen=True)
class Cycle:
    """How a periodic method takes turns: `fragments` sync rounds in `period` steps, applied `delay` later."""

    period: int
    fragments: int
    delay: int


@dataclass(frozen=True)
class Sync:
    """The sync round of one fragment.

    Attributes:
        job: what it exchanges; in a thread of its own if its result is applied later.
        before: seconds of work to begin it.
        after: seconds of work to apply its result later.
    """

    job: Job
    before: float
    after: float

    @property
    def work(self) -> float:
        return self.before + self.job.work + self.after

    def scaled(self, factor: float) -> Sync:
        """The same operations with all work `factor` times as long."""
        return Sync(self.job.scaled(factor), factor * self.before, factor * self.after)


def cycle_seconds(cycle: Cycle, syncs: Sequence[Sync], compute: Compute, sites: Sites, cores: float) -> float:
    """Seconds per step of periodic averaging, once the first cycle is over.

    Args:
        cycle: when sync rounds begin and end.
        syncs: one for each fragment, in the order of a cycle.
        compute: one step.
        sites: the links.
        cores: as for `step_seconds`.
    """
    return _Cycles(cycle, syncs, compute, sites).run_cycles(cores)


class _Threads:
    """Threads that share cores and a link, and a clock."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.clock = 0.0
        self.threads: list[_Thread] = []

    def operation(self, each: Round) -> _Thread:
        """An operation: the wait for its messages, then its bytes."""
        link, over = self.sites.of(each), self.sites.overheads
        if link is None:
            return
        working = over.work_of(each)
        if working:
            yield _Segment("cpu", working)
        idle = max(over.operation - working, IDLE * over.operation)
        waits = idle + each.hops * link.latency + self._late(each.hops, link)
        longer = over.busy_operation + each.hops * over.busy_hop
        yield _Segment("delay", waits, busy=1 + longer / waits if waits else 1.0)
        transfer, work = transfer_seconds(each, link), over.byte * (each.sent + each.received)
        amount = max(transfer, work)
        yield _Segment("link", amount, share=work / amount if amount else 0.0)

    def _late(self, hops: int, link: Link) -> float:
        """How much later than usual the last worker gets its last message: the sum of uniform delays."""
        if not link.jitter or self.sites.workers < 2:
            return 0.0
        return link.jitter * min(hops, math.sqrt(hops / 3) * largest(self.sites.workers))

    def run(self, cores: float) -> float:
        doing: dict[int, _Segment] = {}
        waiting: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(self.threads)), _at_once)
        while True:
            self._wake(waiting, doing)
            if not doing:
                if waiting:
                    raise AssertionError("the threads of a step wait for each other")
                return self.clock
            rates = _rates(doing, cores)
            passed = min(segment.amount / rates[number] for number, segment in doing.items())
            self.clock += passed
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


class _Step(_Threads):
    def __init__(
        self,
        jobs: Sequence[Job],
        shares: Sequence[float],
        compute: Compute,
        sites: Sites,
        driver: Literal["lanes", "direct", "blocking"],
    ) -> None:
        super().__init__(sites)
        self.jobs = jobs
        self.shares = shares
        self.compute = compute
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
                yield from self.operation(each)
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
            yield from self.operation(each)
        yield _Segment("cpu", self.jobs[number].closing + self.jobs[number].finish)
        self.done[number] = self.communicated[number] = True


class _Delayed(_Threads):
    """The exchange of a step runs beside the next one, which ends when that exchange has ended."""

    def __init__(self, jobs: Sequence[Job], compute: Compute, sites: Sites) -> None:
        super().__init__(sites)
        self.jobs = jobs
        self.compute = compute
        self.begun = self.ended = 0
        self.marks: list[float] = []
        self.threads = [self._main(), self._lane()]

    def run_steps(self, cores: float) -> float:
        self.run(cores)
        return (self.marks[-1] - self.marks[1]) / (DELAYED_STEPS - 2)

    def _main(self) -> _Thread:
        for number in range(DELAYED_STEPS):
            yield _Segment("cpu", self.compute.forward + self.compute.backward)
            yield lambda number=number: self.ended >= number
            self.begun += 1
            yield _Segment("cpu", self.compute.rest)
            self.marks.append(self.clock)

    def _lane(self) -> _Thread:
        for number in range(DELAYED_STEPS):
            yield lambda number=number: self.begun > number
            for job in self.jobs:
                for each in job.rounds:
                    yield _Segment("cpu", each.work)
                    yield from self.operation(each)
                yield _Segment("cpu", job.closing + job.finish)
            self.ended += 1


class _Cycles(_Threads):
    def __init__(self, cycle: Cycle, syncs: Sequence[Sync], compute: Compute, sites: Sites) -> None:
        super().__init__(sites)
        self.cycle, self.syncs = cycle, syncs
        self.compute = compute
        self.begun = self.ended = 0
        self.marks: list[float] = []
        self.all_begun = CYCLES * cycle.fragments
        self.threads = [self._main(), *([self._lane()] if cycle.delay else [])]

    def run_cycles(self, cores: float) -> float:
        self.run(cores)
        return (self.marks[-1] - self.marks[0]) / (self.cycle.period * (CYCLES - 1))

    def _events(self) -> list[tuple[int, int, int]]:
        """(step, kind, number): results are applied before the next sync round begins, then a cycle ends."""
        period, count, delay = self.cycle.period, self.cycle.fragments, self.cycle.delay
        found: list[tuple[int, int, int]] = []
        for turn in range(CYCLES):
            for i in range(count):
                step, number = turn * period + -(-(i + 1) * period // count), turn * count + i
                found += [(step, 1, number), (step + delay, 0 if delay else 2, number)]
            found.append(((turn + 1) * period, 3, turn))
        return sorted(found)

    def _main(self) -> _Thread:
        at = 0
        for step, kind, number in self._events():
            if step > at:
                yield _Segment("cpu", (step - at) * self.compute.seconds)
                at = step
            if kind == 1:
                yield _Segment("cpu", self._sync(number).before)
                self.begun += 1
                if not self.cycle.delay:
                    yield from self._rounds(number)
            elif kind == 3:
                self.marks.append(self.clock)
            else:
                yield lambda number=number: self.ended > number
                yield _Segment("cpu", self._sync(number).after)

    def _lane(self) -> _Thread:
        for number in range(self.all_begun):
            yield lambda number=number: self.begun > number
            yield from self._rounds(number)

    def _rounds(self, number: int) -> _Thread:
        job = self._sync(number).job
        for each in job.rounds:
            yield _Segment("cpu", each.work)
            yield from self.operation(each)
        yield _Segment("cpu", job.closing + job.finish)
        self.ended += 1

    def _sync(self, number: int) -> Sync:
        return self.syncs[number % len(self.syncs)]


def transfer_seconds(each: Round, link: Link) -> float:
    """How long the operation keeps the line busy, with the headers around every packet."""
    return TCP_FRAMING * link.transfer_seconds(each.cost)


def _rates(doing: dict[int, _Segment], cores: float) -> dict[int, float]:
    """How fast each segment advances: cores are shared out fairly, the link evenly."""
    on_link = max(1, sum(segment.want == "link" for segment in doing.values()))
    asked = {
        number: 1.0 if segment.want == "cpu" else segment.share / on_link
        for number, segment in doing.items()
        if segment.want != "delay"
    }
    given = _fair(asked, cores)
    busy = sum(segment.want == "cpu" for segment in doing.values()) >= cores
    rates: dict[int, float] = {}
    for number, segment in doing.items():
        if segment.want == "delay":
            rates[number] = 1 / segment.busy if busy else 1.0
        elif segment.want == "cpu":
            rates[number] = given[number]
        else:
            limited = given[number] / asked[number] if asked[number] else 1.0
            rates[number] = min(1.0, limited) / on_link
    return rates


def _fair(asked: dict[int, float], cores: float) -> dict[int, float]:
    """What each gets of so many cores: who asks for little gets it, the others share the rest evenly."""
    given: dict[int, float] = {}
    left = cores
    for place, (number, share) in enumerate(sorted(asked.items(), key=lambda each: each[1])):
        given[number] = min(share, left / (len(asked) - place))
        left -= given[number]
    return given


def _at_once() -> bool:
    return True
