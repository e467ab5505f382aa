"""Lazy aggregation between real processes: bytes by the kernel's counters, slow workers, dead ones."""

import os
import statistics
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.convex.problems import squares
from tests.hosts.common import loaded_together
from thinwire.convex import Descent, Objective, lazy_gd_on_this_rank
from thinwire.methods.families.lazy import Counts
from thinwire.net.launch import Worker, run_local, start_local
from thinwire.net.roll_call import GRACE_SECONDS
from thinwire.tools.lab import inside, namespaces

TIMEOUT, SLACK = 16.0, 12.0


def network() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200))


def carried(worker: Worker, methods: tuple[str, ...], steps: int) -> dict[str, dict[str, int]]:
    """Full batches of ranks that are very differently smooth; what the kernel and the meter count."""
    found: dict[str, dict[str, int]] = {}
    x = torch.randn(20, 200, generator=torch.Generator().manual_seed(worker.rank)) * 0.5**worker.rank
    for method in methods:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        session = thinwire.attach(model, method, optimizer=optimizer)
        for step in range(steps + 1):
            if step == 1:
                torch.distributed.barrier()
                before, sent = inside.counters(), session.meter.sent_bytes
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
        torch.distributed.barrier()
        after = inside.counters()
        assert before is not None
        assert after is not None
        state = next(iter(session.engine.states._live.values()), None)
        uploads = steps + 1 if state is None else Counts.of(state.state.counts).uploads
        found[method] = {
            "kernel": after.sent - before.sent,
            "metered": session.meter.sent_bytes - sent,
            "uploads": uploads,
        }
        session.detach()
    return found


def test_an_interface_sends_what_the_meter_says_and_less_than_dense() -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    lag, laq, steps = "lag(xi=0.0001)", "laq(bits=4, xi=0.0001, max_skip=2)", 25
    with namespaces.network(3) as hosts:
        ranks = run_local(carried, 3, ("dense", lag, laq), steps, hosts=hosts, timeout=400)
    for rank, by_method in enumerate(ranks):
        for method, counted in by_method.items():
            ratio = counted["kernel"] / counted["metered"]
            # Flags are packets of their own: TCP's headers weigh more where little travels.
            assert 1.0 <= ratio <= (1.08 if counted["uploads"] > 4 else 1.2), (rank, method, counted)
    sent, uploads = (
        {method: sum(rank[method][what] for rank in ranks) for method in ranks[0]}
        for what in ("kernel", "uploads")
    )
    for method in (lag, laq):
        assert 15 < uploads[method] < 0.7 * uploads["dense"], "some upload, some do not"
    assert sent[lag] < 0.7 * sent["dense"]
    assert sent[laq] < 0.15 * sent["dense"]


def naps(worker: Worker, nap: float, steps: int) -> list[float]:
    model = network()
    session = thinwire.Session(model.named_parameters(), "lag(xi=1e9)")
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(worker.rank))
    session.average({name: p.detach() for name, p in model.named_parameters()})
    seconds = []
    for _ in range(steps):
        begin = time.monotonic()
        model.zero_grad()
        model(x).square().mean().backward()
        if worker.rank == 1:
            time.sleep(nap)
        session.average({name: p.grad for name, p in model.named_parameters()})
        seconds.append(time.monotonic() - begin)
    assert session.meter.by_operation["all_gather"].operations == steps + 1
    session.detach()
    return seconds


def test_a_slow_rank_delays_a_step_by_its_own_time_and_no_more() -> None:
    """One round of flags a step: nobody waits twice."""
    nap, steps = 0.5, 6
    for seconds in run_local(naps, 3, nap, steps, timeout=400):
        assert sum(seconds) > nap * (steps - 1)
        assert statistics.median(seconds) < 2 * nap


def one_dies(worker: Worker, how: str) -> tuple[str, str, float] | None:
    """What a survivor saw; rank 1 dies at its third gradient."""
    loaded_together(worker, "laq")
    gradients, begun = 0, 0.0

    def count() -> None:
        nonlocal gradients, begun
        gradients += 1
        begun = time.monotonic()
        if worker.rank == 1 and gradients == 3:
            os._exit(7)

    try:
        if how == "session":
            model = network()
            session = thinwire.Session(model.named_parameters(), "laq(xi=1e9)")
            for _ in range(6):
                count()
                session.average({name: p.detach() for name, p in model.named_parameters()})
        else:
            problem = squares(workers=3, spread=1.2)
            share = problem.shares[worker.rank]

            def gradient(theta: torch.Tensor) -> torch.Tensor:
                count()
                return share.gradient(theta)

            descent = Descent(how, problem.step, xi=0.0, smoothness=problem.smoothness)
            zero = torch.zeros(6, dtype=torch.float64)
            lazy_gd_on_this_rank(Objective(share.loss, gradient), zero, descent, iterations=50)
    except thinwire.PeerError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return None


@pytest.mark.parametrize("how", ["session", "laq", "lag-ps"])
def test_a_dead_rank_raises_on_all_others_in_time(how: str) -> None:
    for outcome in start_local(one_dies, 3, how, timeout=400, group_timeout=TIMEOUT):
        if outcome.rank == 1:
            assert outcome.exit_code == 7
            continue
        assert outcome.value is not None, outcome
        kind, text, seconds = outcome.value
        assert kind == "PeerError"
        assert "rank 1" in text or how == "lag-ps", text
        assert seconds < 2 * (TIMEOUT + GRACE_SECONDS) + SLACK
        assert outcome.exit_code == 0
