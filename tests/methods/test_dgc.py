"""Deep gradient compression: reduction to top-k, masking, clipping, small tensors, resuming, convergence."""

import math

import pytest
import torch

from tests.laws.cohort import Cohort, same_state
from tests.laws.test_laws import Quadratic
from thinwire import ConfigError
from thinwire.core import Layout
from thinwire.core.state import StateStore
from thinwire.methods import DGC, QSGD, HeavyBall, TopK

SHAPES = {"wide": (24, 37)}


@pytest.mark.parametrize("options", [{}, {"scope": "model"}, {"reduce": "split"}, {"values": QSGD(bits=8)}])
def test_without_momentum_it_is_topk_with_error_feedback(options: dict) -> None:
    plain = Cohort(TopK(ratio=0.1, warmup=2, **options), 3)
    corrected = Cohort(DGC(ratio=0.1, warmup=2, momentum=0.0, nesterov=True, **options), 3)
    for step in range(5):
        inputs = plain.inputs(step)
        assert same_state(plain.average(inputs), corrected.average(inputs))
        assert same_state(plain.residuals(), corrected.residuals())


def state(cohort: Cohort, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    entries = cohort.sessions[rank].engine.states.entries()["wide"]
    return entries["error"], entries["m"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_and_factor_masking_as_in_the_paper(nesterov: bool) -> None:
    a, size, n = 0.9, 2, 24 * 37
    cohort = Cohort(DGC(ratio=0.05, momentum=a, nesterov=nesterov, reduce="gather"), size, SHAPES)
    m, v = torch.zeros(size, n), torch.zeros(size, n)
    for step in range(6):
        inputs = cohort.inputs(step)
        (output, _) = cohort.average(inputs)
        expected = torch.zeros(n)
        for rank in range(size):
            g = inputs[rank]["wide"].view(-1)
            m[rank] = a * (m[rank] + g) if nesterov else a * m[rank] + g
            v[rank] += m[rank] + g if nesterov else m[rank]
            sent = v[rank].abs().topk(int(0.05 * n)).indices
            expected[sent] += v[rank][sent] / size
            m[rank][sent] = 0
            v[rank][sent] = 0
            mine, momentum = state(cohort, rank)
            assert torch.allclose(mine, v[rank], atol=1e-5)
            assert torch.allclose(momentum, m[rank], atol=1e-5)
            assert not momentum[sent].any(), "masked where something was sent"
        assert torch.allclose(output["wide"].view(-1), expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_a_ranks_share_of_the_mean_is_clipped_at_its_fraction_of_the_threshold(size: int) -> None:
    clip = 0.5
    cohort = Cohort(DGC(ratio=1.0, momentum=0.0, clip=clip, reduce="gather"), size, SHAPES)
    inputs = cohort.inputs(0, scale=100.0)
    (output, *_) = cohort.average(inputs)
    shares = [one["wide"].double() / size for one in inputs]
    expected = sum(share * (clip / math.sqrt(size)) / share.norm() for share in shares)
    assert torch.allclose(output["wide"].double(), expected, atol=1e-6)
    small = cohort.inputs(1, scale=1e-4)
    mean = sum(one["wide"] for one in small) / size
    assert torch.allclose(cohort.average(small)[0]["wide"], mean, atol=1e-9), "short ones stay as they are"


def test_clipping_follows_the_loss_scale() -> None:
    plain, scaled = (Cohort(DGC(ratio=0.1, momentum=0.5, clip=3.0), 2, SHAPES) for _ in range(2))
    for session in scaled.sessions:
        session.engine._scaler = type("Scaler", (), {"get_scale": lambda self: 1024.0})()
    for step in range(3):
        inputs = plain.inputs(step)
        larger = [{name: 1024 * g for name, g in one.items()} for one in inputs]
        outputs = [{n: t * 1024 for n, t in one.items()} for one in plain.average(inputs)]
        assert same_state(outputs, scaled.average(larger))


def test_small_tensors_have_the_same_momentum() -> None:
    shapes = {"wide": (24, 37), "bias": (37,)}
    dgc = Cohort(DGC(ratio=0.1, nesterov=True), 3, shapes, dense_below=100)
    alone = Cohort(HeavyBall(nesterov=True), 3, {"bias": (37,)})
    for step in range(4):
        inputs = dgc.inputs(step)
        expected = alone.average([{"bias": one["bias"]} for one in inputs])
        assert torch.equal(dgc.average(inputs)[0]["bias"], expected[0]["bias"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_heavyball_equals_the_optimizers_momentum_after_the_mean(nesterov: bool) -> None:
    cohort = Cohort(HeavyBall(0.8, nesterov), 3, SHAPES)
    with_momentum, without = torch.zeros(24, 37), torch.zeros(24, 37)
    with_momentum.requires_grad_()
    optimizer = torch.optim.SGD([with_momentum], lr=0.1, momentum=0.8, nesterov=nesterov)
    for step in range(5):
        inputs = cohort.inputs(step)
        with_momentum.grad = sum(one["wide"] for one in inputs) / 3
        optimizer.step()
        without -= 0.1 * cohort.average(inputs)[0]["wide"]
    assert torch.allclose(without, with_momentum.detach(), atol=1e-5)


def test_it_comes_to_a_minimum_that_the_ranks_share() -> None:
    """Not to one that they pull from in different directions: what masking forgets is lost (see DGC)."""
    problem, cohort = Quadratic(4), Cohort(DGC(ratio=0.1), 4, {"wide": (20, 30)})
    problem.centres = [problem.best] * 4
    x = torch.zeros(20, 30)
    for step in range(1500):
        rate = 0.004 * min(1.0, 2 * (1 - step / 1500))
        x = x - rate * cohort.average(problem.gradients(x))[0]["wide"]
    assert (x - problem.best).norm() < 0.02 * problem.best.norm()


def test_wrong_options_are_refused() -> None:
    for options in ({"momentum": 1.0}, {"momentum": -0.1}, {"clip": 0.0}, {"feedback": False}):
        with pytest.raises(ConfigError):
            DGC(**options)


def test_momentum_follows_its_parameters_when_buckets_change_and_is_not_owed() -> None:
    method, store = HeavyBall(), StateStore()
    both = Layout.of([("a", (3,)), ("b", (2,))])
    store.take(method, both).m.copy_(torch.arange(5.0))
    assert not store.residuals(lambda slot: method, {})
    store.rescale(2.0)
    (b,), (a,) = (store.take(method, both.pick([both.slots[i]])).tensors("momentum").values() for i in (1, 0))
    assert a.tolist() == [0, 2, 4]
    assert b.tolist() == [6, 8]


@pytest.mark.parametrize("method", [DGC(ratio=0.1), HeavyBall()])
def test_after_a_resize_the_mean_momentum_is_what_it_was(method: DGC | HeavyBall) -> None:
    four, two = Cohort(method, 4, SHAPES), Cohort(method, 2, SHAPES)
    for step in range(3):
        four.average(four.inputs(step))
    states = [session.sealed() for session in four.sessions]
    for rank, session in enumerate(two.sessions):
        session.load_state_dict(states[2 * rank : 2 * rank + 2], on_resize="sum")
    old, new = (
        sum(session.engine.states.entries()["wide"]["m"] for session in cohort.sessions)
        / len(cohort.sessions)
        for cohort in (four, two)
    )
    assert torch.allclose(old, new, atol=1e-5)
