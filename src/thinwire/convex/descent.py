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
from thinwire.convex.nodes import Iterate, Node, not_finite
from thinwire.convex.options import Descent, Iteration, Known, Objective, Trace
from thinwire.core import channel, checks
from thinwire.drivers import Lockstep
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ConfigError
from thinwire.methods.families import lazy
from thinwire.methods.laq import LAQ
from thinwire.net import frames, transport
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.launch import Worker, run_local
from thinwire.net.liveness import timeout_of
from thinwire.net.meter import Meter, Tally
from thinwire.net.rank_info import RankInfo
from thinwire.net.store import default_store, own_connection
from thinwire.sessions.preparation import prepare_for

By = Literal["loop", "lockstep", "processes"]
Callback = Callable[[Iteration], object]
Loss = Callable[[torch.Tensor], float]


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
        self.how.check_workers(len(self.objectives))
        if self.start.dim() != 1 or not self.start.numel() or not self.start.is_floating_point():
            shape = tuple(self.start.shape)
            raise ConfigError(f"lazy_gd: start must be a flat tensor of numbers, not of shape {shape}")
        if self.known is not None:
            self._check_known("last", self.known.last)
            if self.known.anchors or self.how.algorithm == "lag-ps":
                self._check_known("anchors", self.known.anchors)

    def _check_known(self, what: str, given: Sequence[torch.Tensor]) -> None:
        workers, shape = len(self.objectives), self.start.shape
        if len(given) != workers or any(tensor.shape != shape for tensor in given):
            needs = f"one tensor for each of {workers} workers, of shape {tuple(shape)}"
            raise ConfigError(f"lazy_gd: known.{what} needs {needs}")

    def iterate(self) -> Iterate:
        return Iterate(self.start, self.how, len(self.objectives), self.known)

    def node(self, worker: int) -> Node:
        last = None if self.known is None else self.known.last[worker]
        return Node(self.objectives[worker], self.how, self.start.double(), last)

    def loss(self, theta: torch.Tensor) -> float:
        return sum(objective.value(theta) for objective in self.objectives)

    def over(self, one: Iteration) -> bool:
        close = self.gap is not None and one.gap is not None and one.gap < self.gap
        return close or one.number >= self.iterations

    def follow(self, trace: Trace, on_iteration: Callback | None) -> Callable[[Iteration], bool]:
        """Notes every iteration and says whether it was the last."""

        def over(one: Iteration) -> bool:
            trace.iterations.append(one)
            if on_iteration is not None:
                on_iteration(one)
            return self.over(one)

        return over

    def describe(self) -> dict[str, object]:
        """What all ranks must agree on."""
        known = self.known
        tensors = [self.start, *(() if known is None else (*known.last, *known.anchors))]
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
    """Minimise sum_m objectives[m] by gradient descent in which workers upload only what has changed.

        shares = [Objective(lambda t, a=a, b=b: 0.5 * (a @ t - b).square().sum()) for a, b in data]
        trace = lazy_gd(shares, torch.zeros(8), Descent("lag-wk", step=1 / L), iterations=1000)
        trace.last.uploads, trace.last.bits

    All ways to run it give the same numbers to the last bit. An upload is the difference to the one before,
    in float32 (float64 with `float_bits=64`) or quantised; everything that is kept is float64.

    Args:
        objectives: one for each worker.
        start: the first parameters, flat.
        how: the algorithm and its constants.
        iterations: at most so many.
        optimum: the smallest loss, if it is known, to report the gap.
        gap: stop when the loss is closer to `optimum` than this.
        known: to continue an earlier run.
        by: "loop" is the fastest, without a network; "lockstep" runs the program of every rank over metered
            operations in this process; "processes" starts a process for each worker, connected by gloo, and
            needs objectives that can be pickled. Where a server chooses ("lag-ps" and the two of IAG) the
            first worker is the server as well.
        on_iteration: called with each iteration.
        timeout: for "processes", in seconds.
    """
    task = _Task(objectives, start, how, iterations, optimum, gap, known)
    checks.one_of("lazy_gd", "by", by, ("loop", "lockstep", "processes"))
    if by == "processes":
        return _by_processes(task, on_iteration, timeout)
    trace = Trace([], start)
    over = task.follow(trace, on_iteration)
    if by == "loop":
        for one in _loop(task, trace):
            over(one)
    elif how.by_server:
        _by_local_server(task, trace, over)
    else:
        _by_lockstep(task, trace, over)
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
    """`lazy_gd` as an iterator, by a loop: for a progress bar, or to stop at any time."""
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
    total_loss: Loss | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_iteration: Callback | None = None,
) -> Trace:
    """`lazy_gd` in your own program, with a process group: to be called on every rank.

    Each rank is a worker. Where a server chooses, it is the first rank, and only that has a trace. As the
    others compute nothing unless asked, it needs `total_loss` to report losses (NaN without).
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ConfigError("lazy_gd: torch.distributed is not initialised")
    task = _Task([objective] * group.size(), start, how, iterations, optimum, gap, known)
    return _on_this_rank(task, total_loss or _unknown, process_group, on_iteration)


def _unknown(theta: torch.Tensor) -> float:
    del theta
    return math.nan


# -- in this process ---------------------------------------------------------------------------------------


def _loop(task: _Task, trace: Trace) -> Iterator[Iteration]:
    iterate, nodes = task.iterate(), [task.node(worker) for worker in range(len(task.objectives))]
    while True:
        theta, bound = iterate.theta, iterate.bound
        asked = iterate.to_ask() if task.how.by_server else range(len(nodes))
        uploaders: list[int] = []
        for worker in asked:
            node = nodes[worker]
            mine = node.compute(theta)
            flag = node.flag(mine, bound)
            if flag == lazy.BROKEN:
                raise not_finite(iterate.number, [worker])
            if flag == lazy.SKIP:
                node.silence += 1
            else:
                iterate.total = iterate.total + node.upload(mine)
                uploaders.append(worker)
        trace.theta = theta
        loss = sum(node.loss(theta) for node in nodes)
        one = iterate.record(uploaders, len(asked), loss, task.optimum)
        yield one
        if task.over(one):
            return
        iterate.advance()


def _by_lockstep(task: _Task, trace: Trace, over: Callable[[Iteration], bool]) -> None:
    driver = Lockstep(len(task.objectives))
    trace.meters = driver.meters
    replicas = [_Replica(task, rank_info) for rank_info in driver.rank_infos]
    while True:
        driver.run([replica.program() for replica in replicas])
        trace.theta = replicas[0].iterate.theta
        if over(replicas[0].record):
            return
        for replica in replicas:
            replica.iterate.advance()


def _by_local_server(task: _Task, trace: Trace, over: Callable[[Iteration], bool]) -> None:
    iterate, network = task.iterate(), transport.LocalNetwork()
    trace.meters = [Meter() for _ in task.objectives]
    workers: dict[int, transport.Connection] = {}
    for worker in range(1, len(task.objectives)):
        meters = trace.meters[0], trace.meters[worker]
        workers[worker], end = network.pair(("the server", f"worker {worker}"), meters)
        network.start(server.work(task.node(worker), iterate.theta, end))
    own = task.node(0)
    network.start(server.serve(iterate, own, workers, loss=task.loss, optimum=task.optimum, done=over))
    network.run()
    trace.theta = iterate.theta


class _Replica:
    """One rank where all ranks keep the parameters: flags, then the uploads by broadcasts."""

    def __init__(self, task: _Task, rank_info: RankInfo) -> None:
        self.node, self.iterate = task.node(rank_info.rank), task.iterate()
        self.rank_info, self.optimum = rank_info, task.optimum
        self.record: Iteration

    def program(self) -> channel.Program:
        number, device = self.iterate.number, self.iterate.theta.device
        ch = channel.Channel(self.rank_info, step=number, seed=0, key="", device=device, link=Link())
        mark = channel.mark_of(f"lazy_gd {self.node.how}")
        return channel.together([self._iteration(ch)], self.rank_info, step=number, mark=mark, link=Link())

    async def _iteration(self, ch: channel.Channel) -> None:
        node, iterate = self.node, self.iterate
        mine = node.compute(iterate.theta)
        flag = torch.tensor([node.flag(mine, iterate.bound)], dtype=torch.uint8)
        loss = torch.tensor([node.loss(iterate.theta)], dtype=torch.float64)
        received = await ch.gather([flag, loss])
        flags = lazy.check_flags([int(theirs[0]) for theirs, _ in received])
        if lazy.BROKEN in flags:
            raise not_finite(iterate.number, [rank for rank, flag in enumerate(flags) if flag == lazy.BROKEN])
        uploaders = [rank for rank, flag in enumerate(flags) if flag != lazy.SKIP]
        sums = lazy.Sums(node.last, iterate.total)
        last, iterate.total = await lazy.broadcast_uploads(sums, uploaders, mine, node.how.coder, ch)
        if ch.rank in uploaders:
            node.uploaded(mine, last)
        else:
            node.silence += 1
        losses = sum(float(theirs) for _, theirs in received)
        self.record = iterate.record(uploaders, ch.size, losses, self.optimum)


# -- processes ---------------------------------------------------------------------------------------------


def _on_this_rank(
    task: _Task, loss: Loss, process_group: dist.ProcessGroup | None, on_iteration: Callback | None
) -> Trace:
    if task.how.coder.bits not in (lazy.UNCODED, lazy.EXACT):
        prepare_for([LAQ()], loud=False)
    (group,) = private_groups(process_group, 1)
    meter = Meter()
    executor = ProcessGroupExecutor(group, meter)
    trace = Trace([], task.start.double(), [meter])
    over = task.follow(trace, on_iteration)
    try:
        agree(task.describe(), executor.execute, dist.get_process_group_ranks(group))
        meter.reset()
        rank, size = group.rank(), group.size()
        if not task.how.by_server:
            driver, replica = Blocking(executor.execute), _Replica(task, RankInfo(rank, size))
            driver.run(replica.program())
            while not over(replica.record):
                replica.iterate.advance()
                driver.run(replica.program())
            trace.theta = replica.iterate.theta
            return trace
        node, iterate = task.node(rank), task.iterate()
        if rank == 0:
            workers = {other: _connection(group, other, transport.SERVER, meter) for other in range(1, size)}
            transport.run(server.serve(iterate, node, workers, loss=loss, optimum=task.optimum, done=over))
        else:
            transport.run(server.work(node, iterate.theta, _connection(group, rank, transport.WORKER, meter)))
        trace.theta = iterate.theta
        return trace
    finally:
        executor.close()


def _connection(group: dist.ProcessGroup, rank: int, side: int, meter: Meter) -> transport.Connection:
    """Between the server, which is the first rank of the group, and this rank."""
    peer = f"the worker of rank {rank}" if side == transport.SERVER else "the server of rank 0"
    store, timeout = own_connection(default_store()), timeout_of(group).total_seconds()
    prefix = f"{group.group_name}/server/{rank}"
    return transport.GlooConnection(store, prefix, side, timeout, peer=peer, meter=meter)


def _by_processes(task: _Task, on_iteration: Callback | None, timeout: float) -> Trace:
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

    reports = on_iteration is not None
    results = cast(
        "list[tuple[list[Iteration], torch.Tensor, dict[str, Tally]]]",
        run_local(_process, len(task.objectives), task, reports, timeout=timeout, on_report=listen),
    )
    meters = [Meter(by_operation=counted) for _, _, counted in results]
    return Trace(results[0][0], results[0][1], meters)


def _process(
    worker: Worker, task: _Task, reports: bool
) -> tuple[list[Iteration], torch.Tensor, dict[str, Tally]]:
    on_iteration = worker.report if reports and worker.rank == 0 else None
    trace = _on_this_rank(task, task.loss, None, on_iteration)
    kept = trace.iterations if worker.rank == 0 else []
    return kept, trace.theta, dict(trace.meters[0].by_operation)
