"""Byte formulas and the virtual clock."""

import pytest
import torch

from tests.laws.cohort import Cohort
from thinwire.drivers import Simulated
from thinwire.net import costs
from thinwire.net.costs import Link


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("src", [0, 3])
def test_a_broadcast_reaches_everybody_once(size: int, src: int) -> None:
    shares = [costs.broadcast(size, 10, rank, src % size) for rank in range(size)]
    assert sum(share.sent for share in shares) == sum(share.received for share in shares) == 10 * (size - 1)


def test_ring_formulas() -> None:
    assert costs.all_reduce(4, 400) == costs.Cost(600, 600, 6)
    assert costs.all_reduce(1, 400).sent == 0
    assert costs.all_gather(4, 100) == costs.Cost(300, 300, 3)
    assert costs.all_to_all(3, 1, [5, 7, 9], [1, 7, 3]) == costs.Cost(14, 4, 2)


def test_the_virtual_clock_adds_latency_and_bandwidth() -> None:
    link = Link(latency=0.01, bandwidth=1e6)
    network = Simulated(4, link)
    cohort = Cohort("dense", 4, {"w": (100, 100)}, driver=network)
    network.compute(2, 0.5)
    cohort.average(cohort.inputs(0))
    expected = 0.5 + 6 * 0.01 + 1.5 * 40_000 / 1e6
    assert network.clocks == pytest.approx([expected] * 4)
    assert network.meters[0].seconds == pytest.approx(expected - 0.5)


def test_one_slow_link_slows_all() -> None:
    links = [Link(0.0, 1e6), Link(0.0, 1e5)]
    network = Simulated(2, links)
    cohort = Cohort("dense", 2, {"w": (100, 100)}, driver=network)
    cohort.average(cohort.inputs(0))
    assert max(network.clocks) == pytest.approx(40_000 / 1e5)


def test_a_thousand_workers_on_one_laptop() -> None:
    network = Simulated(1024, Link(1e-4, 1.25e8))
    cohort = Cohort("randomblock(ratio=0.1)", 1024, {"w": (20, 50)}, driver=network)
    outputs = cohort.average(cohort.inputs(0))
    assert all(torch.equal(outputs[0]["w"], other["w"]) for other in outputs)
    assert network.meters[0].sent_bytes <= 2 * 4 * 100


def test_simulated_needs_a_link_for_every_rank() -> None:
    with pytest.raises(ValueError, match="3 ranks need 3 links, not 2"):
        Simulated(3, [Link(), Link()])
