"""Lock-step ranks on a virtual clock: how long would this take on that network?"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.drivers.lockstep import Lockstep
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.executor import cost_of
from thinwire.net.rank_info import RankInfo


class Simulated(Lockstep):
    """A group of `size` ranks whose links have a latency and a bandwidth; no time really passes.

    `clocks[r]` is the virtual time of rank r in seconds. An operation begins when the last rank has arrived,
    takes as long as the slowest link needs for its share, and ends for all ranks together. `compute` adds
    the time that a rank computes in between. `inside` connects the ranks of one host (`hierarchical`); None
    takes no time.

        >>> network = Simulated(64, Link(latency=1e-3, bandwidth=12.5e6))
        >>> network.compute(0, 0.2)
        >>> max(network.clocks)
        0.2
    """

    def __init__(
        self, size: int, link: Link | Sequence[Link] | None = None, *, inside: Link | None = None
    ) -> None:
        super().__init__(size)
        self.inside = inside
        links = [link or Link()] * size if isinstance(link, Link) or link is None else list(link)
        if len(links) != size:
            raise ValueError(f"{size} ranks need {size} links, not {len(links)}")
        self.links = links
        self.clocks = [0.0] * size

    def compute(self, rank: int, seconds: float) -> None:
        """Rank `rank` computes for this long."""
        self.clocks[rank] += seconds

    def spend(
        self, ops: Sequence[frames.Operation | frames.Commit], ranks: Sequence[int], *, inside: bool
    ) -> float:
        if not frames.is_counted(ops[0]):
            return 0.0
        begin = max(self.clocks[rank] for rank in ranks)
        seconds = 0.0
        for position, (rank, op) in enumerate(zip(ranks, ops, strict=True)):
            link = self.inside if inside else self.links[rank]
            if link is not None and not isinstance(op, frames.Commit):
                cost, _ = cost_of(op, RankInfo(position, len(ranks)))
                seconds = max(seconds, link.seconds_for(cost))
        for rank in ranks:
            self.clocks[rank] = begin + seconds
        return seconds
