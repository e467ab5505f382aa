"""The estimate of a link: from a few operations, and from those of a training."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from thinwire.errors import PayloadError
from thinwire.net import costs, estimate, frames
from thinwire.net.costs import Cost, Link
from thinwire.net.rank_info import RankInfo

LINKS = [Link(50e-6, 125e6), Link(2e-3, 12.5e6), Link(30e-3, 125e6), Link(1e-3, 125e3)]


class Wire:
    """Performs gathers for one rank, whose clock it also is; the others say the same as this rank."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.size = link, size
        self.now, self.operations = 0.0, 0

    def execute(self, op: frames.Primitive) -> torch.Tensor:
        assert isinstance(op, frames.AllGather)
        assert op.setup, "the meter would count it"
        self.now += self.link.seconds_for(costs.all_gather(self.size, op.block.numel()))
        self.operations += 1
        return op.block.expand(self.size, -1)


@pytest.mark.parametrize("size", [3, 4, 16])
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_a_probe_finds_the_link_in_a_short_time(
    link: Link, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(link, size)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: wire.now)
    found = estimate.measure(wire.execute, RankInfo(0, size))
    assert found.latency == pytest.approx(link.latency, rel=0.2)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=0.3)
    gather = link.seconds_for(costs.all_gather(size, 8))
    assert wire.now < 0.3 + 30 * gather or wire.operations < 14


def test_the_time_of_a_rank_that_waits_for_none_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which have waited, tell longer times."""
    wire, size = Wire(LINKS[0], 3), 3
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: wire.now)

    def late(op: frames.Primitive) -> torch.Tensor:
        rows = wire.execute(op).clone()
        if rows.shape[1] == 8:
            (mine,) = struct.unpack("<d", frames.to_bytes(rows[0]))
            longer = torch.frombuffer(bytearray(struct.pack("<d", mine + 1.0)), dtype=torch.uint8)
            rows[1:] = longer
        return rows

    found = estimate.measure(late, RankInfo(0, size))
    assert found.latency == pytest.approx(LINKS[0].latency, rel=0.2)


@pytest.mark.parametrize("number", [-1.0, math.inf])
def test_numbers_that_cannot_be_are_refused(number: float) -> None:
    row = torch.frombuffer(bytearray(struct.pack("<2d", 0.5, number)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match="measured of the link"):
        estimate.numbers(row, 2)


def watched(link: Link, sizes: list[int], present: Link, *, waits: float = 0.0) -> Link | None:
    """What gathers of these sizes on 4 ranks tell; only one of five waits for no other rank."""
    samples = estimate.Samples()
    for length in sizes:
        cost = costs.all_gather(4, length)
        for turn in range(5):
            samples.add(cost, link.seconds_for(cost) + (waits if turn else 0.0))
    return samples.estimate(present)


@pytest.mark.parametrize("waits", [0.0, 0.5])
@pytest.mark.parametrize("present", LINKS, ids=str)
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_operations_of_different_sizes_tell_latency_and_bandwidth(
    link: Link, present: Link, waits: float
) -> None:
    found = watched(link, [100, 5_000, 200_000, 3_000_000], present, waits=waits)
    assert found is not None
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=0.3)
    cost = costs.all_gather(4, 100)
    assert found.seconds_for(cost) == pytest.approx(link.seconds_for(cost), rel=0.3)


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_operations_of_one_size_tell_how_long_they_take(link: Link) -> None:
    """That is all that can be known of them."""
    for length in (100, 20_000, 1_000_000):
        cost = costs.all_gather(4, length)
        for present in LINKS:
            found = watched(link, [length], present)
            assert found is not None
            assert found.seconds_for(cost) == pytest.approx(link.seconds_for(cost), rel=0.02)


def test_rare_operations_tell_nothing_and_an_estimate_forgets() -> None:
    samples = estimate.Samples()
    samples.add(Cost(100, 100, 3), 0.5)
    assert samples.estimate(Link()) is None
    for _ in range(estimate.TIMES):
        samples.add(Cost(100, 100, 3), 0.5)
    assert samples.estimate(Link()) is not None
    assert samples.estimate(Link()) is None
