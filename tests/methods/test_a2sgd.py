"""A2SGD: what the two means keep, and replicas that are brought together."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.laws.cohort import SHAPES, Cohort, same_bits
from thinwire import ConfigError, Session
from thinwire.drivers import Lockstep
from thinwire.methods import A2SGD
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo


def test_one_worker_keeps_its_gradient() -> None:
    cohort = Cohort(A2SGD(), 1)
    for step in range(3):
        inputs = cohort.inputs(step)
        (output,) = cohort.average(inputs)
        assert all(same_bits(output[name], inputs[0][name]) for name in SHAPES)


def test_equal_sign_masks_make_the_mean_of_outputs_the_mean_of_inputs() -> None:
    cohort = Cohort(A2SGD(scope="tensor"), 4)
    signs = cohort.inputs(0)[0]
    inputs = [{name: g.abs() * signs[name].sign() for name, g in one.items()} for one in cohort.inputs(1)]
    outputs = cohort.average(inputs)
    for name in SHAPES:
        mean = sum(one[name].double() for one in inputs) / 4
        assert torch.allclose(sum(one[name].double() for one in outputs) / 4, mean, atol=1e-5)


def test_what_is_not_exchanged_adds_up_to_zero_in_each_class() -> None:
    """out = residual + global means, so out less these sums to zero over P and over N."""
    cohort = Cohort(A2SGD(scope="tensor"), 3, {"wide": (24, 37)})
    inputs = cohort.inputs(2)
    outputs = cohort.average(inputs)
    signs = [one["wide"] >= 0 for one in inputs]
    plus, minus = (
        sum(one["wide"][mask].mean() for one, mask in zip(inputs, masks, strict=True)) / 3
        for masks in (signs, [~mask for mask in signs])
    )
    for output, mask in zip(outputs, signs, strict=True):
        assert abs((output["wide"][mask] - plus).sum()) < 1e-2
        assert abs((output["wide"][~mask] - minus).sum()) < 1e-2


def test_the_residual_of_a_gaussian_has_the_energy_of_the_paper() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    plus, minus = thinwire.kernels.two_means(x)
    residual = x - torch.where(x >= 0, plus, minus)
    assert abs(float(residual.square().sum() / x.square().sum()) - (1 - 2 / torch.pi)) < 0.01


def test_drift_without_end_must_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="allow_drift"):
        A2SGD(average_every=None)
    assert A2SGD(average_every=None, allow_drift=True).reconcile_every is None
    assert A2SGD().reconcile_every == 32


def test_reconciliation_in_lock_step_makes_equal_bits_of_parameters_and_momenta() -> None:
    size, driver = 3, Lockstep(3)
    rng = torch.Generator().manual_seed(4)
    ranks = []
    for rank in range(size):
        parameters = [(name, torch.randn(shape, generator=rng)) for name, shape in SHAPES.items()]
        for _, parameter in parameters:
            parameter.requires_grad_()
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        optimizer = torch.optim.Adam([parameter for _, parameter in parameters])
        optimizer.step()
        session = Session(parameters, A2SGD(), rank_info=RankInfo(rank, size), optimizer=optimizer)
        ranks.append((session, parameters, optimizer))
    mean = sum(parameters[0][1].detach().double() for _, parameters, _ in ranks) / size
    driver.run([session.reconciliation() for session, _, _ in ranks])
    _, first, theirs = ranks[0]
    assert torch.allclose(first[0][1].detach().double(), mean, atol=1e-6)
    for _, parameters, optimizer in ranks:
        for (_, mine), (_, other) in zip(first, parameters, strict=True):
            assert same_bits(mine.detach(), other.detach())
            for field in ("exp_avg", "exp_avg_sq"):
                assert same_bits(theirs.state[mine][field], optimizer.state[other][field])
    dense = sum(4 * parameter.numel() for _, parameter in first)
    assert driver.meters[0].payload_bytes == 3 * dense, "metered: parameters and two moments"


def network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * rank + step))


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def under_ddp(worker: Worker) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = thinwire.attach(model, A2SGD(average_every=4), dense_below=0, optimizer=optimizer)
    met, momenta, spreads = [], [], []
    for step in range(9):
        output = model(batch(worker.rank, step))  # averages the parameters before steps 4 and 8
        met.append(flat(model.parameters()))
        momenta.append(flat(s["momentum_buffer"] for s in optimizer.state.values()) if step else met[-1])
        spreads.append(session.spread())
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        if worker.rank == 0:
            model.eval()(batch(0, 0))  # an evaluation on one rank waits for nobody
    session.reconcile()
    met.append(flat(model.parameters()))
    session.detach()
    return met, momenta, spreads


def test_under_ddp_replicas_meet_before_the_forward_pass() -> None:
    (met, momenta, spreads), (others, theirs, same) = run_local(under_ddp, 2, timeout=400)
    assert spreads == same, "the answer is equal on all ranks"
    for step in range(9):
        together = step in (0, 4, 8)
        assert torch.equal(met[step], others[step]) == together, step
        assert torch.equal(momenta[step], theirs[step]) == together, step
        assert (spreads[step] == 0) == together, step
    assert torch.equal(met[9], others[9])


def own_loop(worker: Worker, early: bool) -> list[torch.Tensor]:
    model, seen = network(), []
    named = dict(model.named_parameters())
    session = Session(named.items(), A2SGD(average_every=3), dense_below=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        if early:
            session.reconcile(when_due=True)
        optimizer.zero_grad()
        model(batch(worker.rank, step)).square().mean().backward()
        session.average({name: parameter.grad for name, parameter in named.items()}, in_place=True)
        seen.append(flat(model.parameters()))
        optimizer.step()
    session.detach()
    return seen


@pytest.mark.parametrize("early", [False, True])
def test_in_a_loop_of_ones_own_replicas_meet_in_average(early: bool) -> None:
    seen, others = run_local(own_loop, 2, early, timeout=400)
    for step in range(7):
        assert torch.equal(seen[step], others[step]) == (step in (0, 3, 6)), step
