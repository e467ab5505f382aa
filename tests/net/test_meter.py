"""Overlapping operations, and a program's own time."""

import time
from collections.abc import Generator
from types import coroutine
from typing import Any

import pytest
import torch

from thinwire import Session
from thinwire.net.launch import Worker, run_local
from thinwire.net.meter import Meter, Tally, Timed


def test_time_under_way_is_not_counted_twice() -> None:
    meter = Meter()
    meter.count("all_reduce", Tally(1, seconds=2.0), ended=12.0)  # 10 to 12
    meter.count("all_reduce", Tally(1, seconds=2.0), ended=13.0)  # 11 to 13
    meter.count("all_reduce", Tally(1, seconds=0.5), ended=20.0)
    assert meter.seconds == pytest.approx(4.5)
    assert meter.network_seconds == pytest.approx(3.5)
    meter.reset()
    assert meter.network_seconds == 0.0


def test_a_program_s_own_time_is_counted_and_its_waiting_is_not() -> None:
    @coroutine
    def ask() -> Generator[str, Any, Any]:
        return (yield "question")

    async def work() -> None:
        time.sleep(0.02)
        await ask()
        time.sleep(0.02)

    meter = Meter()
    program = Timed(work(), meter)
    assert program.send(None) == "question"
    time.sleep(1.0)  # the network's time
    with pytest.raises(StopIteration):
        program.send(None)
    assert 0.04 <= meter.work_seconds < 1.0


def test_it_prints_as_a_short_table() -> None:
    meter = Meter()
    assert "per step" not in str(meter)
    meter.count("all_gather", Tally(3, 1000, 24, 3100, 3100), ended=1.0)
    meter.count("all_reduce", Tally(1, 500, 0, 900, 900), ended=2.0)
    meter.count_step()
    meter.count_step()
    lines = str(meter).splitlines()
    assert [line.split()[0] for line in lines] == ["bytes", "all_gather", "all_reduce", "total", "per", "2"]
    assert lines[1].split() == ["all_gather", "3", "1,024", "3,100", "3,100"]
    assert lines[4].split() == ["per", "step", "2", "762", "2,000", "2,000"]
    assert max(map(len, lines)) < 100


def broadcast(worker: Worker) -> tuple[int, int]:
    """One step of a method whose leader sends its indices to everybody."""
    parameter = torch.zeros(64, 64)
    session = Session([("w", parameter)], "scalecom(ratio=0.05)", seed=0)
    session.average({"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(worker.rank))})
    session.detach()
    return session.meter.sent_bytes, session.meter.received_bytes


def test_sent_and_received_are_counted_apart() -> None:
    sent, received = zip(*run_local(broadcast, 3), strict=True)
    assert sum(sent) == sum(received)
    assert sent[0] > received[0]  # the leader of the first step
    assert sent != received
