"""A step of a method on a model: its operations exactly, its work as measured here."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from thinwire.core.channel import Program
from thinwire.core.routing import View
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse_exchange
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo
from thinwire.predict.buckets import Shapes, ddp_buckets
from thinwire.predict.mirror import ElsewhereError, Job, Mirror, Round
from thinwire.predict.timeline import Compute, Driver, step_seconds, transfer_seconds
from thinwire.sessions.gradient import Session
from thinwire.sessions.preparation import prepare_for

Host = Literal["ddp", "average"]

# With more workers than this the decoding is not run, but extrapolated from these two.
MEASURED_WORKERS = (16, 64)
# Only the work before or after these can grow with the number of workers: pieces for all, blocks of all.
GROWING = ("all_gather", "all_to_all")
# Late enough for every warm-up to be over; two of them, for methods that alternate.
STEPS = (1_000_000, 1_000_001)
SHIFT = 7_919
LARGEST_MODEL = 300_000_000


@dataclass(frozen=True)
class Profile:
    """One method on one model with this many workers.

    Attributes:
        steps: the jobs of a step; of two steps, if a method alternates.
        shares: the part of the backward pass that each job has to wait for after the one before.
        reconciliation: the mean of drifting replicas, every `reconcile_every` steps.
        data_dependent: whether the bytes depend on the gradients; these are for the ones given, normally
            distributed ones by default.
    """

    method: str
    workers: int
    steps: tuple[tuple[Job, ...], ...]
    shares: tuple[float, ...]
    driver: Driver
    reconciliation: Job | None = None
    reconcile_every: int | None = None
    data_dependent: bool = False

    def _rounds(self) -> list[tuple[Round, float]]:
        """Every operation, and how often per step it happens."""
        found = [(r, 1 / len(self.steps)) for jobs in self.steps for job in jobs for r in job.rounds]
        if self.reconciliation is not None and self.reconcile_every is not None:
            found += [(r, 1 / self.reconcile_every) for r in self.reconciliation.rounds]
        return found

    @property
    def sent_bytes(self) -> float:
        """Bytes per step that the busiest rank sends."""
        return sum(r.sent * often for r, often in self._rounds())

    @property
    def received_bytes(self) -> float:
        return sum(r.received * often for r, often in self._rounds())

    @property
    def payload_bytes(self) -> float:
        """The payload of a rank per step, frames included."""
        return sum(r.payload * often for r, often in self._rounds())

    @property
    def rounds(self) -> float:
        return sum(often for _, often in self._rounds())

    @property
    def hops(self) -> float:
        """Messages that wait for each other."""
        return sum(r.hops * often for r, often in self._rounds())

    @property
    def compression_seconds(self) -> float:
        """A rank's own work in a step: coding, and decoding the payloads of all ranks."""
        total = sum(job.work for jobs in self.steps for job in jobs) / len(self.steps)
        if self.reconciliation is not None and self.reconcile_every is not None:
            total += self.reconciliation.work / self.reconcile_every
        return total

    def link_seconds(self, link: Link) -> float:
        """All operations one after the other, nothing overlapped."""
        return sum((r.hops * link.latency + transfer_seconds(r, link)) * o for r, o in self._rounds())

    def step_seconds(self, link: Link, compute: Compute | float = 0.0, *, cores: float = math.inf) -> float:
        """How long a training step takes on this link, overlapped as the driver does it."""
        compute = Compute.of(compute) if isinstance(compute, int | float) else compute
        each = [step_seconds(j, self.shares, compute, link, self.driver, cores) for j in self.steps]
        total = statistics.fmean(each)
        if self.reconciliation is not None and self.reconcile_every is not None:
            alone = Compute(0.0, 0.0)
            extra = step_seconds((self.reconciliation,), (1.0,), alone, link, "blocking", cores)
            total += extra / self.reconcile_every
        return total

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
        return Profile(**made)


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
    overlap: bool = True,
    dense_below: int = 1024,
    gradients: Mapping[str, torch.Tensor] | None = None,
    repeats: int = 5,
) -> Profile:
    """Run the method's own code for one worker among `workers`, and note operations and work.

    Args:
        method: a method string.
        shapes: of the parameters, in the model's order.
        workers: from 1 to thousands; above 64 the work is extrapolated from 16 and 64.
        host: "ddp" (buckets, during the backward pass) or "average" (`Session.average`, after it).
        overlap, dense_below: as for `attach`.
        gradients: for methods whose bytes depend on the data; normally distributed ones otherwise.
        repeats: measured steps, of which the median counts.
    """
    if workers < 1:
        raise ConfigError(f"a group has one worker or more, not {workers}")
    with _without_notices():
        player = _Player(
            method, shapes, host=host, overlap=overlap, dense_below=dense_below, gradients=gradients
        )
        return _profile(player, workers, repeats)


def profiles(method: str, shapes: Shapes, counts: Sequence[int], *, repeats: int = 5) -> dict[int, Profile]:
    """Like `profile` under DDP for several numbers of workers, without measuring the same one twice."""
    if min(counts, default=1) < 1:
        raise ConfigError(f"a group has one worker or more, not {min(counts)}")
    with _without_notices():
        player = _Player(method, shapes, host="ddp", overlap=True, dense_below=1024, gradients=None)
        known: dict[int, Profile] = {}
        for count in sorted(counts):
            known[count] = _profile(player, count, repeats, known)
        return {count: known[count] for count in counts}


@contextmanager
def _without_notices() -> Generator[None, None, None]:
    """Sessions that only measure log nothing."""
    log = logging.getLogger("thinwire")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _profile(
    player: _Player, workers: int, repeats: int, known: Mapping[int, Profile] | None = None
) -> Profile:
    if workers <= MEASURED_WORKERS[-1]:
        return player.play(workers, repeats)
    known = known or {}
    few, many = (known.get(count) or player.play(count, repeats) for count in MEASURED_WORKERS)
    only_rounds = player.play(workers, 0)
    if _kinds(few) == _kinds(many) == _kinds(only_rounds):
        return _extrapolated(few, many, only_rounds)
    return player.play(workers, 1)


def _kinds(found: Profile) -> list[list[list[str]]]:
    return [[[r.operation for r in job.rounds] for job in jobs] for jobs in found.steps]


def _extrapolated(few: Profile, many: Profile, asked: Profile) -> Profile:
    """Work grows linearly with the number of workers, because a rank decodes the payloads of all of them."""
    reach = (asked.workers - many.workers) / (many.workers - few.workers)

    def on(a: float, b: float, grows: bool) -> float:
        return b + max(0.0, b - a) * reach if grows else min(a, b)

    def job(a: Job, b: Job, c: Job) -> Job:
        rounds: list[Round] = []
        grows = False
        for x, y, z in zip(a.rounds, b.rounds, c.rounds, strict=True):
            grows = grows or z.operation == "all_to_all"
            rounds.append(replace(z, work=on(x.work, y.work, grows)))
            grows = z.operation in GROWING
        closing, finish = on(a.closing, b.closing, grows), on(a.finish, b.finish, grows)
        return Job(tuple(rounds), closing, b.commits, finish)

    steps = tuple(
        tuple(job(*three) for three in zip(*jobs, strict=True))
        for jobs in zip(few.steps, many.steps, asked.steps, strict=True)
    )
    return replace(asked, steps=steps)


class _Player:
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
    ) -> None:
        self.exchange = parse_exchange(method)
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.dense_below = dense_below
        entries = sum(math.prod(shape) for shape in self.shapes.values())
        if entries > LARGEST_MODEL:
            raise ConfigError(
                f"{entries:,} parameters are more than can be played here ({LARGEST_MODEL:,}): predict for "
                "a part of the layers and scale compute time and result"
            )
        traits = self.exchange.traits
        if host == "average":
            self.driver: Driver = "blocking"
            self.buckets = [list(self.shapes)]
        else:
            self.driver = "blocking" if not overlap else "direct" if traits.single_mean else "lanes"
            self.buckets = ddp_buckets(self.shapes)
        self.gradients = _gradients(self.shapes, gradients)
        sizes = [sum(math.prod(self.shapes[name]) for name in bucket) for bucket in self.buckets]
        self.shares = tuple(size / max(1, entries) for size in sizes)
        if traits.scope == "model":
            self.shares = (1.0,)
        session = Session(
            self._parameters(), self.exchange, rank_info=RankInfo(0, 1), dense_below=dense_below
        )
        self.data_dependent = session.payload_bytes() is None
        prepare_for(session.engine.exchanges, loud=False)

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Any numbers will do: the gradients themselves."""
        return [(name, self.gradients[name].view(shape)) for name, shape in self.shapes.items()]

    def play(self, workers: int, repeats: int) -> Profile:
        """Without repeats only the rounds are recorded, and the work after the last one is not done."""
        found: list[tuple[Job, ...]] = []
        session: Session | None = None
        for step in STEPS[:1] if self.exchange.traits.payload == "fixed" else STEPS:
            session, jobs = self._as_leader(workers, step, repeats)
            if not found or _costs(jobs) != _costs(found[0]):
                found.append(jobs)
        assert session is not None
        every = session.reconcile_every
        return Profile(
            str(self.exchange),
            workers,
            tuple(found),
            self.shares,
            self.driver,
            None if every is None else self._reconciliation(workers),
            every,
            self.data_dependent,
        )

    def _as_leader(self, workers: int, step: int, repeats: int) -> tuple[Session, tuple[Job, ...]]:
        rank = 0
        for _ in range(2):
            session = Session(
                self._parameters(),
                self.exchange,
                rank_info=RankInfo(rank, workers),
                dense_below=self.dense_below,
            )
            session.engine.step = step
            try:
                return session, self._played(session, repeats)
            except ElsewhereError as elsewhere:
                rank = elsewhere.src
        raise AssertionError(f"{self.exchange}: every rank waits for another one's broadcast")

    def _played(self, session: Session, repeats: int) -> tuple[Job, ...]:
        mirror = Mirror(session.rank_info)
        if not repeats:
            return tuple(mirror.run(each, to_the_end=False) for each in self._programs(session, 0))
        played = [
            tuple(mirror.run(each) for each in self._programs(session, turn)) for turn in range(repeats + 1)
        ]
        # The first one makes states and workspaces.
        return tuple(_median(same) for same in zip(*played[1:], strict=True))

    def _programs(self, session: Session, turn: int) -> Generator[Program, None, None]:
        """New gradients in every turn: methods that skip unchanged gradients would never send otherwise."""
        cpu = torch.device("cpu")
        views: list[View] = []
        for bucket in self.buckets:
            buffer = torch.cat([self.gradients[name].roll(SHIFT * turn) for name in bucket])
            views.append(View(session.engine.layout(bucket, cpu), buffer, buffer))
        if session.method.traits.scope == "model":
            yield session.engine.program(views)
            return
        for view in views:
            yield session.engine.program([view])

    def _reconciliation(self, workers: int) -> Job:
        copies = [(name, tensor.clone()) for name, tensor in self._parameters()]
        session = Session(copies, self.exchange, rank_info=RankInfo(0, workers), dense_below=self.dense_below)
        return Mirror(session.rank_info).run(session.reconciliation())


def _gradients(shapes: Shapes, given: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    if given is None:
        rng = torch.Generator().manual_seed(0)
        return {name: torch.randn(math.prod(shape), generator=rng) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name not in given or tuple(given[name].shape) != tuple(shape):
            raise ConfigError(f"gradients must have {name!r} with the shape {tuple(shape)}")
    return {name: given[name].detach().float().contiguous().view(-1) for name in shapes}


def _costs(jobs: Sequence[Job]) -> list[list[Round]]:
    return [[replace(each, work=0.0) for each in job.rounds] for job in jobs]


def _median(same: Sequence[Job]) -> Job:
    last = same[-1]
    rounds = tuple(
        replace(each, work=_middle([job.rounds[number].work for job in same]))
        for number, each in enumerate(last.rounds)
    )
    pick: Callable[[str], float] = lambda name: _middle([getattr(job, name) for job in same])  # noqa: E731
    return Job(rounds, pick("closing"), last.commits, pick("finish"))


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)
