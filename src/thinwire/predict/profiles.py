"""A step of a method on a model: its operations and bytes, and its work as measured here."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.net.costs import Link
from thinwire.predict.buckets import Shapes
from thinwire.predict.mirror import Job, Round
from thinwire.predict.player import Host, Player
from thinwire.predict.timeline import Compute, Driver, step_seconds, transfer_seconds

# With more workers than this the decoding is not run, but extrapolated from these two.
MEASURED_WORKERS = (16, 64)
# Only the work before or after these can grow with the number of workers: pieces for all, blocks of all.
GROWING = ("all_gather", "all_to_all")


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
    repeats: int = 10,
    bucket_bytes: int | None = None,
) -> Profile:
    """Run the method's own code for one worker among `workers`, and note operations and work.

    Args:
        method: a method string.
        shapes: of the parameters, in the model's order.
        workers: from 1 to thousands; above 64 the work is extrapolated from 16 and 64.
        host: "ddp" (buckets, during the backward pass) or "average" (`Session.average`, after it).
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
            bucket_bytes=bucket_bytes,
        )
        return _profile(player, workers, repeats)


def profiles(method: str, shapes: Shapes, counts: Sequence[int]) -> dict[int, Profile]:
    """Like `profile` under DDP for several numbers of workers, from one step each: quick, with rough times.

    The work of that step tells how it is shared out between the rounds, and how it grows with the workers.
    """
    if min(counts, default=1) < 1:
        raise ConfigError(f"a group has one worker or more, not {min(counts)}")
    with _without_notices():
        player = Player(method, shapes, host="ddp", overlap=True, dense_below=1024, gradients=None)
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


def _profile(player: Player, workers: int, repeats: int) -> Profile:
    if workers <= MEASURED_WORKERS[-1]:
        return _played(player, workers, repeats)
    few, many = (_played(player, count, repeats) for count in MEASURED_WORKERS)
    only_rounds = _played(player, workers, 0)
    if _kinds(few) == _kinds(many) == _kinds(only_rounds):
        return _extrapolated(few, many, only_rounds)
    return _played(player, workers, 1)


def _played(player: Player, workers: int, repeats: int) -> Profile:
    steps, every = player.play(workers, repeats)
    return Profile(
        str(player.exchange),
        workers,
        steps,
        player.shares,
        player.driver,
        None if every is None else player.reconciliation(workers),
        every,
        player.data_dependent,
    )


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
