"""Links in words, and the throttle that keeps their time."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import ConfigError, DisagreementError, Session, ThinwireError, attach
from thinwire.net.costs import TCP_FRAMING, Cost, Link
from thinwire.net.launch import Worker, run_local, start_local
from thinwire.net.link import UNLIMITED, parse, throttle
from thinwire.net.rank_info import RankInfo
from thinwire.net.throttle import Pace, Throttle
from thinwire.sessions.preparation import prepare_for


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit", Link(bandwidth=12.5e6)),
        (" 1GBIT ", Link(bandwidth=125e6)),
        ("2.5 kbit", Link(bandwidth=312.5)),
        ("50mbit,latency=10ms,jitter=2ms", Link(0.01, 6.25e6, jitter=0.002)),
        ("latency=500us, 50mbit", Link(0.0005, 6.25e6)),
        ("up=20mbit,down=100mbit", Link(bandwidth=2.5e6, down=12.5e6)),
        ("none", UNLIMITED),
    ],
)
def test_a_link_for_all(text: str, link: Link) -> None:
    links = parse(text)
    assert links.of(3) == (link,) * 3
    assert not links.lab
    assert links.unlimited is (text == "none")


def test_some_ranks_have_links_of_their_own() -> None:
    base, slow, far, free = parse("100mbit,latency=5ms;1:20mbit;2:latency=50ms;3:none").of(4)
    assert base == Link(0.005, 12.5e6)
    assert slow == Link(0.005, 2.5e6)
    assert far == Link(0.05, 12.5e6)
    assert free == UNLIMITED
    assert parse("none;1:20mbit").of(2) == (UNLIMITED, Link(bandwidth=2.5e6))
    assert parse("1gbit;0:latency=1ms").of(1) == (Link(0.001, 125e6),)


def test_the_lab() -> None:
    links = parse("lab:100mbit;1:up=20mbit,down=50mbit")
    assert links.lab
    assert links.of(2) == (Link(bandwidth=12.5e6), Link(bandwidth=2.5e6, down=6.25e6))
    assert parse("lab:none").of(1)[0].bandwidth == math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fast", "'fast' is not a rate: write bit, kbit, mbit, gbit or tbit behind a number, as in 100mbit"),
        ("", "'' is not a rate"),
        ("100", "'100' is not a rate"),
        ("100mbps", "'100mbps' is not a rate"),
        ("-5mbit", "'-5mbit' is not a rate"),
        ("0mbit", "a rate of 0 never delivers"),
        ("1mbit,latency=10", "'10' is not a time"),
        ("1mbit,lag=10ms", "'lag' is not one of up, down, latency, jitter"),
        ("1mbit,2mbit", "rate is given twice"),
        ("1mbit,up=2mbit,down=2mbit", "give one rate, or up= and down="),
        ("up=2mbit", "up= and down= belong together"),
        ("latency=2ms", "it has no rate"),
        ("1mbit,latency=1ms,jitter=2ms", "jitter is more than latency"),
        ("1mbit;2mbit", "'2mbit' is not a rank and its link, such as 1:20mbit"),
        ("1mbit;1:2mbit;1:3mbit", "rank 1 has two links"),
        ("lab:1mbit,latency=3ms", "the lab limits rates only"),
    ],
)
def test_nonsense_is_one_helpful_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"link {text!r}: ")
    assert "\n" not in str(caught.value)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no rank 4 among 4 workers"):
        parse("1mbit;4:2mbit").of(4)


# -- the throttle ------------------------------------------------------------------------------------------


def test_lanes_share_one_link_and_latencies_overlap() -> None:
    shared = Throttle([Link()])
    assert shared.reserve(begin=10.0, busy=2.0, total=2.5) == 12.5
    assert shared.reserve(begin=11.0, busy=1.0, total=1.5) == 13.5  # waits for the bytes before it only
    assert shared.reserve(begin=20.0, busy=1.0, total=1.5) == 21.5


def seconds_of(
    links: str, shares: list[Cost], *, lane: int = 0, seed: int = 0, operations: int = 1
) -> list[float]:
    """How long each of some operations takes, with all the time in the world between them."""
    pace = Pace(Throttle(parse(links).of(len(shares)), seed), lane)
    begins = [1000.0 * number for number in range(operations)]
    return [pace.end_of(shares, begin) - begin for begin in begins]


def test_an_operation_lasts_as_long_as_the_slowest_rank_needs() -> None:
    shares = [Cost(sent=1_000_000, received=250_000, hops=6), Cost(sent=250_000, received=1_000_000, hops=6)]
    symmetric = 1_000_000 * TCP_FRAMING / 1e6
    assert seconds_of("8mbit,latency=0s", shares) == pytest.approx([symmetric])
    assert seconds_of("8mbit,latency=100ms", shares) == pytest.approx([symmetric + 0.6])
    assert seconds_of("up=8mbit,down=80mbit,latency=0s", shares) == pytest.approx([symmetric])
    assert seconds_of("up=80mbit,down=4mbit,latency=0s", shares) == pytest.approx([2 * symmetric])
    assert seconds_of("80mbit,latency=0s;1:8mbit", shares) == pytest.approx([symmetric])
    assert seconds_of("none;0:80mbit,latency=0s", shares) == pytest.approx([symmetric / 10])


def test_jitter_is_random_and_the_same_everywhere() -> None:
    shares, link = [Cost(0, 0, 4)] * 2, "1gbit,latency=10s,jitter=5s"
    times = seconds_of(link, shares, operations=50)
    assert seconds_of(link, shares, operations=50) == pytest.approx(times)
    assert seconds_of(link, shares, lane=1, operations=50) != pytest.approx(times)
    assert seconds_of(link, shares, seed=1, operations=50) != pytest.approx(times)
    assert min(times) < 40 < max(times)
    assert min(times) >= 20
    assert max(times) <= 60


NUMBERS = 100_000  # floats: 0.4 MB, of which three ranks send 4/3 each
RING_BYTES = 4 / 3 * 4 * NUMBERS * TCP_FRAMING


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(200, 200) for _ in range(5)))


def timed(session: Session, tensor: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Wall time and processor time of a step, and its result."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    mean = session.average({"w": tensor})["w"]
    return time.perf_counter() - wall, time.process_time() - processor, mean


def throttled_averages(worker: Worker) -> dict[str, tuple[float, float, torch.Tensor]]:
    """One dense step of a plain session on each link."""
    session = Session([("w", torch.zeros(NUMBERS))], "dense")
    tensor = torch.full((NUMBERS,), float(worker.rank))
    results = {}
    for link in ("none", "16mbit", "16mbit;2:8mbit", "up=160mbit,down=16mbit", "1gbit,latency=100ms", "none"):
        throttle(session, link)
        results[link] = timed(session, tensor)
    session.detach()
    return results


def throttled_steps(
    worker: Worker, method: str, link: str, steps: int = 3
) -> tuple[float, float, torch.Tensor]:
    """The shortest step under DDP with several buckets, the bytes of a step, and the last gradients."""
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    session = attach(wrapped, method)
    throttle(session, link)
    times, sent = [], 0
    for _ in range(steps):
        wrapped.zero_grad()
        dist.barrier()
        begin, before = time.perf_counter(), session.meter.sent_bytes
        wrapped(torch.full((2, 200), 0.1 * worker.rank)).square().mean().backward()
        times.append(time.perf_counter() - begin)
        sent = session.meter.sent_bytes - before
    gradients = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    session.detach()
    return min(times), float(sent), gradients


def disagreeing(worker: Worker) -> str:
    session = Session([("w", torch.zeros(4))], "dense")
    try:
        session.throttle("1mbit" if worker.rank else "2mbit")
    except DisagreementError as error:
        return str(error)
    finally:
        session.detach()
    return ""


def everything(worker: Worker) -> dict[str, object]:
    """One start of the workers for all that needs them."""
    prepare_for([thinwire.parse("qsgd")], loud=False)
    return {
        "averages": throttled_averages(worker),
        "steps": {
            (method, link): throttled_steps(worker, method, link)
            for method in ("dense", "qsgd")
            for link in ("none", "16mbit")
        },
        "disagreement": disagreeing(worker),
    }


@pytest.fixture(scope="module")
def measured() -> list[dict]:
    return run_local(everything, 3)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("16mbit", RING_BYTES / 2e6),
        ("16mbit;2:8mbit", RING_BYTES / 1e6),
        ("up=160mbit,down=16mbit", RING_BYTES / 2e6),
        ("1gbit,latency=100ms", 0.4),
    ],
)
def test_a_step_takes_as_long_as_the_link_says(measured: list[dict], link: str, expected: float) -> None:
    for rank, results in enumerate(measured):
        wall, processor, mean = results["averages"][link]
        assert expected <= wall <= 1.3 * expected + 0.2, f"rank {rank}"
        assert processor < 0.5 * wall, f"rank {rank} does not wait in peace"
        assert torch.equal(mean, results["averages"]["none"][2])


@pytest.mark.parametrize("method", ["dense", "qsgd"])
def test_ddp_is_slowed_by_both_drivers_and_computes_the_same(measured: list[dict], method: str) -> None:
    for rank, results in enumerate(measured):
        free, _, expected = results["steps"][method, "none"]
        wall, sent, gradients = results["steps"][method, "16mbit"]
        on_the_link = sent * TCP_FRAMING / 2e6
        # Lanes that had a link each would need little more than half.
        assert on_the_link <= wall <= 1.3 * (on_the_link + free) + 0.2, f"rank {rank}"
        assert torch.equal(gradients, expected)


def test_ranks_must_agree_on_the_link(measured: list[dict]) -> None:
    for results in measured:
        assert "the ranks disagree on link: rank 0: 2mbit; rank 1, 2: 1mbit" in results["disagreement"]


def dying(worker: Worker) -> None:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    session = attach(wrapped, "dense")
    throttle(session, "100mbit")
    for step in range(3):
        if step == 2 and worker.rank == 1:
            os._exit(3)
        wrapped(torch.ones(2, 200)).square().mean().backward()
    session.detach()


def test_a_peer_that_dies_is_named_under_a_throttle_too() -> None:
    first, second = start_local(dying, 2, group_timeout=60.0)
    assert second.exit_code == 3
    assert "PeerError" in (first.error or "")
    assert "no word from rank 1" in (first.error or "")


def test_a_session_of_a_driver_and_a_lab_have_no_throttle() -> None:
    session = Session([("w", torch.zeros(4))], "dense", rank_info=RankInfo(0, 2))
    with pytest.raises(ThinwireError, match="Simulated"):
        session.throttle("1mbit")
    throttle(session, "lab:1mbit")  # slow by itself
