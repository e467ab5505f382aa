"""Makes a session's operations take as long as on a given link, without root and without a real one.

Every operation is performed over the network that connects the workers (usually loopback, which is fast).
Then every rank waits until the link would have finished it:

    begin  when the last rank has reached the operation (all ranks join an all-reduce of one byte)
    busy   max over ranks of  max(sent / up, received / down),  by `costs.py`, with TCP/IP headers
    end    begin + max over ranks of (busy of the rank + hops x (latency +- jitter))

A rank has one link for all its lanes: the bytes of an operation wait for those before it, while latencies
overlap. Each rank knows all links, so all ranks compute the same end. Waiting costs no processor time and
does not hold the interpreter's lock. A throttle cannot be faster than the network it runs on: an operation
that takes longer in reality than on the link is not made shorter.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinwire.net.costs import TCP_FRAMING, Cost, Link


class Throttle:
    """The link of one rank, shared by all its lanes. `links` has the links of all ranks."""

    def __init__(self, links: Sequence[Link], seed: int = 0) -> None:
        self.links = tuple(links)
        self.seed = seed
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, begin: float, busy: float, total: float) -> float:
        """Take the link for `busy` seconds once it is free; returns the end of the operation."""
        with self._lock:
            start = max(begin, self._free_at)
            self._free_at = start + busy
        return start + total


class Pace:
    """The throttle as one lane sees it; `ranks` take part in its operations (None: all of them)."""

    def __init__(self, throttle: Throttle, lane: int, ranks: Sequence[int] | None = None) -> None:
        self._throttle = throttle
        self._lane = lane
        self._ranks = range(len(throttle.links)) if ranks is None else ranks
        self._operations = 0

    def end_of(self, shares: Sequence[Cost], begin: float) -> float:
        """The end of an operation that began at `begin`; `shares` are its costs for each rank."""
        busy, total = 0.0, 0.0
        for rank, share in zip(self._ranks, shares, strict=True):
            link = self._throttle.links[rank]
            transfer = TCP_FRAMING * link.transfer_seconds(share)
            busy = max(busy, transfer)
            total = max(total, transfer + share.hops * link.latency + self._noise(rank, link, share.hops))
        self._operations += 1
        return self._throttle.reserve(begin, busy, total)

    def _noise(self, rank: int, link: Link, hops: int) -> float:
        """The total jitter of a rank's messages; every rank computes the same value."""
        if not link.jitter:
            return 0.0
        dice = random.Random(f"{self._throttle.seed} {self._lane} {self._operations} {rank}")
        return sum(dice.uniform(-link.jitter, link.jitter) for _ in range(hops))


def sleep_until(end: float) -> None:
    """Sleep until `time.perf_counter()` reaches `end`."""
    remaining = end - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)


class _Begun(NamedTuple):
    end: float
    finish: Callable[[], None]


class Courier:
    """Performs operations for a caller that does not wait: one thread begins them in order, one ends them.

    An operation begins without waiting for the end of those before it: latencies overlap, as on a link.
    """

    def __init__(self) -> None:
        self._to_begin: queue.SimpleQueue[Callable[[], _Begun] | None] = queue.SimpleQueue()
        self._to_end: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._begin, name="thinwire-throttle-begin", daemon=True),
            threading.Thread(target=self._end, name="thinwire-throttle-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, begin: Callable[[], tuple[float, Callable[[], None]]]) -> None:
        """`begin` performs the operation; it returns its end on the link, and what to call then."""
        self._to_begin.put(lambda: _Begun(*begin()))

    def close(self) -> None:
        """End the threads when all submitted operations are done."""
        self._to_begin.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _begin(self) -> None:
        while (begin := self._to_begin.get()) is not None:
            self._to_end.put(begin())
        self._to_end.put(None)

    def _end(self) -> None:
        while (begun := self._to_end.get()) is not None:
            sleep_until(begun.end)
            begun.finish()
