"""The link by which a session decides: measured at attach, then by the operations of the training.

Now and then the ranks vote: in the first program of a step they tell each other what they have measured, and
all draw the same conclusion, which holds from the next step on.
"""

from __future__ import annotations

import math
import os
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass
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
"""A trial is kept if the exchange of a step takes at most this part of the time before."""
WORTH = 0.02
"""Buckets are exchanged together, for a trial, if that saves at least this part by the link's latency."""
_RECORD = struct.Struct("<4d")


def given_link(link: Link | None) -> Link | None:
    """The link that was given, as an argument or in the environment; None if it is to be measured."""
    text = os.environ.get(VARIABLE, "").strip()
    return link if link is not None or not text else slowest_link(text)


class Spans:
    """What a host with several buckets measures, and whether it is to exchange them together."""

    def __init__(self) -> None:
        self.merged = False
        self.buckets = 1
        self._seconds: list[float] = []

    def add(self, seconds: float, buckets: int) -> None:
        """The exchange of a step took so long, from its first bucket to its last result."""
        self.buckets = buckets
        self._seconds.append(seconds)

    def take(self) -> float:
        """The median since the last call; NaN without any."""
        seconds, self._seconds = self._seconds, []
        return statistics.median(seconds) if seconds else math.nan


@dataclass(frozen=True)
class _Vote:
    """What a rank has measured; NaN for what it does not know."""

    latency: float
    slowness: float
    """Seconds per byte."""
    span: float
    buckets: float


class MeasuredLink:
    """The link, the same on all ranks, and whether buckets are exchanged together."""

    def __init__(self, rank_info: RankInfo, *, speaks: bool) -> None:
        self.link = Link()
        self.samples = estimate.Samples()
        self.spans: Spans | None = None
        """Of a host that can exchange several buckets together."""
        self._rank_info = rank_info
        self._speaks = speaks
        self._next = FIRST
        self._votes: list[_Vote] | None = None
        self._before: float | None = None  # the span before the trial that is under way
        self._tried = False

    def set(self, link: Link, how: str) -> None:
        """Decide by this link from now on."""
        self.link = link
        if self._speaks:
            rate = 8e-6 * link.bandwidth
            log.info("the link %s: %.0f us per hop, %.4g Mbit/s", how, 1e6 * link.latency, rate)

    def metrics(self) -> dict[str, float]:
        """For `Session.metrics`."""
        merged = {} if self.spans is None else {"merged_buckets": float(self.spans.merged)}
        return {"link_latency": self.link.latency, "link_bandwidth": self.link.bandwidth, **merged}

    def is_due(self, steps: int) -> bool:
        """Whether this step brings a vote: after so many steps."""
        return steps >= self._next

    async def vote(self, device: torch.device) -> None:
        """A round of its own: 32 bytes of every rank."""
        found = self.samples.estimate(self.link)
        record = _RECORD.pack(
            math.nan if found is None else found.latency,
            math.nan if found is None else 1 / found.bandwidth,
            math.nan if self.spans is None else self.spans.take(),
            1 if self.spans is None else self.spans.buckets,
        )
        block = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        rows = cast(torch.Tensor, await ask(frames.AllGather(block, 0)))
        self._votes = [_Vote(*estimate.numbers(row, 4)) for row in rows]

    def conclude(self, steps: int) -> Link:
        """At the begin of a step: the link by which it decides."""
        votes, self._votes = self._votes, None
        if votes is None:
            return self.link
        changed = self._weigh(votes)
        self._next = steps + (TRIAL if self._merge_or_not(votes, changed) else EVERY)
        return self.link

    def _weigh(self, votes: Sequence[_Vote]) -> bool:
        """Whether the link is another one now. Who measures the least has waited for no other rank."""
        latency = _least([vote.latency for vote in votes], self.link.latency)
        slowness = _least([vote.slowness for vote in votes], 1 / self.link.bandwidth)
        factors = (latency / self.link.latency, slowness * self.link.bandwidth)
        if all(1 / CHANGED <= factor <= CHANGED for factor in factors):
            return False
        self.set(Link(latency, 1 / slowness), "by the operations of the training")
        return True

    def _merge_or_not(self, votes: Sequence[_Vote], changed: bool) -> bool:
        """Begins or ends a trial; whether one is under way."""
        spans, span = self.spans, statistics.fmean(vote.span for vote in votes)
        buckets = max(vote.buckets for vote in votes)
        if spans is None or math.isnan(span) or buckets < 2:
            self._before = None
            return False
        if self._before is not None:
            before, self._before = self._before, None
            if span > BETTER * before:
                spans.merged = not spans.merged
            elif self._speaks:
                what = "together" if spans.merged else "one by one"
                told = (buckets, what, 1e3 * span, 1e3 * before)
                log.info("%.0f buckets are exchanged %s: %.1f ms per step instead of %.1f", *told)
            return False
        saved = (buckets - 1) * (self._rank_info.size - 1) * self.link.latency
        if changed or not self._tried:
            self._tried = True
            if spans.merged or saved > WORTH * span:
                self._before, spans.merged = span, not spans.merged
                return True
        return False


def _least(numbers: Sequence[float], otherwise: float) -> float:
    return min((number for number in numbers if number > 0), default=otherwise)
