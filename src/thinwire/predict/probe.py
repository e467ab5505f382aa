"""Measures how fast the network of a group is: `thinwire.probe()`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.net import costs, frames
from thinwire.net.costs import TCP_FRAMING, Link
from thinwire.net.executor import cost_of, cost_on_gloo
from thinwire.net.rank_info import RankInfo

SMALL_BYTES = 8
FIRST_BYTES = 64 * 1024
LARGEST_BYTES = 16 * 2**20
# Long enough that an initial burst, which a line may let through faster, does not count.
LONG_ENOUGH = 0.15
SMALL_TIMES = 25
LARGE_TIMES = 3

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
    if not dist.is_initialized():
        raise ConfigError("probe() needs a process group: call torch.distributed.init_process_group first")
    group = process_group or dist.group.WORLD
    if group is None:
        raise ConfigError("probe() was called on a rank that is not in the group")
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def execute(op: frames.Primitive) -> object:
        if not isinstance(op, frames.AllReduce):
            raise AssertionError(f"a probe asks for sums only, not for {type(op).__name__}")
        dist.all_reduce(op.tensor, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return op.tensor

    rank_info = RankInfo(dist.get_rank(group), dist.get_world_size(group))
    return measure(execute, rank_info, device, gloo=backend == "gloo")


def measure(execute: Execute, rank_info: RankInfo, device: torch.device, *, gloo: bool = True) -> Link:
    """The same with a function that performs a sum."""
    if rank_info.size < 2:
        raise ConfigError("probe() needs two ranks or more: a group of one has no network")
    meter = _Stopwatch(execute, rank_info, device, gloo)
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
    return Link(max(waited, small / 10) / costs.all_reduce(rank_info.size, SMALL_BYTES).hops, bandwidth)


class _Stopwatch:
    def __init__(self, execute: Execute, rank_info: RankInfo, device: torch.device, gloo: bool) -> None:
        self._execute = execute
        self._place = rank_info
        self._device = device
        self._cost = cost_on_gloo if gloo else cost_of

    def median(self, length: int, times: int) -> float:
        """Seconds for a sum of this many bytes: the median of the slowest rank, equal on all ranks."""
        data = torch.zeros(max(1, length // 4), device=self._device)
        self._sum(data)
        taken: list[float] = []
        for _ in range(times):
            began = time.perf_counter()
            self._sum(data)
            taken.append(time.perf_counter() - began)
        return self._largest(statistics.median(taken))

    def busiest_bytes(self, length: int) -> int:
        data = torch.empty(length // 4, device="meta")
        return self._cost(frames.AllReduce(data, length), self._place)[0].busiest

    def _sum(self, data: torch.Tensor) -> None:
        self._execute(frames.AllReduce(data, data.numel() * data.element_size()))

    def _largest(self, seconds: float) -> float:
        """The largest value over all ranks, by a sum with an entry per rank: only sums are available."""
        row = torch.zeros(self._place.size, dtype=torch.float64, device=self._device)
        row[self._place.rank] = seconds
        self._sum(row)
        return float(row.max())
