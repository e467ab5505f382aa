"""Plays one worker's step of a method on a model, with made-up gradients, and times its work.

Large models are not played whole. Buckets with equal tensors are played once; of a large bucket whose tensors
are all alike only a few are played. If a method works on the whole model at once, its first layers are
played. The rest is scaled from these by the number of entries.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from thinwire.core.channel import Program
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Slot
from thinwire.core.routing import View, plan
from thinwire.errors import ConfigError, PayloadError
from thinwire.methods.registry import parse_exchange
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo
from thinwire.predict import many
from thinwire.predict.buckets import Shapes, ddp_buckets
from thinwire.predict.mirror import (
    Blocks,
    ElsewhereError,
    Job,
    Mirror,
    Recorded,
    UnknownBlockError,
    grown,
)
from thinwire.predict.timeline import Driver
from thinwire.sessions.gradient import Session
from thinwire.sessions.preparation import prepare_for

Host = Literal["ddp", "average"]

# Late enough for every warm-up to be over; two of them, for methods that alternate.
STEPS = (1_000_000, 1_000_001)
SHIFT = 7_919
LARGEST_MODEL = 300_000_000
# Of more entries than this only a part is played, if it can stand for the rest: 8 MB do not fit into a cache.
SAMPLE = 2**21
# For methods that work on the whole model at once: their temporary tensors are so long that the system clears
# new memory for each of them, and those of the sample have to be as well.
WHOLE_SAMPLE = 5 * 2**20
SMALL_SAMPLE = 2**14
# With more workers than this, reconciling replicas is not played, but extrapolated from these two.
RECONCILED_WORKERS = (16, 64)
# Random entries; longer buckets repeat them.
NOISE = 2**23
# After this many seconds no further turn is measured: long turns vary little.
LONG_ENOUGH = 0.1
# Among so many workers a turn is mostly decoding, which takes as long without a residual as with one.
LARGE_GROUP = 64
COPIES = 5
# By how much the lengths of two steps may differ if a method does not alternate; more if data decides them.
SAME, VARYING = 0.01, 0.05


@dataclass(frozen=True)
class Sample:
    """The part of a model that is played.

    Attributes:
        buckets: names; each bucket is a program, or all together are one.
        jobs: for each job of a step, which program stands for it, and how many times as large the job is.
    """

    buckets: list[list[str]]
    jobs: list[tuple[int, float]]


class Play(NamedTuple):
    """What `Player.play` found.

    Attributes:
        steps: the jobs of a step; of two, if they differ.
        quiet: the jobs of a step in which no rank has anything new to send, for methods that skip then.
        reconcile_every: after how many steps replicas are averaged.
        spread: the median measured turn in terms of the shortest.
    """

    steps: tuple[tuple[Job, ...], ...]
    quiet: tuple[Job, ...] | None
    reconcile_every: int | None
    spread: float


@dataclass(frozen=True)
class _Played:
    session: Session
    jobs: tuple[Job, ...]
    spread: float
    operations: Mapping[int, Sequence[Recorded]]
    quiet: _Quiet | None = None

    def jobs_of(self, sample: Sample, *, work: bool = True) -> tuple[Job, ...]:
        return tuple(grown(self.jobs[i], self.operations[i], n, work=work) for i, n in sample.jobs)


class _Quiet(NamedTuple):
    """The jobs of a turn without anything new to send, and their operations."""

    jobs: tuple[Job, ...]
    operations: Mapping[int, Sequence[Recorded]]

    def jobs_of(self, sample: Sample) -> tuple[Job, ...]:
        return tuple(grown(self.jobs[i], self.operations[i], n) for i, n in sample.jobs)


class _Cast(NamedTuple):
    """The rank that is played, and others that are played first: it waits for what they send."""

    leader: int = 0
    before: tuple[int, ...] = ()


class Player:
    """One worker of a method on a model of these shapes, with fixed gradients."""

    def __init__(
        self,
        method: str,
        shapes: Shapes,
        *,
        host: Host,
        overlap: bool,
        dense_below: int,
        gradients: Mapping[str, torch.Tensor] | None,
        link: Link | None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.exchange = parse_exchange(method)
        self.link = link
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.dense_below = dense_below
        entries = self._entries(self.shapes)
        if entries > LARGEST_MODEL:
            raise ConfigError(
                f"a model of {entries:,} parameters is too large to predict (at most {LARGEST_MODEL:,}): "
                "take a part of its layers, and scale compute time and result"
            )
        self._check(gradients)
        self.gradients = gradients
        traits = self.exchange.traits
        self.driver: Driver = "blocking"
        if host == "average":
            buckets = [list(self.shapes)]
        else:
            if overlap:
                self.driver = "direct" if traits.single_mean else "lanes"
            # A limit that the user sets holds for the first bucket, too.
            limits = {} if bucket_bytes is None else {"first": bucket_bytes, "cap": bucket_bytes}
            buckets = ddp_buckets(self.shapes, **limits)
        if traits.delayed:
            self.driver = "delayed"
        self.shares = tuple(self._entries(bucket) / max(1, entries) for bucket in buckets)
        session = self._session(RankInfo(0, 1))
        self.data_dependent = session.payload_bytes() is None
        prepare_for(session.engine.exchanges, loud=False)
        self._joins = joins_tensors(session.engine.exchanges)
        self._router = session.engine.router
        self.whole = traits.scope == "model"
        self._may_skip = traits.optimizer == "plain SGD"
        self.buckets = buckets
        self._steps: list[int] | None = [STEPS[0]] if traits.payload == "fixed" else None
        self._casts: dict[tuple[int, int], _Cast] = {}
        if self.whole:
            self.shares = (1.0,)

    def _sample(self, most: int) -> Sample:
        """What is played: about this many entries of what is larger and can stand for the rest."""
        if self.whole:
            played = self._first_layers(most) if self.gradients is None else self.buckets
            entries, of = (sum(map(self._entries, each)) for each in (self.buckets, played))
            return Sample(played, [(0, entries / max(1, of))])
        parts = [self._part(bucket, most) for bucket in self.buckets]
        kinds = [tuple(map(self._kind, part)) for part in parts]
        distinct = dict(zip(kinds, parts, strict=True))
        jobs = [
            (list(distinct).index(kind), self._entries(bucket) / max(1, self._entries(part)))
            for kind, part, bucket in zip(kinds, parts, self.buckets, strict=True)
        ]
        return Sample(list(distinct.values()), jobs)

    def _entries(self, names: Mapping[str, object] | Sequence[str]) -> int:
        return sum(math.prod(self.shapes[name]) for name in names)

    def _check(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        for name, shape in self.shapes.items() if gradients is not None else ():
            if gradients is None or name not in gradients or tuple(gradients[name].shape) != shape:
                raise ConfigError(f"gradients must have {name!r} with the shape {shape}")

    def _kind(self, name: str) -> object:
        """Tensors of one kind take the same operations and the same time."""
        shape = self.shapes[name]
        return (
            name if self.gradients is not None else (shape, self._router.exchange_for(Slot(name, shape, 0)))
        )

    def _part(self, bucket: list[str], most: int) -> list[str]:
        """A few tensors of a bucket if all are of one kind; otherwise the bucket."""
        if len(set(map(self._kind, bucket))) > 1:
            return bucket
        return bucket[: math.ceil(most / max(1, self._entries(bucket[:1])))]

    def _first_layers(self, most: int) -> list[list[str]]:
        """Tensors in the order of the buckets until there are enough, and at least one for each exchange."""
        found: list[list[str]] = []
        served: set[object] = set()
        for bucket in self.buckets:
            found.append([])
            for name in bucket:
                exchange = self._router.exchange_for(Slot(name, self.shapes[name], 0))
                if most > 0 or exchange not in served:
                    found[-1].append(name)
                    served.add(exchange)
                    most -= self._entries([name])
        return [bucket for bucket in found if bucket]

    def _session(self, rank_info: RankInfo) -> Session:
        """Any numbers will do as parameters, and all of them may share their memory: nobody changes them."""
        longest = max((self._entries([name]) for name in self.shapes), default=0)
        values = noise(longest)
        parameters = [(n, values[: math.prod(shape)].view(shape)) for n, shape in self.shapes.items()]
        return self._session_of(parameters, rank_info)

    def _session_of(self, parameters: Sequence[tuple[str, torch.Tensor]], rank_info: RankInfo) -> Session:
        return Session(
            parameters, self.exchange, rank_info=rank_info, dense_below=self.dense_below, link=self.link
        )

    def play(self, workers: int, repeats: int, entries: int | None = None, *, grow_work: bool = True) -> Play:
        """Play a step among so many workers.

        Without repeats the step is played once, and the work after its commit is not done. `entries` is
        about how many are played of what is larger and can stand for the rest. Without `grow_work` the work
        is that of the part that is played.
        """
        sample = self._sample(entries or (WHOLE_SAMPLE if self.whole else SAMPLE))
        with one_thread_if_busy():
            found = [
                self._as_leader(sample, workers, each, repeats) for each in self._different_steps(workers)
            ]
        steps = tuple(each.jobs_of(sample, work=grow_work) for each in found)
        still = found[0].quiet
        quiet = None if still is None else still.jobs_of(sample)
        return Play(steps, quiet, found[0].session.reconcile_every, max(played.spread for played in found))

    def _different_steps(self, workers: int) -> list[int]:
        """Two steps if a method alternates, otherwise one.

        A small part of the model is enough to tell, and any number of workers.
        """
        if self._steps is None:
            sample = self._sample(SMALL_SAMPLE)
            first, second = (self._as_leader(sample, workers, step, 0).jobs for step in STEPS)
            varies = VARYING if self.data_dependent else SAME
            self._steps = [STEPS[0]] if _alike(first, second, varies) else list(STEPS)
        return self._steps

    def _as_leader(self, sample: Sample, workers: int, step: int, repeats: int) -> _Played:
        """Play rank 0, or the rank whose broadcast the others wait for.

        If a method cuts what it has computed from a tensor into a range per rank, the last range may be
        shorter than that of rank 0, which cannot stand for it then: the last rank can stand for all.
        Which rank it was is remembered for the next sample.
        """
        (rank, before), sent = self._casts.get((workers, step), _Cast()), Blocks()
        for other in before:
            self._play_other(sample, RankInfo(other, workers), step, sent)
        for _ in range(4):
            try:
                played = self._played(sample, RankInfo(rank, workers), step, sent, repeats)
            except ElsewhereError as elsewhere:
                rank = elsewhere.src
            except PayloadError:
                if rank:
                    raise
                rank, before, sent = workers - 1, (), Blocks()
            except UnknownBlockError as unknown:
                before = (*before, unknown.src)
                self._play_other(sample, RankInfo(unknown.src, workers), step, sent)
            else:
                self._casts[workers, step] = _Cast(rank, before)
                return played
        raise AssertionError(f"{self.exchange}: every rank waits for what another one sends")

    def _play_other(self, sample: Sample, rank_info: RankInfo, step: int, sent: Blocks) -> None:
        """For what this rank sends: it is played as far as that is possible."""
        with contextlib.suppress(ElsewhereError, UnknownBlockError):
            self._played(sample, rank_info, step, sent, 0)

    def _played(self, sample: Sample, rank_info: RankInfo, step: int, sent: Blocks, repeats: int) -> _Played:
        session = self._session(rank_info)
        session.engine.step = step
        session.engine.confirms = False  # one step in 64 does, and it is not the step to predict
        session.engine.cuts = False  # pieces take as long as their bytes
        mirror, link = Mirror(rank_info, sent), session.engine.link

        def turn(number: int) -> tuple[Job, ...]:
            programs = enumerate(self._programs(session, sample, number, link))
            return tuple(mirror.run(each, place, to_the_end=repeats > 0) for place, each in programs)

        turns, operations, quiet = [turn(0)], dict(mirror.operations), None
        if self._may_skip and repeats:  # the same gradients once more
            quiet = _Quiet(turn(0), dict(mirror.operations))
        began = time.perf_counter()
        # A kernel may be loaded in the first turn that has a residual; the whole model at once has none.
        least = 1 if self.whole or rank_info.size >= LARGE_GROUP else 2
        while len(turns) <= repeats and (len(turns) <= least or time.perf_counter() - began < LONG_ENOUGH):
            latest = turn(len(turns))
            if self._may_skip and list(map(many.kinds, latest)) != list(map(many.kinds, turns[0])):
                break  # a lazy method has skipped this turn: it does not show what sending takes
            turns.append(latest)
            operations = dict(mirror.operations)
        measured = turns[1:] or turns  # the first turn makes states and workspaces
        # Other work on this machine makes a turn longer, never shorter: the shortest counts.
        jobs = tuple(min(same, key=lambda job: job.work) for same in zip(*measured, strict=True))
        totals = [sum(job.work for job in turn) for turn in measured]
        spread = statistics.median(totals) / min(totals) if repeats and min(totals) > 0 else 1.0
        return _Played(session, jobs, spread, operations, quiet)

    def _programs(
        self, session: Session, sample: Sample, turn: int, link: Link
    ) -> Generator[Program, None, None]:
        """New gradients in every turn: methods that skip unchanged gradients would never send otherwise.

        An exchange that sees a part of its tensors decides as it would for all, if bytes take longer.
        """
        cpu, factors = torch.device("cpu"), dict(sample.jobs)
        views: list[View] = []
        for place, bucket in enumerate(sample.buckets):
            if self._joins:
                session.engine.link = link.slower(factors[0 if self.whole else place])
            buffer = self._buffer(bucket).roll(SHIFT * turn)
            views.append(View(session.engine.layout(bucket, cpu), buffer, buffer))
            if not self.whole:
                self._clear_ends(views, session.engine.exchange_ranks)
                yield session.engine.program([views.pop()])
        if views:
            self._clear_ends(views, session.engine.exchange_ranks)
            yield session.engine.program(views)

    def _clear_ends(self, views: Sequence[View], rank_info: RankInfo) -> None:
        """Some methods cut a tensor into ranges of one length, one for each rank.

        The last range may reach beyond the tensor, where nobody has entries to send. So this rank, which
        stands for the last one, too, must not have any at the end of its range.
        """
        positions = {name: number for number, name in enumerate(self.shapes)}
        for group in plan([view.layout for view in views], self._router, positions):
            length = -(-group.layout.numel // rank_info.size)
            end = (rank_info.rank + 1) * length
            begin = end - (length * rank_info.size - group.layout.numel)
            for x, _ in group.memory(views):
                x[max(0, begin) : max(0, end)] = 0
                begin, end = begin - x.numel(), end - x.numel()

    def _buffer(self, bucket: Sequence[str]) -> torch.Tensor:
        given = self.gradients
        if given is None:
            return noise(self._entries(bucket))
        return torch.cat([given[name].detach().float().reshape(-1) for name in bucket])

    def copying(self) -> float:
        """Seconds of the copies that a delay takes: of the gradients, and of the means that they wait for."""
        if self.driver != "delayed":
            return 0.0
        entries = self._entries(self.shapes)
        some = noise(min(entries, SAMPLE))
        copy = torch.empty_like(some)
        taken: list[float] = []
        for _ in range(COPIES):
            began = time.perf_counter()
            copy.copy_(some)
            taken.append(time.perf_counter() - began)
        return 2 * min(taken) * entries / max(1, some.numel())

    def reconciliation(self, workers: int) -> Job:
        """The mean of replicas that have drifted apart, among so many workers."""
        if workers > RECONCILED_WORKERS[-1]:  # a short gather and sums, among any number of workers
            played = [(count, self.reconciliation(count)) for count in RECONCILED_WORKERS]
            return many.job_for(workers, played, None)
        names = [name for bucket in self._first_layers(WHOLE_SAMPLE) for name in bucket]
        mirror = Mirror(RankInfo(0, workers))
        with one_thread_if_busy():
            copies = [(name, noise(self._entries([name])).view(self.shapes[name]).clone()) for name in names]
            job = mirror.run(self._session_of(copies, mirror.rank_info).reconciliation())
        factor = self._entries(self.shapes) / max(1, self._entries(names))
        return grown(job, mirror.operations[0], factor)


def joins_tensors(exchanges: Iterable[Exchange]) -> bool:
    """Whether one of them sees several tensors as one, so that it chooses its operations for all together."""
    return any(exchange.traits.scope != "tensor" for exchange in exchanges)


@contextlib.contextmanager
def one_thread_if_busy() -> Generator[None, None, None]:
    """On a busy machine threads mostly wait for each other: one thread alone is closer to the real work."""
    threads = torch.get_num_threads()
    busy = threads > 1 and os.getloadavg()[0] > (os.cpu_count() or 1)
    if busy:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if busy:
            torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _random_numbers() -> torch.Tensor:
    return torch.randn(NOISE, generator=torch.Generator().manual_seed(0))


def noise(entries: int) -> torch.Tensor:
    """This many normally distributed numbers, always the same; they must not be changed."""
    if entries <= NOISE:
        return _random_numbers()[:entries]
    return _random_numbers().repeat(-(-entries // NOISE))[:entries]


def _alike(first: Sequence[Job], second: Sequence[Job], varies: float) -> bool:
    """Whether two steps take the same operations, of lengths that differ by this part at most."""
    for one, other in zip(first, second, strict=True):
        if [r.operation for r in one.rounds] != [r.operation for r in other.rounds]:
            return False
        for a, b in zip(one.rounds, other.rounds, strict=True):
            if not math.isclose(a.sent + a.received, b.sent + b.received, rel_tol=varies, abs_tol=64):
                return False
    return True
