"""From one method to another in the middle of a training: nothing is lost, and replicas are equal."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.averaging.cohort import Cohort, adam
from tests.hosts.common import flat
from thinwire.core.optimizers import Optimizers
from thinwire.hosts.hand_over import Carried, go_on, leave
from thinwire.net.launch import Worker, run_local
from thinwire.sessions.periodic import PeriodicSession

WIDTH = 40
SPARSE = "topk(ratio=0.01)"


def model() -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False))


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 * rank + number)
    optimizer.zero_grad()
    ddp(torch.randn(4, WIDTH, generator=rng)).square().sum().backward()
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    taken = gradient.clone()
    optimizer.step()
    return taken


def to_dense(worker: Worker, method: str) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """The gradient of the step after the switch has the residuals of all ranks in it."""
    ddp = model()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)  # so that gradients are the same again
    session = thinwire.attach(ddp, method)
    for number in range(3):
        step(ddp, optimizer, worker.rank, number)
    owed = leave(session, thinwire.parse("dense"), Optimizers(optimizer), None)
    session.detach()
    dense = thinwire.attach(ddp, "dense")
    plain = step(ddp, optimizer, worker.rank, 7)
    carried = Carried(dict(ddp.module.named_parameters()), owed)
    assert carried.left
    with_residual = step(ddp, optimizer, worker.rank, 7)
    assert not carried.left
    again = step(ddp, optimizer, worker.rank, 7)
    carried.close()
    dense.detach()
    assert torch.equal(again, plain)
    (residual,) = owed.values()
    return float(residual.norm()), float((with_residual - plain).norm()), with_residual - plain, residual


@pytest.mark.parametrize("method", [SPARSE, f"delayed(method={SPARSE})"])
def test_residuals_go_into_the_next_gradient(method: str) -> None:
    ranks = run_local(to_dense, 2, method, timeout=400)
    expected = sum(residual for *_, residual in ranks) / 2
    for norm, added, difference, _ in ranks:
        assert norm > 0
        assert added > 0
        assert torch.allclose(difference, expected.view_as(difference), rtol=1e-4, atol=1e-4)


def from_schedule(worker: Worker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """After a schedule all replicas and optimizers are equal; their mean has kept what was not sent."""
    torch.manual_seed(1)
    net = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    session = thinwire.attach(net, "periodic(every=4, exchange=topk(ratio=0.01))", optimizer=optimizer)
    assert isinstance(session, PeriodicSession)
    for number in range(6):
        step(net, optimizer, worker.rank, number)
    session.sync()
    sent = flat(net).clone()
    residual = next(iter(session.residuals().values())).clone().view(-1)
    leave(session, thinwire.parse("dense"), Optimizers(optimizer), None)
    session.detach()
    momentum = next(iter(optimizer.state.values()))["momentum_buffer"].clone()
    return flat(net), momentum, sent, residual


def test_a_schedule_applies_its_residual_and_averages_the_optimizer() -> None:
    (one, first, sent, mine), (other, second, _, theirs) = run_local(from_schedule, 2, timeout=400)
    assert torch.equal(one, other)
    assert torch.equal(first, second)
    assert mine.norm() > 0
    assert torch.allclose(one, sent - (mine + theirs) / 2, atol=1e-6)


def momenta(worker: Worker) -> tuple[int, list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    ddp = model()
    optimizer = torch.optim.AdamW(ddp.parameters())
    session = thinwire.attach(ddp, "adam(exchange=efsign(bucket=4096), warmup=1)", optimizer=optimizer)
    for number in range(3):
        step(ddp, optimizer, worker.rank, number)
    owed = leave(session, thinwire.parse("dense"), Optimizers(optimizer), None)
    session.detach()
    return len(owed), told


def test_a_residual_of_momenta_is_no_gradient() -> None:
    (first, (warning,)), (second, silent) = run_local(momenta, 2, timeout=400)
    assert (first, second, silent) == (0, 0, [])
    assert "ends with it" in warning


# -- from one period of a schedule to another ----------------------------------------------------------

FROM = "postlocal(every=4, warmup=55, outer_momentum=0.5)"
STEPS_BEFORE = 62


def at_another_period(method: str) -> tuple[Cohort, Cohort]:
    """Before the switch, and after it: the same models and optimizers with new sessions."""
    before = Cohort(FROM, 3, optimizer=adam)
    before.train(range(STEPS_BEFORE))
    before.driver.run([session.sync_program() for session in before.sessions])
    after = copy.copy(before)
    after.sessions = [
        PeriodicSession(each, thinwire.parse(method), optimizer, rank_info=session.rank_info, dense_below=64)
        for each, optimizer, session in zip(before.models, before.optimizers, before.sessions, strict=True)
    ]
    for old, new in zip(before.sessions, after.sessions, strict=True):
        go_on(old, new)
    return before, after


def test_a_schedule_that_goes_on_trains_as_if_it_had_never_stopped() -> None:
    _, after = at_another_period(FROM)
    after.train(range(STEPS_BEFORE, STEPS_BEFORE + 10))
    straight = Cohort(FROM, 3, optimizer=adam)
    straight.train(range(STEPS_BEFORE))
    straight.driver.run([session.sync_program() for session in straight.sessions])
    straight.train(range(STEPS_BEFORE, STEPS_BEFORE + 10))
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(after.models, straight.models, strict=True))


def test_another_period_takes_over_residuals_momentum_and_warm_up() -> None:
    before, after = at_another_period("postlocal(every=2, warmup=55, outer_momentum=0.5, fragments=2)")
    for old, new in zip(before.sessions, after.sessions, strict=True):
        assert new.step == old.step == STEPS_BEFORE
        residuals = old.residuals()
        assert sum(float(each.norm()) for each in residuals.values()) > 0
        assert residuals.keys() == new.residuals().keys()
        assert all(torch.equal(each, new.residuals()[name]) for name, each in residuals.items())
        assert new.gradient_warmup is not None
        assert old.gradient_warmup is not None
        assert new.gradient_warmup.ratios(3) == old.gradient_warmup.ratios(3) != [3**0.5] * 4
        momenta = [torch.cat([block.velocity for block in each.blocks]) for each in (old, new)]
        assert float(momenta[0].norm()) > 0
        assert torch.equal(*momenta)
        assert new.gradient_program() is None, "the warm-up is over"
    counts = [session.sync_rounds for session in after.sessions]
    after.train(range(STEPS_BEFORE, STEPS_BEFORE + 4))
    assert [session.sync_rounds - count for session, count in zip(after.sessions, counts, strict=True)] == [
        4
    ] * 3
