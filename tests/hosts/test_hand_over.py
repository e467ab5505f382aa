"""From one method to another in the middle of a training: nothing is lost, and replicas are equal."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.common import flat
from thinwire.hosts.hand_over import Carried, leave
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
    owed = leave(session, thinwire.parse("dense"), optimizer, None)
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
    leave(session, thinwire.parse("dense"), optimizer, None)
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
    owed = leave(session, thinwire.parse("dense"), optimizer, None)
    session.detach()
    return len(owed), told


def test_a_residual_of_momenta_is_no_gradient() -> None:
    (first, (warning,)), (second, silent) = run_local(momenta, 2, timeout=400)
    assert (first, second, silent) == (0, 0, [])
    assert "ends with it" in warning
