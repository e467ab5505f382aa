"""Estimates the link of a group: by a few operations at attach, and by the operations of the training."""

from __future__ import annotations

import math
import operator
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from thinwire.errors import PayloadError
from thinwire.net import costs, frames
from thinwire.net.costs import Cost, Link
from thinwire.net.rank_info import RankInfo

SMALL_TIMES = 8
SMALL_SECONDS = 0.02
"""Small operations are repeated at most so often, and so long."""
FIRST_BYTES, LARGER = 2**14, 8
"""Through each interface in the first large operation, and by how much the next one is larger."""
LAST_BYTES = 2**20
"""Blocks of at least this length are the last."""
LARGE_SECONDS = 0.005
"""If a large operation takes so much longer than a small one, and twice as long, it says enough."""
LONGEST, LONGER = 0.5, 4
"""No larger operation follows when the large ones have taken so long, and as many small ones besides."""
MINOR = 0.2
"""A part of the time below which nothing can be said about its cause."""
SPREAD = 4.0
"""By so much the bytes per hop of two operations differ, if they tell latency from bandwidth."""
BURST = 2**20
"""Fewer bytes may pass faster than the link: where traffic is shaped, one that was idle has saved up."""
TIMES = 4
"""Operations that came less often have perhaps waited for another rank each time."""
_SECONDS = struct.Struct("<d")


def measure(execute: Callable[[frames.Primitive], object], rank_info: RankInfo) -> Link:
    """The latency of a hop and the bandwidth, equal on all ranks; a few operations that no meter counts.

    Tens of milliseconds on a fast link; on a slow one a handful of operations, the largest of 16 KiB through
    each interface. What an operation took is told to all ranks, so that they go on alike.
    """
    watch, size = _Stopwatch(execute, rank_info), rank_info.size
    watch.gather(_SECONDS.size)  # which also waits for the slowest rank
    taken: list[float] = []
    while len(taken) < SMALL_TIMES and sum(taken) < SMALL_SECONDS:
        taken.append(watch.gather(_SECONDS.size))
    small = min(taken)  # as for the large ones: something else may have been in the way
    length = max(1, FIRST_BYTES // (size - 1))
    spent = seconds = watch.shortest(length)
    while (
        seconds - small < max(LARGE_SECONDS, small)
        and spent < LONGEST + LONGER * small
        and length < LAST_BYTES
    ):
        length *= LARGER
        seconds = watch.shortest(length)
        spent += seconds
    moved = costs.all_gather(size, length).sent
    return Link(small / costs.all_gather(size, 1).hops, moved / max(seconds - small, seconds / 10))


class _Stopwatch:
    def __init__(self, execute: Callable[[frames.Primitive], object], rank_info: RankInfo) -> None:
        self._execute = execute
        self._rank_info = rank_info

    def shortest(self, length: int) -> float:
        """The shorter of two: something else may have been in the way."""
        return min(self.gather(length), self.gather(length))

    def gather(self, length: int) -> float:
        """Seconds of a gather with blocks of this length: of the rank that came last and waited for none."""
        block = torch.zeros(length, dtype=torch.uint8)
        begin = time.perf_counter()
        self._execute(frames.AllGather(block, 0, setup=True))
        mine = _SECONDS.pack(time.perf_counter() - begin)
        told = self._execute(
            frames.AllGather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), 0, setup=True)
        )
        return min(numbers(row, 1)[0] for row in cast(torch.Tensor, told))


def numbers(row: torch.Tensor, count: int) -> tuple[float, ...]:
    """Numbers from the wire, each finite and not negative; NaN if a rank knows none."""
    found = cast("tuple[float, ...]", struct.unpack(f"<{count}d", frames.to_bytes(row)))
    if any(number < 0 or math.isinf(number) for number in found):
        raise PayloadError(f"a rank sent {found} for what it measured of the link")
    return found


@dataclass(frozen=True)
class _Sample:
    """The fastest of some operations."""

    hops: int
    moved: int
    seconds: float
    times: int


class Samples:
    """The fastest operations of each size since the last estimate: those that waited for no other rank."""

    def __init__(self) -> None:
        self._fastest: dict[tuple[int, int], _Sample] = {}
        self._lock = threading.Lock()

    def add(self, cost: Cost, seconds: float) -> None:
        """An operation took so long."""
        if not cost.hops or not seconds:
            return
        key = (cost.hops, cost.busiest.bit_length())
        with self._lock:
            known = self._fastest.get(key)
            times = 1 if known is None else known.times + 1
            if known is None or seconds < known.seconds:
                self._fastest[key] = _Sample(cost.hops, cost.busiest, seconds, times)
            else:
                self._fastest[key] = replace(known, times=times)

    def estimate(self, present: Link, at_most: float = math.inf) -> Link | None:
        """The link by these operations, which are forgotten; None without any that came often enough.

        Where they say nothing about latency or bandwidth, that of `present` stays. The bandwidth is `at_most`
        that, unless a long operation says otherwise.
        """
        with self._lock:
            samples, self._fastest = [s for s in self._fastest.values() if s.times >= TIMES], {}
        if not samples:
            return None
        found = _fit(samples, present)
        if found.bandwidth > at_most and max(sample.moved for sample in samples) < BURST:
            return _fit_latency(samples, at_most)
        return found


def _fit(samples: Sequence[_Sample], present: Link) -> Link:
    """The latency and slowness (seconds per byte) of seconds = latency * hops + slowness * moved."""
    ratios = [s.moved / s.hops for s in samples]
    slowness = 1 / min(present.up_bandwidth, present.down_bandwidth)
    if max(ratios) < SPREAD * min(ratios):
        latency, slowness = _of_one_size(samples, present.latency, slowness)
    else:
        latency, slowness = _of_many_sizes(samples, present.latency, slowness)
    return Link(latency, 1 / slowness)


def _fit_latency(samples: Sequence[_Sample], bandwidth: float) -> Link:
    """The latency by the shortest operations, on a link of this bandwidth."""
    shortest = min(samples, key=lambda sample: sample.moved / sample.hops)
    seconds = max(MINOR * shortest.seconds, shortest.seconds - shortest.moved / bandwidth)
    return Link(seconds / shortest.hops, bandwidth)


def _of_one_size(samples: Sequence[_Sample], latency: float, slowness: float) -> tuple[float, float]:
    """What takes little of the time by the present link stays; if both take much, both change alike."""
    mean = statistics.fmean
    if all(slowness * s.moved < MINOR * s.seconds for s in samples):
        return mean((s.seconds - slowness * s.moved) / s.hops for s in samples), slowness
    if all(latency * s.hops < MINOR * s.seconds for s in samples):
        return latency, mean((s.seconds - latency * s.hops) / s.moved for s in samples)
    factor = mean(s.seconds / (latency * s.hops + slowness * s.moved) for s in samples)
    return latency * factor, slowness * factor


def _of_many_sizes(samples: Sequence[_Sample], latency: float, slowness: float) -> tuple[float, float]:
    """Least squares of the relative errors. What takes little of every operation stays, if it may be."""
    h, b = [s.hops / s.seconds for s in samples], [s.moved / s.seconds for s in samples]
    hh, bb, hb = (sum(map(operator.mul, x, y)) for x, y in ((h, h), (b, b), (h, b)))
    per_hop = (sum(h) * bb - sum(b) * hb) / (hh * bb - hb * hb)
    per_byte = (sum(b) * hh - sum(h) * hb) / (hh * bb - hb * hb)
    least_hop, least_byte = MINOR / max(h), MINOR / max(b)
    if per_hop < least_hop:
        per_hop = min(latency, least_hop)
        return per_hop, (sum(b) - per_hop * hb) / bb
    if per_byte < least_byte:
        per_byte = min(slowness, least_byte)
        return (sum(h) - per_byte * hb) / hh, per_byte
    return per_hop, per_byte
