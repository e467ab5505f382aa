"""Performs the primitives on a `torch.distributed` process group, metered."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError, PeerError, ThinwireError
from thinwire.net import costs, frames
from thinwire.net.estimate import Samples
from thinwire.net.frames import Operation
from thinwire.net.groups import keys_of, subgroup
from thinwire.net.handshake import agree
from thinwire.net.link import Links, parse
from thinwire.net.liveness import Liveness
from thinwire.net.meter import Finished, Meter, Tally
from thinwire.net.rank_info import Hosts, RankInfo
from thinwire.net.staging import Staging
from thinwire.net.streams import CUDA, Streams, refuse_capture
from thinwire.net.throttle import Courier, Pace, Throttle, sleep_until

LOOK_UP = timedelta(seconds=0.25)
"""How often a thread that waits for an operation looks whether the program ends."""


class AbandonedError(Exception):
    """The program ends, and nobody waits for this operation any more."""


class ProcessGroupExecutor:
    """Operations on one private group: issued by one thread at a time, in the same order on every rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        meter: Meter,
        session: str | None = None,
        *,
        liveness: Liveness | None = None,
        inside: bool = False,
        streams: Streams = CUDA,
    ) -> None:
        self.group = group
        self.meter = meter
        self.rank_info = RankInfo(group.rank(), group.size())
        self.label = "attach"
        self.pace: Pace | None = None
        self._abandoned: threading.Event | None = None
        self._shortest_barrier = math.inf
        self._courier: Courier | None = None
        on_gloo = dist.get_backend(group) == "gloo"
        self._cost_of = cost_on_gloo if on_gloo else cost_of
        self.pads = not on_gloo
        """Whether a payload of varying length is padded to its bound if that is short: a round of lengths
        would make the host wait for the device."""
        self._streams = streams
        self._staging = Staging(streams) if on_gloo else None
        self._liveness = liveness or Liveness(group, session or group.group_name, lambda: meter.steps)
        self._liveness.remove_at_end(group.group_name, group.size(), keys_of(group))
        self._inside = inside
        self._samples: Samples | None = None
        self._tallies: dict[int, Tally] = {}  # of the sums that `issue` began, by their length
        self._levels: dict[bool, ProcessGroupExecutor] = {}

    def open_levels(self, hosts: Hosts) -> None:
        """Make the groups for operations within this rank's host and, on leaders, between hosts."""
        for inside, ranks in ((True, hosts.members), (False, hosts.leaders)):
            if hosts.rank_info.rank in ranks:
                group = subgroup(self.group, ranks)
                self._levels[inside] = ProcessGroupExecutor(
                    group, self.meter, liveness=self._liveness, inside=inside, streams=self._streams
                )

    def execute(self, op: frames.Primitive) -> object:
        """Carry out one primitive and count it."""
        if isinstance(op, frames.Commit):
            return op.finite
        if isinstance(op, frames.Within):
            level = self._levels[op.inside]
            level.label = self.label
            return level.execute(op.op)
        begin = time.perf_counter()
        with _Noted(self._liveness, op.name, self.label):
            try:
                end = self._barrier(op)
                answer, cost, length = self._perform(op)
                if end:
                    sleep_until(end)
            except RuntimeError as error:  # torch's own errors of a failed or timed-out collective
                raise self._liveness.diagnose(f"{op.name} of {self.label}", error) from error
        if frames.is_counted(op):
            ended = time.perf_counter()
            counted = tally(op, cost, length, ended - begin)
            self.meter.count(op.name, counted, ended, inside=self._inside)
            if self._samples is not None:
                self._samples.add(cost, ended - begin)
        return answer

    def diagnose(self, what: str, error: RuntimeError) -> PeerError:
        """An error of communication that is not an operation here, as one that names the missing ranks."""
        return self._liveness.diagnose(f"{what} of step {self.meter.steps}", error)

    def sample(self, samples: Samples) -> None:
        """Note the time of every operation here; with two levels, of those between hosts."""
        between = self._levels.get(False)
        if between is not None:
            between.sample(samples)
        elif not self._levels:
            self._samples = samples

    def sum_of(
        self, tensor: torch.Tensor, done: Callable[[BaseException | None], None]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin a sum in place. The future gets the tensor (NaN if it failed) after `done` was called."""

        def told(error: BaseException | None) -> torch.Tensor:
            done(error)
            return tensor if error is None else tensor.fill_(torch.nan)

        return self.issue(frames.AllReduce(tensor, tensor.nbytes), told)

    def issue(
        self, op: frames.AllReduce, done: Callable[[BaseException | None], Any]
    ) -> torch.futures.Future[Any]:
        """Begin a sum and return; `done` is called when it ends, and must not issue another operation.

        It runs on a thread of the group, so it must not hold the group (see `drivers/direct.py`).
        """
        if self.pace is not None:
            return self._issue_throttled(op, done)
        begin = time.perf_counter()
        liveness, finished, label = self._liveness, self.meter.finished, self.label
        length = op.tensor.nbytes
        counted = self._tallies.get(length)
        if counted is None or counted.payload_bytes != op.payload_bytes:
            counted = self._tallies[length] = tally(op, *self._cost_of(op, self.rank_info), 0.0)
        under_way = _Noted(liveness, op.name, label)

        # The next operation waits for this function, so it does as little as possible.
        def arrived(future: torch.futures.Future[list[torch.Tensor]]) -> Any:
            with under_way:
                try:
                    future.value()
                except RuntimeError as error:
                    return done(liveness.diagnose(f"{op.name} of {label}", error))
            finished.append(Finished(op.name, counted, begin, time.perf_counter()))
            return done(None)

        return cast(Any, self.group.allreduce([op.tensor])).get_future().then(arrived)

    def _issue_throttled(
        self, op: frames.AllReduce, done: Callable[[BaseException | None], Any]
    ) -> torch.futures.Future[Any]:
        """The same on threads of the throttle: a thread of the group must not wait for a link."""
        begin, label = time.perf_counter(), self.label
        under_way = _Noted(self._liveness, op.name, label)
        future: torch.futures.Future[Any] = torch.futures.Future()

        def carry_out() -> tuple[float, Callable[[], None]]:
            with under_way:
                try:
                    end = self._barrier(op)
                    _, cost, length = self._perform(op)
                except RuntimeError as error:
                    failure = self._liveness.diagnose(f"{op.name} of {label}", error)
                    return 0.0, lambda: future.set_result(done(failure))
                except BaseException as error:  # nobody else would hear of it
                    unforeseen = error
                    return 0.0, lambda: future.set_result(done(unforeseen))

            def finish() -> None:
                ended = time.perf_counter()
                self.meter.count(op.name, tally(op, cost, length, ended - begin), ended)
                future.set_result(done(None))

            return end, finish

        if self._courier is None:
            self._courier = Courier()
        self._courier.send(carry_out)
        return future

    def throttle(self, shared: Throttle | None, lane: int) -> None:
        """Let operations take as long as on these links; those inside a host take no time on them."""
        self.pace = None if shared is None else Pace(shared, lane)
        between = self._levels.get(False)
        if between is not None:
            ranks = dist.get_process_group_ranks(self.group)
            leaders = [ranks.index(rank) for rank in dist.get_process_group_ranks(between.group)]
            between.pace = None if shared is None else Pace(shared, lane, leaders)

    def _barrier(self, op: Operation) -> float:
        """Under a throttle: wait for all ranks; returns when the operation ends on the link."""
        if self.pace is None or self.rank_info.size == 1:
            return 0.0
        arrived = time.perf_counter()
        self._wait(self.group.allreduce([torch.zeros(1, dtype=torch.uint8)]))
        together = time.perf_counter()
        # The shortest barrier is one that nobody had to wait for: its time is not part of the operation.
        self._shortest_barrier = min(self._shortest_barrier, together - arrived)
        begin = together - self._shortest_barrier
        return self.pace.end_of(shares_of(op, self.rank_info, self._cost_of), begin)

    def leave_when(self, abandoned: threading.Event) -> None:
        """Leave an operation when the event is set, also while peers are silent (on gloo only)."""
        if self._cost_of is cost_on_gloo:
            self._abandoned = abandoned
        for level in self._levels.values():
            level.leave_when(abandoned)

    def keep_for_ever(self) -> None:
        """Never destroy the group: one of its operations is under way when the interpreter ends.

        The destructor would wait for it, as long as the timeout of the group.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        for level in self._levels.values():
            level.keep_for_ever()

    def _wait(self, work: Any) -> None:
        """Wait for an operation. A thread that may be abandoned must not stay inside of torch: if it came
        back after the interpreter has ended, the process would abort."""
        while self._abandoned is not None and not work.is_completed():
            if self._abandoned.is_set():
                raise AbandonedError
            with contextlib.suppress(RuntimeError):  # not ended yet, or failed: the wait below says how
                work.wait(LOOK_UP)
        work.wait()

    def close(self) -> None:
        """Leave the private group; harmless if everything has been destroyed already.

        The reference to the group is dropped here: a callback on gloo's own thread may still hold this
        executor, and a group whose last reference ends on that thread waits for its own thread and aborts.
        """
        levels, self._levels = self._levels, {}
        for level in levels.values():
            level.close()
        if self._courier is not None:
            self._courier.close()
        self._liveness.close()
        group = self.group
        del self.group
        if dist.is_initialized():
            with contextlib.suppress(ValueError, AssertionError, KeyError):
                dist.destroy_process_group(group)

    def _perform(self, op: Operation) -> tuple[object, costs.Cost, int]:
        cost, length = self._cost_of(op, self.rank_info)
        device = _tensor_of(op).device
        if device.type in self._streams.kinds:
            refuse_capture(self._streams)
            if self._staging is not None:
                return self._staged(op, self._staging), cost, length
        elif self._staging is None:
            return self._carried(op), cost, length
        return self._collective(op), cost, length

    def _collective(self, op: Operation) -> object:
        """The operation itself, on tensors that the backend can read."""
        match op:
            case frames.AllReduce():
                if op.tensor.element_size() == 1:
                    raise AssertionError(f"a sum of {op.tensor.dtype} would wrap around")
                self._wait(self.group.allreduce([op.tensor]))
                return op.tensor
            case frames.AllGather():
                gathered = op.block.new_empty((self.rank_info.size, op.block.numel()))
                self._wait(_all_gather(gathered.view(-1), op.block, self.group))
                return gathered
            case frames.Broadcast():
                self._wait(dist.broadcast(op.block, group=self.group, group_src=op.src, async_op=True))
                return op.block
            case frames.AllToAll():
                arrived = op.blocks[0].new_empty(sum(op.receive))
                self._all_to_all(arrived, torch.cat(op.blocks), op)
                return list(torch.split(arrived, list(op.receive)))

    def _all_to_all(self, arrived: torch.Tensor, joined: torch.Tensor, op: frames.AllToAll) -> None:
        sizes = [block.numel() for block in op.blocks]
        split = cast(Any, dist.all_to_all_single)
        self._wait(split(arrived, joined, list(op.receive), sizes, group=self.group, async_op=True))

    def _staged(self, op: Operation, staging: Staging) -> object:
        """On gloo with tensors of a GPU: through pinned memory. The host waits once, for the copy to it."""
        match op:
            case frames.AllReduce(tensor=tensor):
                (room,) = staging.begin(tensor.numel() * tensor.element_size())
                host = room.view(tensor.dtype).view(tensor.shape)
                staging.take([(host, tensor)])
                self._collective(frames.AllReduce(host, op.payload_bytes))
                staging.give([(host, tensor)])
                return tensor
            case frames.AllGather(block=block):
                mine, rows = staging.begin(block.numel(), self.rank_info.size * block.numel())
                staging.take([(mine, block)])
                self._wait(_all_gather(rows, mine, self.group))
                gathered = block.new_empty((self.rank_info.size, block.numel()))
                staging.give([(rows, gathered.view(-1))])
                return gathered
            case frames.Broadcast(block=block):
                (host,) = staging.begin(block.numel())
                mine = op.src == self.rank_info.rank
                staging.take([(host, block)] if mine else [])
                self._collective(frames.Broadcast(host, op.src, op.payload_bytes))
                staging.give([] if mine else [(host, block)])
                return block
            case frames.AllToAll(blocks=blocks):
                sizes = [block.numel() for block in blocks]
                joined, received = staging.begin(sum(sizes), sum(op.receive))
                staging.take(list(zip(torch.split(joined, sizes), blocks, strict=True)))
                self._all_to_all(received, joined, op)
                arrived = blocks[0].new_empty(sum(op.receive))
                staging.give([(received, arrived)])
                return list(torch.split(arrived, list(op.receive)))

    def _carried(self, op: Operation) -> object:
        """On NCCL with tensors on the CPU, as at attach: through this rank's GPU."""
        device = torch.device("cuda", torch.cuda.current_device())
        match op:
            case frames.AllReduce(tensor=tensor):
                moved = frames.AllReduce(tensor.to(device), op.payload_bytes)
                return tensor.copy_(cast(torch.Tensor, self._collective(moved)))
            case frames.AllGather(block=block):
                moved = frames.AllGather(block.to(device), op.payload_bytes)
                return cast(torch.Tensor, self._collective(moved)).cpu()
            case frames.Broadcast(block=block):
                moved = frames.Broadcast(block.to(device), op.src, op.payload_bytes)
                return block.copy_(cast(torch.Tensor, self._collective(moved)))
            case frames.AllToAll(blocks=blocks):
                there = tuple(block.to(device) for block in blocks)
                arrived = self._collective(frames.AllToAll(there, op.receive, op.payload_bytes))
                return [block.cpu() for block in cast("list[torch.Tensor]", arrived)]


def _tensor_of(op: Operation) -> torch.Tensor:
    match op:
        case frames.AllReduce():
            return op.tensor
        case frames.AllToAll():
            return op.blocks[0]
        case _:
            return op.block


class _Noted:
    """An operation that begins now. The `with` block in which it ends may be in another thread."""

    __slots__ = ("_under_way",)

    def __init__(self, liveness: Liveness, operation: str, of: str) -> None:
        self._under_way = liveness.under_way
        self._under_way[self] = (operation, of, time.monotonic())

    def __enter__(self) -> None:
        """It has begun already."""

    def __exit__(self, *_: object) -> None:
        del self._under_way[self]


def _all_gather(output: torch.Tensor, block: torch.Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renames all_gather_into_tensor; older releases know only the old name.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, block, group=group, async_op=True)


def cost_of(op: Operation, rank_info: RankInfo) -> tuple[costs.Cost, int]:
    """The cost of the operation for this rank, and the length of its own contribution."""
    match op:
        case frames.AllReduce():
            length = op.tensor.numel() * op.tensor.element_size()
            return costs.all_reduce(rank_info.size, length), length
        case frames.AllGather():
            return costs.all_gather(rank_info.size, op.block.numel()), op.block.numel()
        case frames.Broadcast():
            length = op.block.numel()
            cost = costs.broadcast(rank_info.size, length, rank_info.rank, op.src)
            return cost, length if op.src == rank_info.rank else 0
        case frames.AllToAll():
            sent = [block.numel() for block in op.blocks]
            cost = costs.all_to_all(rank_info.size, rank_info.rank, sent, op.receive)
            same = all(block is op.blocks[0] for block in op.blocks)
            return cost, sent[0] if same else sum(sent)


@lru_cache(maxsize=1024)
def _all_reduce_on_gloo(size: int, length: int) -> costs.Cost:
    messages = costs.gloo_all_reduce_messages(size, length)
    return costs.with_gloo_control(costs.all_reduce(size, length), messages, messages)


def cost_on_gloo(op: Operation, rank_info: RankInfo) -> tuple[costs.Cost, int]:
    """The same, with gloo's control messages."""
    if isinstance(op, frames.AllReduce):  # by far the most frequent, and always the same few lengths
        length = op.tensor.numel() * op.tensor.element_size()
        return _all_reduce_on_gloo(rank_info.size, length), length
    cost, length = cost_of(op, rank_info)
    size = rank_info.size
    match op:
        case frames.AllGather():
            sent = received = costs.gloo_all_gather_messages(size)
        case frames.Broadcast():
            position = (rank_info.rank - op.src) % size
            sent, received = costs.tree_children(position, size), int(position > 0)
        case frames.AllToAll():
            sent = received = size - 1
    return costs.with_gloo_control(cost, sent, received), length


def shares_of(
    op: Operation, rank_info: RankInfo, cost: Callable[[Operation, RankInfo], tuple[costs.Cost, int]]
) -> list[costs.Cost]:
    """The cost of the operation for each rank, as far as this rank can know.

    In an all-to-all a rank knows only its own blocks: it assumes that each other rank's blocks are all as
    long as the one for this rank.
    """
    mine = cost(op, rank_info)[0]
    match op:
        case frames.AllReduce() | frames.AllGather():
            return [mine] * rank_info.size
        case frames.Broadcast():
            return [cost(op, RankInfo(rank, rank_info.size))[0] for rank in range(rank_info.size)]
        case frames.AllToAll():
            others = rank_info.size - 1
            return [
                mine if rank == rank_info.rank else costs.Cost(others * length, 0, mine.hops)
                for rank, length in enumerate(op.receive)
            ]


def tally(op: Operation, cost: costs.Cost, length: int, seconds: float) -> Tally:
    payload = op.payload_bytes
    return Tally(1, payload, length - payload, cost.sent, cost.received, seconds)


def throttle(executors: Sequence[ProcessGroupExecutor], links: str | Links, *, seed: int = 0) -> None:
    """Let the operations of one session take as long as on these links; see `Session.throttle`."""
    if not executors:
        raise ThinwireError("this session has no process group: give its links to the Simulated driver")
    asked = parse(links)
    if asked.lab:
        raise ConfigError(f"link {asked.text!r} is slow by itself: it is not to be throttled")
    group = executors[0].group
    if dist.get_backend(group) != "gloo":
        raise ConfigError(f"a throttle needs the gloo backend, not {dist.get_backend(group)}")
    # With a meter of its own: this is not the training's traffic.
    execute = ProcessGroupExecutor(group, Meter()).execute
    agree({"link": asked.text, "seed of the jitter": seed}, execute, dist.get_process_group_ranks(group))
    shared = None if asked.unlimited else Throttle(asked.of(group.size()), seed)
    for lane, executor in enumerate(executors):
        executor.throttle(shared, lane)
