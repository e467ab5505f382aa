"""The probe: equal on all ranks, and right about a link that is known."""

from __future__ import annotations

import threading

import pytest
import torch

import thinwire
from thinwire import ConfigError
from thinwire.net import frames
from thinwire.net.costs import TCP_FRAMING, Link
from thinwire.net.executor import cost_on_gloo
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo
from thinwire.predict.probe import Calibration, calibrate, calibrate_with, measure, probe
from thinwire.tools.lab import namespaces
from thinwire.tools.lab.hosts import hosts_for


class Clock:
    """A network of one rank's making: time passes only in its operations."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.rank_info, self.now = link, RankInfo(0, size), 0.0

    def execute(self, op: frames.Primitive) -> object:
        assert isinstance(op, frames.AllReduce)
        cost, _ = cost_on_gloo(op, self.rank_info)
        self.now += cost.hops * self.link.latency + TCP_FRAMING * self.link.transfer_seconds(cost)
        return op.tensor


@pytest.mark.parametrize("link", [Link(1e-3, 1.25e6), Link(1e-5, 1.25e7), Link(1e-4, 1.25e9)])
def test_a_known_link_is_found(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(link, 4)
    monkeypatch.setattr("thinwire.predict.probe.time.perf_counter", lambda: clock.now)
    found = measure(clock.execute, clock.rank_info, torch.device("cpu"))
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=0.01)
    assert found.latency == pytest.approx(link.latency, rel=0.02)


def test_a_group_of_one_has_no_network() -> None:
    with pytest.raises(ConfigError, match="two ranks or more"):
        measure(lambda op: None, RankInfo(0, 1), torch.device("cpu"))


def test_without_a_group_it_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        thinwire.probe()


class Costly(Clock):
    """The same with operations that cost something, and more while the rank computes."""

    def __init__(self, link: Link, size: int, operation: float, busy: float) -> None:
        super().__init__(link, size)
        self.operation, self.busy = operation, busy

    def execute(self, op: frames.Primitive) -> object:
        cost, _ = cost_on_gloo(op, self.rank_info)
        computing = any(each.name == "thinwire-calibrate" for each in threading.enumerate())
        self.now += self.operation + computing * self.busy
        self.now += cost.hops * self.link.latency + TCP_FRAMING * self.link.transfer_seconds(cost)
        return None


def test_operations_are_told_from_hops_and_idle_ranks_from_busy_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Costly(Link(1e-3, 1.25e8), 4, operation=2e-3, busy=5e-3)
    monkeypatch.setattr("thinwire.predict.probe.time.perf_counter", lambda: clock.now)
    link, overheads = calibrate_with(clock.execute, clock.rank_info, torch.device("cpu"))
    assert link.latency == pytest.approx(1e-3, rel=0.05)
    assert link.bandwidth == pytest.approx(1.25e8, rel=0.05)
    assert overheads.operation == pytest.approx(2e-3, rel=0.1)
    assert overheads.busy_operation == pytest.approx(5e-3, rel=0.1)
    assert overheads.busy_hop == pytest.approx(0.0, abs=1e-5)
    assert not any(each.name == "thinwire-calibrate" for each in threading.enumerate())


class Working(Costly):
    """Its ranks work for a while in every operation, and longer in sums."""

    worked = 0.0

    def execute(self, op: frames.Primitive) -> object:
        self.worked += 4e-4 if isinstance(op, frames.AllReduce) else 1e-4
        return super().execute(op)


def test_the_processor_time_of_sums_is_told_from_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Working(Link(1e-3, 1.25e5), 4, operation=2e-3, busy=5e-3)
    monkeypatch.setattr("thinwire.predict.probe.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("thinwire.predict.probe.time.process_time", lambda: clock.worked)
    began = clock.now
    _, overheads = calibrate_with(clock.execute, clock.rank_info, torch.device("cpu"))
    # The clock is that of rank 0; of the other three nothing is heard: a mean over four ranks.
    assert 4 * overheads.work == pytest.approx(1e-4)
    assert 4 * overheads.sum_work == pytest.approx(4e-4)
    assert clock.now - began < 20, "at 1 Mbit/s few short operations are enough"


def calibrated(worker: Worker) -> Calibration:
    return calibrate()


def test_all_ranks_have_the_same_calibration() -> None:
    found = run_local(calibrated, 2, timeout=120)
    assert found[0] == found[1]
    link, overheads = found[0]
    assert link.bandwidth > 0
    assert overheads.byte > 0
    assert min(overheads.operation, overheads.busy_operation, overheads.busy_hop) >= 0


def probed(worker: Worker) -> Link:
    return probe()


def test_all_ranks_agree() -> None:
    found = run_local(probed, 3, timeout=120)
    assert found[0] == found[1] == found[2]
    assert 0 < found[0].latency < 0.1


def test_the_lab_is_as_slow_as_it_was_told_to_be() -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    with hosts_for("lab:20mbit", 2) as hosts:
        found = run_local(probed, 2, timeout=120, hosts=hosts)
    assert found[0] == found[1]
    assert found[0].bandwidth == pytest.approx(2.5e6, rel=0.2)
