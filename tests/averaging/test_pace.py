"""`overlap="auto"`: as many steps as a sync round takes, the same on all ranks."""

import time

import pytest
import torch
from torch import nn

import thinwire
from thinwire.averaging.pace import Pace, overlap_for
from thinwire.net.launch import Worker, run_local


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_and_sync_rounds_are_timed_apart() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    pace.step_ends()
    assert pace.take() == (0, 0), "the first step began before anybody looked"
    for seconds in (0.1, 0.3):
        pace.step_begins()
        clock.now += seconds
        pace.step_ends()
        clock.now += 5.0  # a sync round that was waited for
    pace.sync_begins()
    clock.now += 0.05
    pace.sync_ends()
    assert pace.take() == (200_000, 50_000)
    assert pace.take() == (0, 0), "every step counts once"


@pytest.mark.parametrize(
    ("times", "overlap"),
    [
        ([(0, 0), (0, 0)], 0),  # lock-step
        ([(1000, 0), (1000, 3000)], 0),  # a rank has not measured a sync round yet
        ([(1000, 320), (1000, 9000)], 0),  # 2 % of 16 steps
        ([(1000, 321), (1000, 9000)], 1),
        ([(1000, 4000), (1000, 9000)], 5),  # the rank that came last knows the network
        ([(500, 4000), (1000, 4000)], 5),  # the slowest rank sets the pace
        ([(1000, 90_000), (1000, 90_000)], 15),  # at most until the next sync round
    ],
)
def test_the_overlap_is_a_little_longer_than_a_sync_round(times: list[tuple[int, int]], overlap: int) -> None:
    assert overlap_for(times, period=16) == overlap


def test_a_period_of_one_step_has_nothing_to_overlap_with() -> None:
    assert overlap_for([(1000, 90_000)], period=1) == 0


def _train(worker: Worker, link: str, nap: float) -> tuple[list[int], torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = thinwire.attach(model, "localsgd(every=4, overlap='auto')", optimizer=optimizer)
    session.throttle(link)
    data = torch.Generator().manual_seed(worker.rank)
    overlaps: list[int] = []
    for _ in range(24):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        time.sleep(nap * (1 + worker.rank))
        optimizer.step()
        overlaps.append(session.clock.overlap)
    session.finish()
    return overlaps, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_real_ranks_agree_on_the_overlap() -> None:
    """16 kB take about 140 ms at 1 Mbit/s, and a step takes 20 ms on the slower rank."""
    (first, weights), (second, other) = run_local(_train, 2, "1mbit", 0.01, timeout=400)
    assert first == second
    assert first[:7] == [0] * 7, "nothing is known before the second sync round"
    assert 1 <= first[-1] <= 3
    assert torch.equal(weights, other)
