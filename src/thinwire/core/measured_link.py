"""The link by which a session decides: measured at attach, then by the operations of the training.

Now and then the ranks vote: in the first program of a step they tell each other what they have measured, and
all draw the same conclusion, which holds from the next step on.
"""

from __future__ import annotations

import math
import os
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from thinwire import log
from thinwire.core.channel import ask
from thinwire.net import estimate, frames
from thinwire.net.costs import Link
from thinwire.net.link import slowest_link
from thinwire.net.rank_info import RankInfo

VARIABLE = "THINWIRE_LINK"
"""The environment variable with the link of sessions that are given none, such as "100mbit"."""
FIRST, TRIAL, EVERY = 16, 16, 64
"""Steps before the first vote, in a trial, and between other votes."""
CHANGED = 1.5
"""A link is another one only if latency or bandwidth differ by this factor."""
BETTER = 0.97
"""A trial is kept if a step takes at most this part of the time before."""
WORTH = 0.004
"""Buckets are exchanged together, for a trial, if the latency that it saves is at least this part of a step:
under load a message costs several times as much."""
SHARE = 0.1
"""Fewer operations are tried as if each took this part of a step: so there is a limit to their bytes."""
AFRESH = 8.0
"""Fewer operations are tried again if latency or bandwidth differ by this factor from the last trial."""
_RECORD = struct.Struct("<4d")


def given_link(link: Link | None) -> Link | None:
    """The link that was given, as an argument or in the environment; None if it is to be measured."""
    text = os.environ.get(VARIABLE, "").strip()
    return link if link is not None or not text else slowest_link(text)


@dataclass
class Buckets:
    """Of a host with several buckets: how many there are, and whether it is to exchange them together."""

    merged: bool = False
    count: int = 1


class _Trial:
    """One of two ways to exchange is tried against the other, by the seconds that the ranks tell."""

    def __init__(self) -> None:
        self._before: float | None = None

    @property
    def under_way(self) -> bool:
        return self._before is not None

    def begin(self, seconds: float) -> None:
        """The other way begins; the present one took so long."""
        self._before = seconds

    def end(self, seconds: float) -> tuple[bool, float]:
        """Whether the other way, which took so long, is kept; and how long the one before took."""
        before, self._before = self._before or 0.0, None
        return seconds <= BETTER * before, before

    def drop(self) -> None:
        self._before = None


@dataclass(frozen=True)
class _Vote:
    """What a rank has measured; NaN for what it does not know."""

    latency: float
    slowness: float
    """Seconds per byte."""
    step: float
    """Seconds from step to step, the median."""
    buckets: float


class MeasuredLink:
    """The link, the same on all ranks, and whether buckets are exchanged together."""

    def __init__(
        self, rank_info: RankInfo, *, speaks: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.link = Link()
        self.samples = estimate.Samples()
        self.buckets: Buckets | None = None
        """Of a host that can exchange several buckets together."""
        self._rank_info = rank_info
        self._speaks = speaks
        self._clock = clock
        self._bandwidth = math.inf  # as measured on purpose
        self._next = FIRST
        self._votes: list[_Vote] | None = None
        self._merging, self._saving = _Trial(), _Trial()
        self._changed = True  # since the last time that merging was considered
        self._saved_on: Link | None = None  # the link of the last trial of fewer operations
        self._begun_at: float | None = None
        self._steps: list[float] = []

    def begin(self, link: Link) -> None:
        """Decide by this link, which was measured on purpose: short operations that are faster say little."""
        self._bandwidth = link.bandwidth
        self._saving.drop()  # this link begins with fewer bytes again
        self.set(link, "as measured")

    def set(self, link: Link, how: str) -> None:
        """Decide by this link from now on."""
        self.link = link
        if self._speaks:
            rate = 8e-6 * link.bandwidth
            log.info("the link %s: %.0f us per hop, %.4g Mbit/s", how, 1e6 * link.latency, rate)

    def metrics(self) -> dict[str, float]:
        """For `Session.metrics`."""
        merged = {} if self.buckets is None else {"merged_buckets": float(self.buckets.merged)}
        link, fewer = self.link, {"fewer_operations": float(self.link.operation > 0)}
        return {"link_latency": link.latency, "link_bandwidth": link.bandwidth, **merged, **fewer}

    def is_due(self, steps: int) -> bool:
        """Whether this step brings a vote: after so many steps."""
        return steps >= self._next

    async def vote(self, device: torch.device) -> None:
        """A round of its own: 32 bytes of every rank."""
        found = self.samples.estimate(self.link, self._bandwidth)
        record = _RECORD.pack(
            math.nan if found is None else found.latency,
            math.nan if found is None else 1 / found.bandwidth,
            statistics.median(self._steps) if self._steps else math.nan,
            1 if self.buckets is None else self.buckets.count,
        )
        self._steps.clear()
        block = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        rows = cast(torch.Tensor, await ask(frames.AllGather(block, 0)))
        self._votes = [_Vote(*estimate.numbers(row, 4)) for row in rows]

    def conclude(self, steps: int) -> Link:
        """At the begin of a step: the link by which it decides."""
        now, before = self._clock(), self._begun_at
        self._begun_at = now
        votes, self._votes = self._votes, None
        if votes is None:
            if before is not None:
                self._steps.append(now - before)
            return self.link
        changed = self._weigh(votes)
        self._changed = self._changed or changed
        # One trial at a time: it is the steps of both ways that are compared.
        trial = not self._saving.under_way and self._merge_or_not(votes)
        trial = trial or self._save_or_not(votes)
        self._next = steps + (TRIAL if trial else EVERY)
        return self.link

    def _weigh(self, votes: Sequence[_Vote]) -> bool:
        """Whether the link is another one now. Who measures the least has waited for no other rank."""
        latency = _least([vote.latency for vote in votes], self.link.latency)
        slowness = _least([vote.slowness for vote in votes], 1 / self.link.bandwidth)
        factors = (latency / self.link.latency, slowness * self.link.bandwidth)
        if all(1 / CHANGED <= factor <= CHANGED for factor in factors):
            return False
        link = replace(self.link, latency=latency, bandwidth=1 / slowness)
        self.set(link, "by the operations of the training")
        return True

    def _merge_or_not(self, votes: Sequence[_Vote]) -> bool:
        """Begins or ends a trial; whether one is under way."""
        mine, step = self.buckets, statistics.fmean(vote.step for vote in votes)
        count = max(vote.buckets for vote in votes)
        if mine is None or math.isnan(step) or count < 2:
            self._merging.drop()
            return False
        if self._merging.under_way:
            kept, before = self._merging.end(step)
            if not kept:
                mine.merged = not mine.merged
            elif self._speaks:
                what = "together" if mine.merged else "one by one"
                told = (count, what, 1e3 * step, 1e3 * before)
                log.info("%.0f buckets are exchanged %s: %.1f ms per step instead of %.1f", *told)
            return False
        saved = (count - 1) * (self._rank_info.size - 1) * self.link.latency
        if self._changed:
            self._changed = False
            if mine.merged or saved > WORTH * step:
                self._merging.begin(step)
                mine.merged = not mine.merged
                return True
        return False

    def _save_or_not(self, votes: Sequence[_Vote]) -> bool:
        """Begins or ends a trial of fewer operations with more bytes; whether one is under way.

        What an operation costs besides its messages, threads and waiting for a core, depends on all that the
        machines do. So the steps of both ways are timed.
        """
        step = statistics.fmean(vote.step for vote in votes)
        if math.isnan(step):
            self._saving.drop()
            return False
        if self._saving.under_way:
            kept, before = self._saving.end(step)
            if not kept:
                self._toggle(step)
            elif self._speaks:
                what = "fewer operations" if self.link.operation else "fewer bytes"
                log.info("%s: %.1f ms per step instead of %.1f", what, 1e3 * step, 1e3 * before)
            return False
        last, now = self._saved_on, self.link
        if (
            last is not None
            and max(_factor(last.latency, now.latency), _factor(last.bandwidth, now.bandwidth)) < AFRESH
        ):
            return False
        self._saved_on = now
        self._saving.begin(step)
        self._toggle(step)
        return True

    def _toggle(self, step: float) -> None:
        self.link = replace(self.link, operation=0.0 if self.link.operation else SHARE * step)


def _factor(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


def _least(numbers: Sequence[float], otherwise: float) -> float:
    return min((number for number in numbers if number > 0), default=otherwise)
