"""LASG: a second gradient on the same batch, under DDP and in a loop of one's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import ConfigError, Session
from thinwire.drivers import Lockstep
from thinwire.methods import LASG
from thinwire.methods.families.lazy import Counts
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo


class Net(nn.Module):
    """With everything that must not be disturbed: dropout, batch-norm statistics, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.body[3].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def net() -> Net:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return Net()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 6, generator=rng), torch.randn(16, 8, generator=rng)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def test_the_second_gradient_is_that_of_the_old_parameters_and_disturbs_nothing() -> None:
    model = net()
    session = Session(model.named_parameters(), LASG(), rank_info=RankInfo(0, 1))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    session.same_batch(model, lambda module: loss(module, 0, 0))
    assert torch.equal(state, torch.get_rng_state()), "the forward pass that follows has the same dropout"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    loss(model, 0, 0).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(session.engine._stale[name], parameter.grad), (
            "before the first upload: the same gradient"
        )


def step(
    driver: Lockstep, sessions: list[Session], models: list[nn.Module], number: int, compare: bool
) -> None:
    programs, results = [], []
    for rank, (session, model) in enumerate(zip(sessions, models, strict=True)):
        if compare:
            session.same_batch(model, lambda module, rank=rank: loss(module, rank, number))
        model.zero_grad()
        with torch.random.fork_rng(devices=()):
            loss(model, rank, number).backward()
        session.engine.begin_step()
        result, views = session.engine.views({name: p.grad for name, p in model.named_parameters()})
        results.append(result)
        programs.append(session.engine.program(views))
    kept = driver.run(programs)
    for session, model, result in zip(sessions, models, results, strict=True):
        session.engine.end_step(kept)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(0.02 * result[name])


def uploads(session: Session) -> int:
    return Counts.of(next(iter(session.engine.states._live.values())).state.counts).uploads


def run(method: LASG, steps: int, compare: bool) -> tuple[list[Session], list[nn.Module]]:
    driver, models = Lockstep(3), [net() for _ in range(3)]
    sessions = [Session(m.named_parameters(), method, rank_info=RankInfo(r, 3)) for r, m in enumerate(models)]
    for number in range(steps):
        step(driver, sessions, models, number, compare)
    return sessions, models


def test_uploads_are_skipped_where_lag_would_see_only_noise() -> None:
    sessions, models = run(LASG(xi=0.1, max_skip=10), 30, True)
    assert all(uploads(session) < 20 for session in sessions)
    flat = [torch.cat([p.detach().view(-1) for p in model.parameters()]) for model in models]
    assert all(torch.equal(flat[0], other) for other in flat)
    blind, _ = run(LASG(xi=0.1, max_skip=10), 30, False)
    assert all(uploads(session) == 30 for session in blind), "nothing to compare: all upload"


def test_the_old_parameters_are_those_of_the_last_upload() -> None:
    driver, models = Lockstep(3), [net() for _ in range(3)]
    sessions = [
        Session(m.named_parameters(), LASG(max_skip=5), rank_info=RankInfo(r, 3))
        for r, m in enumerate(models)
    ]
    known: list[dict[str, torch.Tensor]] = [{} for _ in range(3)]
    skipped = 0
    for number in range(12):
        before = [{n: p.detach().clone() for n, p in model.named_parameters()} for model in models]
        counts = [uploads(session) for session in sessions] if number else [0] * 3
        step(driver, sessions, models, number, True)
        for rank, session in enumerate(sessions):
            if uploads(session) > counts[rank]:
                known[rank] = before[rank]
            else:
                skipped += 1
            stale = session.stale_parameters()
            assert all(torch.equal(stale[name], tensor) for name, tensor in known[rank].items())
    assert skipped


def test_it_survives_a_checkpoint() -> None:
    driver, models = Lockstep(3), [net() for _ in range(3)]
    method = LASG(max_skip=5, bits=8)
    sessions = [Session(m.named_parameters(), method, rank_info=RankInfo(r, 3)) for r, m in enumerate(models)]
    for number in range(5):
        step(driver, sessions, models, number, True)
    again = [copy.deepcopy(model) for model in models]
    loaded = [Session(m.named_parameters(), method, rank_info=RankInfo(r, 3)) for r, m in enumerate(again)]
    for old, new in zip(sessions, loaded, strict=True):
        new.load_state_dict(old.state_dict())
    for number in range(5, 12):
        step(driver, sessions, models, number, True)
        step(driver, loaded, again, number, True)
    for mine, other in zip(models, again, strict=True):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_gradients_that_do_not_fit_are_refused() -> None:
    model = net()
    session = Session(model.named_parameters(), LASG(), rank_info=RankInfo(0, 1))
    with pytest.raises(ConfigError, match="is missing"):
        session.engine.use_stale_gradients({})
    with pytest.raises(ConfigError, match="has shape"):
        session.engine.use_stale_gradients(
            {name: torch.zeros(1, 2, 3) for name, _ in model.named_parameters()}
        )
    with pytest.raises(ConfigError, match="that the model does not have"):
        session.same_batch(nn.Linear(2, 2), lambda module: module(torch.zeros(2)).sum())


def trained(worker: Worker, wrapped: bool) -> tuple[torch.Tensor, int, int]:
    """The same training under DDP and with `session.average(..., stale=...)`."""
    model = net()
    model.body[2].p = 0.0
    if wrapped:
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        session = thinwire.attach(ddp, LASG(max_skip=6), optimizer=optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        session = Session(model.named_parameters(), LASG(max_skip=6), optimizer=optimizer)
    for number in range(15):
        optimizer.zero_grad()
        if wrapped:
            session.same_batch(ddp, lambda module, n=number: loss(module, worker.rank, n))
            loss(ddp, worker.rank, number).backward()
        else:
            old = copy.deepcopy(model)
            old.load_state_dict(session.stale_parameters(), strict=False)
            second = torch.autograd.grad(loss(old, worker.rank, number), list(old.parameters()))
            names = [name for name, _ in model.named_parameters()]
            loss(model, worker.rank, number).backward()
            grads = {name: p.grad for name, p in model.named_parameters()}
            session.average(grads, in_place=True, stale=dict(zip(names, second, strict=True)))
        optimizer.step()
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    count, steps = uploads(session), session.meter.steps
    session.detach()
    return flat, count, steps


def test_under_ddp_and_in_a_loop_of_ones_own() -> None:
    under_ddp = run_local(trained, 2, True, timeout=400)
    alone = run_local(trained, 2, False, timeout=400)
    assert torch.equal(under_ddp[0][0], under_ddp[1][0])
    assert torch.allclose(under_ddp[0][0], alone[0][0], atol=1e-5)
    for (_, a, steps), (_, b, _) in zip(under_ddp, alone, strict=True):
        assert a == b < steps == 15
