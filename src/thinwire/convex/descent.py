"""Lazy gradient descent: in one loop, with ranks in lock-step, or with processes."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist

from thinwire.convex import server
from thinwire.convex.mail import GroupMail, Postman
from thinwire.convex.nodes import Iterate, Node, Places, broken, check
from thinwire.convex.options import Descent, Known, Objective
from thinwire.convex.trace import Iteration, Trace
from thinwire.core import checks
from thinwire.core.channel import Channel, Program, mark_of, together
from thinwire.drivers import Lockstep
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ConfigError
from thinwire.methods.families.lazy import BROKEN, EXACT, SKIP, UNCODED, Sum, checked
from thinwire.methods.laq import LAQ
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.launch import Worker, run_local
from thinwire.net.meter import Meter, Tally
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.preparation import prepare_for

By = Literal["loop", "lockstep", "processes"]
Callback = Callable[[Iteration], object]


@dataclass(frozen=True)
class _Task:
    """All arguments of a run, checked."""

    objectives: Sequence[Objective]
    start: torch.Tensor
    how: Descent
    iterations: int
    optimum: float | None
    gap: float | None
    known: Known | None

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ConfigError("lazy_gd: there are no workers: give one objective for each")
        checks.whole("lazy_gd", "iterations", self.iterations, 1)
        if self.gap is not None:
            checks.positive("lazy_gd", "gap", self.gap)
            if self.optimum is None:
                raise ConfigError("lazy_gd: a gap is a distance from the smallest loss: give optimum=... too")
        check(self.start, self.how, len(self.objectives), self.known)

    def iterate(self) -> Iterate:
        return Iterate(self.start, self.how, len(self.objectives), self.known)

    def nodes(self) -> list[Node]:
        last = [None] * len(self.objectives) if self.known is None else self.known.last
        start = self.start.double()
        return [Node(one, self.how, start, own) for one, own in zip(self.objectives, last, strict=True)]

    def places(self) -> Places:
        return Places(self.how, len(self.objectives), self.known)

    def loss(self, theta: torch.Tensor) -> float:
        return sum(objective.value(theta) for objective in self.objectives)

    def over(self, one: Iteration) -> bool:
        close = self.gap is not None and one.gap is not None and one.gap < self.gap
        return close or one.number >= self.iterations

    def describe(self) -> dict[str, object]:
        """What all ranks must agree on."""
        known = self.known
        tensors = [self.start, *(() if known is None else (*known.last, *known.places))]
        digest = hashlib.blake2b(digest_size=8)
        for tensor in tensors:
            digest.update(frames.to_bytes(frames.as_bytes(tensor.double())))
        return {
            "descent": repr(self.how),
            "start": f"{self.start.numel()} parameters, {digest.hexdigest()}",
            "end": f"{self.iterations} iterations, gap {self.gap} to {self.optimum}",
        }


def lazy_gd(
    objectives: Sequence[Objective],
    start: torch.Tensor,
    how: Descent,
    *,
    iterations: int,
    optimum: float | None = None,
    gap: float | None = None,
    known: Known | None = None,
    by: By = "loop",
    on_iteration: Callback | None = None,
    timeout: float = 600.0,
) -> Trace:
    """Minimise sum_m objectives[m] by gradient descent in which workers upload only what is news.

        shares = [Objective(lambda t, a=a, b=b: 0.5 * (a @ t - b).square().sum()) for a, b in data]
        trace = lazy_gd(shares, torch.zeros(8), Descent("lag-wk", step=1 / L), iterations=1000)
        trace.last.uploads, trace.last.bits

    All ways give the same numbers to the last bit. An upload is a difference to the one before, in
    float32 (float64 with `float_bits=64`) or quantised; everything that is kept is float64.

    Args:
        objectives: one for each worker.
        start: the first parameters, flat.
        how: the algorithm and its constants.
        iterations: at most so many.
        optimum: the smallest loss, if it is known, to report the gap.
        gap: stop when the loss is closer to `optimum` than this.
        known: to go on from somewhere.
        by: "loop" is the fastest, without a wire; "lockstep" runs every rank's program over metered
            operations in this process; "processes" starts a process for each worker, joined by gloo, and
            needs objectives that can be pickled. Under "lag-ps" the first worker is the server as well.
        on_iteration: called with each iteration.
        timeout: for "processes", in seconds.
    """
    task = _Task(objectives, start, how, iterations, optimum, gap, known)
    if by == "processes":
        return _by_processes(task, on_iteration, timeout)
    checks.one_of("lazy_gd", "by", by, ("loop", "lockstep", "processes"))
    trace = Trace([], start)

    def note(one: Iteration) -> None:
        trace.iterations.append(one)
        if on_iteration is not None:
            on_iteration(one)

    if by == "lockstep" and how.algorithm == "lag-ps":
        _by_mail(task, trace, note)
        return trace
    for one in _loop(task, trace) if by == "loop" else _lockstep(task, trace):
        note(one)
    return trace


def lazy_gd_steps(
    objectives: Sequence[Objective],
    start: torch.Tensor,
    how: Descent,
    *,
    iterations: int,
    optimum: float | None = None,
    gap: float | None = None,
    known: Known | None = None,
) -> Iterator[Iteration]:
    """`lazy_gd` as an iterator, by a loop: for a progress bar, or to stop when one likes."""
    return _loop(_Task(objectives, start, how, iterations, optimum, gap, known), Trace([], start))


def lazy_gd_on_this_rank(
    objective: Objective,
    start: torch.Tensor,
    how: Descent,
    *,
    iterations: int,
    optimum: float | None = None,
    gap: float | None = None,
    known: Known | None = None,
    total_loss: Callable[[torch.Tensor], float] | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_iteration: Callback | None = None,
) -> Trace:
    """`lazy_gd` in a program of one's own, with a process group: to be called on every rank.

    Each rank is a worker. Under "lag-ps" the first rank is the server as well, only it has a trace, and as
    nobody else computes anything unasked, it needs `total_loss` to report losses (NaN without).
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ConfigError("lazy_gd: torch.distributed is not initialised")
    task = _Task([objective] * group.size(), start, how, iterations, optimum, gap, known)
    if how.coder.bits not in (UNCODED, EXACT):
        prepare_for([LAQ()], loud=False)
    (private,) = private_groups(process_group, 1)
    meter = Meter()
    link = ProcessGroupExecutor(private, meter)
    try:
        agree(task.describe(), link.execute, dist.get_process_group_ranks(private))
        meter.reset()
        rank_info = RankInfo(private.rank(), private.size())
        trace = Trace([], start.double(), [meter])

        def done(one: Iteration) -> bool:
            trace.iterations.append(one)
            if on_iteration is not None:
                on_iteration(one)
            return task.over(one)

        node = task.nodes()[rank_info.rank]
        if how.algorithm == "lag-ps":
            mail = GroupMail(private, meter)
            if rank_info.rank:
                mail.run(server.work(node, how, start.double()))
                return trace
            iterate, places = task.iterate(), task.places()
            loss = total_loss or _unknown
            mail.run(server.serve(iterate, node, places, loss=loss, optimum=optimum, done=done))
        else:
            iterate = task.iterate()
            replica = _Replica(node, iterate, rank_info, optimum)
            driver = Blocking(link.execute)
            driver.run(replica.program())
            while not done(replica.record):
                iterate.advance()
                driver.run(replica.program())
        trace.theta = iterate.theta
        return trace
    finally:
        link.close()


# -- in this process ---------------------------------------------------------------------------------------


def _loop(task: _Task, trace: Trace) -> Iterator[Iteration]:
    how, iterate, nodes, places = task.how, task.iterate(), task.nodes(), task.places()
    asks = how.algorithm == "lag-ps"
    while True:
        theta, bound = iterate.theta, iterate.bound
        asked = places.to_ask(theta, bound) if asks else range(len(nodes))
        uploaders: list[int] = []
        for worker in asked:
            node = nodes[worker]
            mine = node.compute(theta)[1]
            flag = node.flag(mine, bound)
            if flag == BROKEN:
                raise broken(iterate.number, [worker])
            if flag != SKIP:
                difference = how.coder.decode(mine.parts, theta.numel())
                iterate.total = iterate.total + difference
                node.uploaded(mine, node.last + difference)
                uploaders.append(worker)
            else:
                node.silence += 1
        places.asked(uploaders, theta)
        trace.theta = theta
        one = iterate.record(uploaders, len(asked), task.loss(theta), task.optimum)
        yield one
        if task.over(one):
            return
        iterate.advance()


def _lockstep(task: _Task, trace: Trace) -> Iterator[Iteration]:
    driver = Lockstep(len(task.objectives))
    trace.meters = driver.meters
    replicas = [
        _Replica(node, task.iterate(), rank_info, task.optimum)
        for node, rank_info in zip(task.nodes(), driver.rank_infos, strict=True)
    ]
    while True:
        driver.run([replica.program() for replica in replicas])
        trace.theta = replicas[0].iterate.theta
        yield replicas[0].record
        if task.over(replicas[0].record):
            return
        for replica in replicas:
            replica.iterate.advance()


def _by_mail(task: _Task, trace: Trace, note: Callback) -> None:
    def done(one: Iteration) -> bool:
        note(one)
        return task.over(one)

    iterate = task.iterate()
    own, *others = task.nodes()
    postman = Postman(len(task.objectives))
    trace.meters = postman.meters
    serve = server.serve(iterate, own, task.places(), loss=task.loss, optimum=task.optimum, done=done)
    postman.run([serve, *(server.work(node, task.how, iterate.theta) for node in others)])
    trace.theta = iterate.theta


class _Replica:
    """One rank where all ranks keep the parameters: flags, then the uploads by broadcasts."""

    def __init__(self, node: Node, iterate: Iterate, rank_info: RankInfo, optimum: float | None) -> None:
        self.node = node
        self.iterate = iterate
        self.rank_info = rank_info
        self.optimum = optimum
        self.record: Iteration

    def program(self) -> Program:
        number, device = self.iterate.number, self.iterate.theta.device
        ch = Channel(self.rank_info, step=number, seed=0, key="", device=device)
        mark = mark_of(f"lazy_gd {self.node.how}")
        return together([self._iteration(ch)], self.rank_info, step=number, mark=mark, link=Link())

    async def _iteration(self, ch: Channel) -> None:
        node, iterate = self.node, self.iterate
        gradient, mine = node.compute(iterate.theta)
        flag = torch.tensor([node.flag(mine, iterate.bound)], dtype=torch.uint8)
        loss = torch.tensor([node.objective.value(iterate.theta)], dtype=torch.float64)
        told = await ch.gather([flag, loss])
        flags = checked([int(theirs[0]) for theirs, _ in told])
        if BROKEN in flags:
            raise broken(iterate.number, [rank for rank, flag in enumerate(flags) if flag == BROKEN])
        uploaders = [rank for rank, flag in enumerate(flags) if flag != SKIP]
        both = Sum(node.last, iterate.total, node.how.coder, only_broadcasts=True)
        await both.add(uploaders, mine, gradient, ch)
        iterate.total = both.total
        if ch.rank in uploaders:
            node.uploaded(mine, both.last)
        else:
            node.silence += 1
        losses = sum(float(theirs) for _, theirs in told)
        self.record = iterate.record(uploaders, ch.size, losses, self.optimum)


# -- processes ---------------------------------------------------------------------------------------------


def _by_processes(
    task: _Task,
    on_iteration: Callback | None,
    timeout: float,
) -> Trace:
    try:
        pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "lazy_gd: processes need objectives that can be pickled (functions of a module, not lambdas): "
            f"{error}"
        ) from None

    def listen(rank: int, one: Iteration) -> None:
        if on_iteration is not None:
            on_iteration(one)

    told = on_iteration is not None
    results = cast(
        "list[tuple[list[Iteration], torch.Tensor, dict[str, Tally]]]",
        run_local(_process, len(task.objectives), task, told, timeout=timeout, on_report=listen),
    )
    meters = [Meter(by_operation=counted) for _, _, counted in results]
    return Trace(results[0][0], results[0][1], meters)


def _process(
    worker: Worker, task: _Task, told: bool
) -> tuple[list[Iteration], torch.Tensor, dict[str, Tally]]:
    trace = lazy_gd_on_this_rank(
        task.objectives[worker.rank],
        task.start,
        task.how,
        iterations=task.iterations,
        optimum=task.optimum,
        gap=task.gap,
        known=task.known,
        total_loss=task.loss,
        on_iteration=worker.report if told and worker.rank == 0 else None,
    )
    kept = trace.iterations if worker.rank == 0 else []
    return kept, trace.theta, dict(trace.meters[0].by_operation)


def _unknown(theta: torch.Tensor) -> float:
    del theta
    return math.nan
