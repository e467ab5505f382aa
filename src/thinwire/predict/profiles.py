"""A step of a method on a model: its operations and bytes, and its work as measured here."""

from __future__ import annotations

import logging
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from thinwire.averaging.base import Schedule
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.predict import many
from thinwire.predict.buckets import Shapes
from thinwire.predict.mirror import Job, Round
from thinwire.predict.player import Host, Play, Player
from thinwire.predict.stragglers import slowest
from thinwire.predict.sync_rounds import play_cycle
from thinwire.predict.timeline import (
    NOTHING,
    Compute,
    Cycle,
    Driver,
    Overheads,
    Sites,
    Sync,
    cycle_seconds,
    step_seconds,
    transfer_seconds,
)

# With more workers than this the decoding is not run, but extrapolated from these two, with a part of the
# model: a rank has so much to decode there.
MEASURED_WORKERS = (16, 64)
MEASURED_ENTRIES = 2**19
# And with more than this, operations are extrapolated from these two, with a smaller part.
PLAYED_WORKERS = (128, 512)
# So many hosts with two levels: every rank of theirs takes part in the first round of a sync round.
PLAYED_HOSTS = (32, 128)
PLAYED_ENTRIES = 2**18


class Interval(NamedTuple):
    """A prediction: what is expected, and the range it should be in."""

    low: float
    seconds: float
    high: float


@dataclass(frozen=True)
class ProfileBase(ABC):
    """One method on one model with this many workers."""

    method: str
    workers: int

    @abstractmethod
    def often(self) -> list[tuple[Round, float]]:
        """Every operation, and how often per step it happens."""

    @property
    @abstractmethod
    def compression_seconds(self) -> float:
        """A rank's own work in a step: coding, and decoding the payloads of all ranks."""

    @property
    @abstractmethod
    def steps_between_waits(self) -> int:
        """After how many steps all workers wait for the slowest one."""

    @abstractmethod
    def seconds_at(self, sites: Sites, compute: Compute, cores: float) -> float:
        """How long a training step takes on these links, overlapped as the driver does it."""

    @abstractmethod
    def slower(self) -> ProfileBase:
        """The same with the work as long as it usually is, not as the shortest measured one."""

    @abstractmethod
    def quieter(self) -> ProfileBase:
        """The same with as little to send as the method ever has."""

    def computing_seconds(self, compute: Compute | float, *, deviation: float = 0.0) -> float:
        """A step without any communication; with a deviation of step times all wait for the slowest."""
        return _parts(compute).seconds * slowest(self.workers, deviation, self.steps_between_waits).usual

    def _outside(self) -> list[tuple[Round, float]]:
        return [(each, often) for each, often in self.often() if not each.inside]

    @property
    def sent_bytes(self) -> float:
        """Bytes per step that the busiest rank sends to other hosts."""
        return sum(r.sent * often for r, often in self._outside())

    @property
    def received_bytes(self) -> float:
        return sum(r.received * often for r, often in self._outside())

    @property
    def payload_bytes(self) -> float:
        """The payload of a rank per step, frames included."""
        return sum(r.payload * often for r, often in self._outside())

    @property
    def inside_bytes(self) -> float:
        """Bytes per step that the busiest rank sends inside its host."""
        return sum(r.sent * often for r, often in self.often() if r.inside)

    @property
    def rounds(self) -> float:
        return sum(often for _, often in self._outside())

    @property
    def hops(self) -> float:
        """Messages that wait for each other."""
        return sum(r.hops * often for r, often in self._outside())

    def link_seconds(self, link: Link) -> float:
        """All operations one after the other, nothing overlapped."""
        return sum((r.hops * link.latency + transfer_seconds(r, link)) * o for r, o in self._outside())

    def step_seconds(
        self,
        where: Link | Sites,
        compute: Compute | float = 0.0,
        *,
        cores: float = math.inf,
        overheads: Overheads = NOTHING,
    ) -> float:
        """How long a training step takes on this link, with the operations of the profile's own.

        Args:
            where: the link of every worker, or all links with what operations cost besides.
            compute: seconds of a step without communication, or its parts.
            cores: the number of threads of a worker that run at full speed at the same time.
            overheads: what operations cost besides the link; for a link only.
        """
        sites = Sites(where, overheads) if isinstance(where, Link) else where
        return self.seconds_at(sites, _parts(compute), cores)

    def interval(
        self,
        where: Link | Sites,
        compute: Compute | float = 0.0,
        *,
        cores: float = math.inf,
        overheads: Overheads = NOTHING,
        deviation: float = 0.0,
    ) -> Interval:
        """The prediction, and a range around it.

        At least: operations never wait for a core, and a lazy method sends nothing. At most: work takes as
        long as its median turn did, all operations wait for a core, and messages are as late as jitter
        allows. With a `deviation` of the workers' step times (its share of the mean), all wait for the
        slowest worker: see `stragglers`.
        """
        sites = Sites(where, overheads) if isinstance(where, Link) else where
        parts = _parts(compute)
        factors = slowest(self.workers, deviation, self.steps_between_waits)
        seconds = self.seconds_at(sites, parts.times(factors.usual), cores)
        low = self.quieter().seconds_at(_at_best(sites), parts.times(factors.low), cores)
        high = self.slower().seconds_at(_at_worst(sites), parts.times(factors.high), cores)
        return Interval(min(low, seconds), seconds, max(high, seconds))


def _parts(compute: Compute | float) -> Compute:
    return Compute.of(compute) if isinstance(compute, int | float) else compute


def _at_best(sites: Sites) -> Sites:
    over = sites.overheads
    quiet = replace(over, busy_operation=0.0, busy_hop=0.0)
    return Sites(sites.link, quiet, sites.inside, sites.workers)


def _at_worst(sites: Sites) -> Sites:
    over = sites.overheads
    waits = replace(over, operation=over.operation + over.busy_operation, busy_operation=0.0, busy_hop=0.0)

    def late(link: Link) -> Link:
        return Link(link.latency + link.jitter + over.busy_hop, link.bandwidth, link.down)

    return Sites(late(sites.link), waits, None if sites.inside is None else late(sites.inside))


@dataclass(frozen=True)
class Profile(ProfileBase):
    """One method on one model with this many workers.

    Attributes:
        steps: the jobs of a step; of two steps, if a method alternates.
        shares: the part of the backward pass that each job has to wait for after the one before.
        driver: what runs the jobs; a method with a delay has one of its own.
        reconciliation: the mean of drifting replicas, every `reconcile_every` steps.
        data_dependent: whether the bytes depend on the gradients; these are for the ones given, normally
            distributed ones by default.
        quiet: the jobs of a step in which a lazy method has nothing new to send.
        spread: the median measured work in terms of the shortest, which is in the jobs.
        copying: seconds of the training loop's own work in a step, for a method with a delay.
    """

    steps: tuple[tuple[Job, ...], ...]
    shares: tuple[float, ...]
    driver: Driver
    reconciliation: Job | None = None
    reconcile_every: int | None = None
    data_dependent: bool = False
    quiet: tuple[Job, ...] | None = None
    spread: float = 1.0
    copying: float = 0.0

    def often(self) -> list[tuple[Round, float]]:
        found = [(r, 1 / len(self.steps)) for jobs in self.steps for job in jobs for r in job.rounds]
        if self.reconciliation is not None and self.reconcile_every is not None:
            found += [(r, 1 / self.reconcile_every) for r in self.reconciliation.rounds]
        return found

    @property
    def compression_seconds(self) -> float:
        """A rank's own work in a step: coding, and decoding the payloads of all ranks."""
        total = self.copying + sum(job.work for jobs in self.steps for job in jobs) / len(self.steps)
        if self.reconciliation is not None and self.reconcile_every is not None:
            total += self.reconciliation.work / self.reconcile_every
        return total

    @property
    def steps_between_waits(self) -> int:
        return 1

    def seconds_at(self, sites: Sites, compute: Compute, cores: float) -> float:
        if self.copying:
            compute = replace(compute, rest=compute.rest + self.copying)
        each = [step_seconds(j, self.shares, compute, sites, self.driver, cores) for j in self.steps]
        total = statistics.fmean(each)
        if self.reconciliation is not None and self.reconcile_every is not None:
            alone = Compute(0.0, 0.0)
            extra = step_seconds((self.reconciliation,), (1.0,), alone, sites, "blocking", cores)
            total += extra / self.reconcile_every
        return total

    def slower(self) -> Profile:
        return self.scaled(self.spread)

    def quieter(self) -> Profile:
        return self if self.quiet is None else replace(self, steps=(self.quiet,))

    def scaled(self, factor: float) -> Profile:
        """The same operations with all work `factor` times as long."""
        steps = tuple(tuple(one.scaled(factor) for one in jobs) for jobs in self.steps)
        apart = self.reconciliation
        return replace(
            self,
            steps=steps,
            reconciliation=None if apart is None else apart.scaled(factor),
            copying=factor * self.copying,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Profile:
        """The profile that `to_json` wrote, also after reading it from a file."""
        made = dict(record)
        made["steps"] = tuple(tuple(_job(job) for job in jobs) for jobs in record["steps"])
        made["shares"] = tuple(record["shares"])
        if record["reconciliation"] is not None:
            made["reconciliation"] = _job(record["reconciliation"])
        if record["quiet"] is not None:
            made["quiet"] = tuple(_job(job) for job in record["quiet"])
        return Profile(**made)


@dataclass(frozen=True)
class PeriodicProfile(ProfileBase):
    """A method that averages parameters from time to time.

    Attributes:
        cycle: when sync rounds begin, and when their results are applied.
        syncs: the sync round of each fragment.
        spread: as for `Profile`.
    """

    cycle: Cycle
    syncs: tuple[Sync, ...]
    data_dependent: bool = False
    spread: float = 1.0

    def often(self) -> list[tuple[Round, float]]:
        return [(each, 1 / self.cycle.period) for sync in self.syncs for each in sync.job.rounds]

    @property
    def compression_seconds(self) -> float:
        """A rank's own work per step, on average."""
        return sum(sync.work for sync in self.syncs) / self.cycle.period

    @property
    def steps_between_waits(self) -> int:
        return max(1, self.cycle.period // self.cycle.fragments)

    def seconds_at(self, sites: Sites, compute: Compute, cores: float) -> float:
        return cycle_seconds(self.cycle, self.syncs, compute, sites, cores)

    def slower(self) -> PeriodicProfile:
        return self.scaled(self.spread)

    def scaled(self, factor: float) -> PeriodicProfile:
        """The same operations with all work `factor` times as long."""
        return replace(self, syncs=tuple(sync.scaled(factor) for sync in self.syncs))

    def quieter(self) -> PeriodicProfile:
        return self


def _job(record: Mapping[str, Any]) -> Job:
    made = dict(record)
    made["rounds"] = tuple(Round(**each) for each in record["rounds"])
    return Job(**made)


def profile(
    method: str,
    shapes: Shapes,
    workers: int,
    *,
    host: Host = "ddp",
    link: Link | None = None,
    overlap: bool = True,
    dense_below: int = 1024,
    gradients: Mapping[str, torch.Tensor] | None = None,
    repeats: int = 10,
    bucket_bytes: int | None = None,
) -> Profile:
    """Run the method's own code for one worker among `workers`, and note operations and work.

    Args:
        method: a method string, of a method for gradients.
        shapes: of the parameters, in the model's order.
        workers: from 1 to millions. Above 64 the work is extrapolated from 16 and 64, above 512 the
            operations are from 128 and 512.
        host: "ddp" (buckets, during the backward pass) or "average" (`Session.average`, after it).
        link: by which the cheapest operations are chosen, as a session does; None takes that of
            THINWIRE_LINK, or 1 Gbit/s with 50 us.
        overlap, dense_below: as for `attach`.
        gradients: for methods whose bytes depend on the data; normally distributed ones otherwise.
        repeats: measured steps, of which the shortest counts; fewer if the steps are long.
        bucket_bytes: the limit of DDP's buckets, if it is not the default one.
    """
    if workers < 1:
        raise ConfigError(f"a group has one worker or more, not {workers}")
    with _without_notices():
        player = Player(
            method,
            shapes,
            host=host,
            overlap=overlap,
            dense_below=dense_below,
            gradients=gradients,
            link=link,
            bucket_bytes=bucket_bytes,
        )
        return _profile(player, workers, repeats)


def periodic_profile(
    method: str,
    shapes: Shapes,
    workers: int,
    *,
    link: Link | None = None,
    dense_below: int = 1024,
    repeats: int = 3,
) -> PeriodicProfile:
    """The same for a method that averages parameters: the sync rounds of a cycle."""
    schedule = parse(method)
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"{schedule.name} averages gradients: profile() is for it")
    if workers < 1:
        raise ConfigError(f"a group has one worker or more, not {workers}")

    def played(count: int, times: int, most: int | None = None, grow_work: bool = True) -> PeriodicProfile:
        found = play_cycle(
            schedule,
            shapes,
            count,
            dense_below=dense_below,
            repeats=times,
            link=link,
            most=most,
            grow_work=grow_work,
        )
        cycle = Cycle(schedule.period, schedule.fragment_count, schedule.delay)
        return PeriodicProfile(str(schedule), count, cycle, *found)

    with _without_notices():
        local = _local(schedule.inner)
        if workers <= local * MEASURED_WORKERS[-1]:
            return played(workers, repeats)
        fewer, most = (local * count for count in MEASURED_WORKERS)
        more = played(most, min(repeats, 2), MEASURED_ENTRIES)
        measured, far = [more], list[PeriodicProfile]()
        only_gathers = all(many.gathers_whole(_exchanged(sync)) for sync in more.syncs)
        if only_gathers:  # otherwise larger groups tell how the work grows
            few = played(fewer, min(repeats, 2), MEASURED_ENTRIES)
            measured.insert(0, few)
            pairs = zip(map(_exchanged, few.syncs), map(_exchanged, more.syncs), strict=True)
            only_gathers = all(many.only_gathers(*both) for both in pairs)
        if not only_gathers:
            counts = _played_for(workers, local)
            far = [played(count, 0, PLAYED_ENTRIES, grow_work=False) for count in counts]

        def at(found: Sequence[PeriodicProfile], turn: int) -> list[tuple[int, Job]]:
            return [(each.workers, each.syncs[turn].job) for each in found]

        syncs = tuple(
            replace(sync, job=many.job_for(workers, at(measured, turn), at(far, turn) or None, local))
            for turn, sync in enumerate(more.syncs)
        )
        return replace(more, workers=workers, syncs=syncs)


def _exchanged(sync: Sync) -> Job:
    """Without the first round: there the ranks compare where they are, in a gather however many they are."""
    return replace(sync.job, rounds=sync.job.rounds[1:])


def any_profile(
    method: str,
    shapes: Shapes,
    workers: int,
    *,
    link: Link | None = None,
    host: Host = "ddp",
    bucket_bytes: int | None = None,
) -> Profile | PeriodicProfile:
    """`profile` or `periodic_profile`, as the method needs."""
    if isinstance(parse(method), Schedule):
        return periodic_profile(method, shapes, workers, link=link)
    return profile(method, shapes, workers, link=link, host=host, bucket_bytes=bucket_bytes)


def profiles(
    method: str, shapes: Shapes, counts: Sequence[int], link: Link
) -> dict[int, Profile | PeriodicProfile]:
    """Like `any_profile` under DDP for several numbers of workers, from one step each: quick, rough times.

    The work of that step tells how it is shared out between the rounds, and how it grows with the workers.
    """
    if min(counts, default=1) < 1:
        raise ConfigError(f"a group has one worker or more, not {min(counts)}")
    schedule = parse(method)
    if isinstance(schedule, Schedule):
        return {count: periodic_profile(method, shapes, count, link=link, repeats=1) for count in counts}
    with _without_notices():
        player = Player(method, shapes, host="ddp", overlap=True, dense_below=1024, gradients=None, link=link)
        return {count: _played(player, count, 0) for count in counts}


@contextmanager
def _without_notices() -> Generator[None, None, None]:
    """Sessions that only measure log nothing."""
    log = logging.getLogger("thinwire")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _played_for(workers: int, local: int) -> tuple[int, int]:
    fewer, more = (local * count for count in (PLAYED_WORKERS if local == 1 else PLAYED_HOSTS))
    return (workers // 4, workers) if workers <= more else (fewer, more)


def _local(exchange: object) -> int:
    """The ranks per host of a method with two levels, otherwise 1."""
    return cast(int, getattr(exchange, "local", None) or 1)


def _profile(player: Player, workers: int, repeats: int) -> Profile:
    local = _local(player.exchange)
    if workers <= local * MEASURED_WORKERS[-1]:
        return _played(player, workers, repeats)
    fewer, more = (local * count for count in MEASURED_WORKERS)
    last = player.play(more, min(repeats, 2), MEASURED_ENTRIES)
    measured, far = [(more, last)], list[tuple[int, Play]]()
    only_gathers = all(many.gathers_whole(job) for jobs in last.steps for job in jobs)
    if only_gathers or last.quiet is not None:  # otherwise larger groups tell how the work grows
        few = player.play(fewer, min(repeats, 2), MEASURED_ENTRIES)
        measured.insert(0, (fewer, few))
        pairs = [both for jobs in zip(few.steps, last.steps, strict=True) for both in zip(*jobs, strict=True)]
        only_gathers = all(many.only_gathers(*both) for both in pairs)
    if not only_gathers:
        counts = _played_for(workers, local)
        far = [(count, player.play(count, 0, PLAYED_ENTRIES, grow_work=False)) for count in counts]

    def at(found: Sequence[tuple[int, Play]], turn: int, place: int) -> list[tuple[int, Job]]:
        return [(count, play.steps[turn][place]) for count, play in found]

    steps = tuple(
        tuple(
            many.job_for(workers, at(measured, turn, place), at(far, turn, place) or None, local)
            for place in range(len(jobs))
        )
        for turn, jobs in enumerate(last.steps)
    )
    quiet = None
    if last.quiet is not None:
        known = [[(count, job) for job in play.quiet or ()] for count, play in measured]
        quiet = tuple(many.job_for(workers, both, None, local) for both in zip(*known, strict=True))
    return _made(player, workers, Play(steps, quiet, last.reconcile_every, last.spread))


def _played(player: Player, workers: int, repeats: int) -> Profile:
    return _made(player, workers, player.play(workers, repeats))


def _made(player: Player, workers: int, play: Play) -> Profile:
    every = play.reconcile_every
    return Profile(
        str(player.exchange),
        workers,
        play.steps,
        player.shares,
        player.driver,
        None if every is None else player.reconciliation(workers),
        every,
        player.data_dependent,
        play.quiet,
        play.spread,
        player.copying(),
    )
