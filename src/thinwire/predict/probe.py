"""Measures the network of a group: `thinwire.probe()`; `calibrate()` adds what operations cost."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.net import costs, frames
from thinwire.net.costs import TCP_FRAMING, Link
from thinwire.net.executor import cost_of, cost_on_gloo
from thinwire.net.rank_info import RankInfo
from thinwire.predict.timeline import Overheads

SMALL_BYTES = 8
FIRST_BYTES = 64 * 1024
LARGEST_BYTES = 16 * 2**20
# Long enough that an initial burst, which a line may let through faster, does not count.
LONG_ENOUGH = 0.15
SMALL_TIMES = 25
LARGE_TIMES = 3
# A usual payload of a compressed bucket: gloo takes longer for it than for a few bytes.
SHORT_BYTES = 16 * 1024
SHORT_TIMES = 12
SHORT_SECONDS = 0.5
BUSY_TIMES = 15
# The square matrices that a thread multiplies while operations are timed beside it.
BUSY_WIDTH = 192

Execute = Callable[[frames.Primitive], object]


def probe(process_group: dist.ProcessGroup | None = None) -> Link:
    """The latency of a message and the bandwidth of the slowest line, equal on all ranks.

        link = thinwire.probe()
        print(f"{link.latency * 1e6:.0f} us, {link.bandwidth * 8 / 1e6:.0f} Mbit/s")

    It times a few small sums for the latency, then larger and larger ones for the bandwidth. This takes about
    a second, with at most 16 MiB at a time. The result is the median of the slowest rank. Bandwidth used by
    other programs at the time is missing from it. Call it on every rank of the group at the same point.

    Args:
        process_group: the ranks to measure; None is the default group.
    """
    return measure(*_on_group(process_group))


class Calibration(NamedTuple):
    """A link, and what operations on it cost besides. Equal on all ranks."""

    link: Link
    overheads: Overheads


def calibrate(process_group: dist.ProcessGroup | None = None) -> Calibration:
    """Like `probe`, with what an operation costs the workers themselves.

    Small sums and gathers tell the time of a message from that of an operation. They are timed once more
    while every rank multiplies matrices in another thread, as in a backward pass: what they take longer is
    the wait for a core. It takes about two seconds. Call it on every rank of the group at the same point.

        found = thinwire.predict.probe.calibrate()
        predict.profile("topk", shapes, 4).interval(found.link, compute, overheads=found.overheads)
    """
    return calibrate_with(*_on_group(process_group))


def _on_group(process_group: dist.ProcessGroup | None) -> tuple[Execute, RankInfo, torch.device, bool]:
    if not dist.is_initialized():
        raise ConfigError("probe() needs a process group: call torch.distributed.init_process_group first")
    group = process_group or dist.group.WORLD
    if group is None:
        raise ConfigError("probe() was called on a rank that is not in the group")
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    size = dist.get_world_size(group)

    def execute(op: frames.Primitive) -> object:
        match op:
            case frames.AllReduce():
                dist.all_reduce(op.tensor, group=group)
            case frames.AllGather():
                dist.all_gather([torch.empty_like(op.block) for _ in range(size)], op.block, group=group)
            case _:
                raise AssertionError(f"a probe asks for sums and gathers, not for {type(op).__name__}")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return None

    return execute, RankInfo(dist.get_rank(group), size), device, backend == "gloo"


def measure(execute: Execute, rank_info: RankInfo, device: torch.device, gloo: bool = True) -> Link:
    """`probe` with a function that performs a sum."""
    if rank_info.size < 2:
        raise ConfigError("probe() needs two ranks or more: a group of one has no network")
    return _measured(_Stopwatch(execute, rank_info, device, gloo), rank_info.size)[0]


def calibrate_with(
    execute: Execute, rank_info: RankInfo, device: torch.device, gloo: bool = True
) -> Calibration:
    """`calibrate` with a function that performs sums and gathers."""
    if rank_info.size < 2:
        raise ConfigError("calibrate() needs two ranks or more: a group of one has no network")
    watch, size = _Stopwatch(execute, rank_info, device, gloo), rank_info.size
    link, work = _measured(watch, size)
    hops = (costs.all_gather(size, SMALL_BYTES).hops, costs.all_reduce(size, SMALL_BYTES).hops)
    idle = _of_small(watch, SMALL_TIMES, hops, statistics.median)
    with _computing(device):
        busy = _of_small(watch, BUSY_TIMES, hops, statistics.fmean)
    times = max(3, min(SHORT_TIMES, int(SHORT_SECONDS * link.bandwidth / SHORT_BYTES)))  # fewer on slow links
    watch.of_gather(SHORT_BYTES, times, statistics.median)
    gathering = watch.work
    watch.median(SHORT_BYTES, times)
    overheads = Overheads(
        operation=idle.operation,
        busy_operation=max(0.0, busy.operation - idle.operation),
        busy_hop=max(0.0, busy.hop - idle.hop),
        byte=work,
        work=gathering,
        sum_work=watch.work,
    )
    operation = overheads.operation + overheads.busy_operation
    return Calibration(Link(idle.hop, link.bandwidth, operation=operation), overheads)


class _Small(NamedTuple):
    """Seconds of a small operation, and of each of its hops."""

    operation: float
    hop: float


def _of_small(
    watch: _Stopwatch, times: int, hops: tuple[int, int], mean: Callable[[list[float]], float]
) -> _Small:
    """From a gather and a sum, which differ in their hops. The hops take at most all of the time."""
    gather, summed = watch.of_gather(SMALL_BYTES, times, mean), watch.typical(SMALL_BYTES, times, mean)
    hop = min(max((summed - gather) / (hops[1] - hops[0]), 0.0), summed / hops[1])
    return _Small(max(0.0, (gather + summed - sum(hops) * hop) / 2), hop)


@contextmanager
def _computing(device: torch.device) -> Generator[None]:
    """Meanwhile a thread of this rank multiplies matrices, on processors only."""
    done = threading.Event()

    def multiply() -> None:
        matrix = torch.ones(BUSY_WIDTH, BUSY_WIDTH)
        while not done.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=multiply, name="thinwire-calibrate", daemon=True)
    if device.type == "cpu":
        thread.start()
    try:
        yield
    finally:
        done.set()
        if device.type == "cpu":
            thread.join()


def _measured(meter: _Stopwatch, size: int) -> tuple[Link, float]:
    """The link, and the processor seconds per byte of a large sum."""
    meter.median(SMALL_BYTES, 5)
    small = meter.median(SMALL_BYTES, SMALL_TIMES)
    length = FIRST_BYTES
    while (seconds := meter.median(length, LARGE_TIMES)) < LONG_ENOUGH and length < LARGEST_BYTES:
        # As much as should take long enough, but never a jump that one lucky time could mislead.
        length = min(LARGEST_BYTES, int(length * min(8.0, max(2.0, 1.2 * LONG_ENOUGH / seconds))))
    # Both times hold the same latencies: what the large sum takes longer is for its bytes.
    moved = TCP_FRAMING * (meter.busiest_bytes(length) - meter.busiest_bytes(SMALL_BYTES))
    bandwidth = moved / max(seconds - small, seconds / 10)
    waited = small - TCP_FRAMING * meter.busiest_bytes(SMALL_BYTES) / bandwidth
    latency = max(waited, small / 10) / costs.all_reduce(size, SMALL_BYTES).hops
    return Link(latency, bandwidth), meter.work / (2 * meter.busiest_bytes(length))


class _Stopwatch:
    def __init__(self, execute: Execute, rank_info: RankInfo, device: torch.device, gloo: bool) -> None:
        self._execute = execute
        self._place = rank_info
        self._device = device
        self._cost = cost_on_gloo if gloo else cost_of
        self.work = 0.0
        """Processor seconds of the last kind of operation that was timed: the median, and its mean over the
        ranks."""

    def median(self, length: int, times: int) -> float:
        """Seconds for a sum of this many bytes: the median of the slowest rank, equal on all ranks."""
        return self.typical(length, times, statistics.median)

    def typical(self, length: int, times: int, mean: Callable[[list[float]], float]) -> float:
        """The same with another mean."""
        data = torch.zeros(max(1, length // 4), device=self._device)
        return self._timed(lambda: self._sum(data), times, mean)

    def of_gather(self, length: int, times: int, mean: Callable[[list[float]], float]) -> float:
        """Seconds for a gather of blocks of this many bytes."""
        block = torch.zeros(length, dtype=torch.uint8, device=self._device)
        return self._timed(lambda: self._execute(frames.AllGather(block, length)), times, mean)

    def _timed(
        self, operation: Callable[[], object], times: int, mean: Callable[[list[float]], float]
    ) -> float:
        operation()
        taken: list[float] = []
        worked: list[float] = []
        for _ in range(times):
            began, before = time.perf_counter(), time.process_time()
            operation()
            taken.append(time.perf_counter() - began)
            worked.append(time.process_time() - before)
        self.work = float(self._of_ranks(statistics.median(worked)).mean())
        return float(self._of_ranks(mean(taken)).max())

    def busiest_bytes(self, length: int) -> int:
        data = torch.empty(length // 4, device="meta")
        return self._cost(frames.AllReduce(data, length), self._place)[0].busiest

    def _sum(self, data: torch.Tensor) -> None:
        self._execute(frames.AllReduce(data, data.numel() * data.element_size()))

    def _of_ranks(self, seconds: float) -> torch.Tensor:
        """The values of all ranks, by a sum with an entry per rank: only sums are available."""
        row = torch.zeros(self._place.size, dtype=torch.float64, device=self._device)
        row[self._place.rank] = seconds
        self._sum(row)
        return row
