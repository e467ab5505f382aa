"""One non-finite number on one rank: the whole step is NaN everywhere and nothing is remembered of it."""

import math

import pytest
import torch

import thinwire
from tests.hosts.common import PROMPT, assert_same_everywhere, flat, mlp, square_loss, wrap
from thinwire.net.launch import Worker, run_local

VALUES = (math.nan, math.inf, -math.inf)
PLACE = 123


def poison(model: torch.nn.Module, layer: int, value: float) -> object:
    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoiled = grad.clone()
        spoiled.view(-1)[PLACE] = value
        return spoiled

    return model[layer].weight.register_hook(spoil)


def assert_same_memory(before: dict, after: dict, label: str) -> None:
    assert before["state"].keys() == after["state"].keys(), label
    for name, kept in before["state"].items():
        for field, tensor in kept.items():
            assert torch.equal(tensor, after["state"][name][field]), f"{label}: {field} of {name} changed"


def assert_nothing_to_step_on(
    session: thinwire.Session, means: dict[str, torch.Tensor], bad: str, label: str
) -> None:
    """No number of an aborted step. Means without state have no commit: only the bad one is non-finite."""
    assert not means[bad].view(-1)[PLACE].isfinite(), f"{label}: the mean is finite"
    if session.engine.remembers:
        finite = [name for name, mean in means.items() if not mean.isnan().all()]
        assert not finite, f"{label}: {finite} can be stepped on"


def one_bad_number(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for turn, method in enumerate(PROMPT):
        model = wrap(mlp())
        session = thinwire.attach(model, method, overlap=turn % 2 == 0)
        for step in range(2):
            model.zero_grad()
            square_loss(model, worker.rank, step).backward()
        for number, value in enumerate(VALUES):
            layer = (0, 2, 6)[number]
            label = f"{method}, {value} in layer {layer}"
            before, count = session.sealed(), session.step
            hook = poison(model.module, layer, value) if worker.rank == 1 else None
            model.zero_grad()
            square_loss(model, worker.rank, 2).backward()
            if hook is not None:
                hook.remove()
            means = {name: p.grad for name, p in model.module.named_parameters()}
            assert_nothing_to_step_on(session, means, f"{layer}.weight", label)
            if session.engine.remembers:
                assert session.step == count, f"{label}: the step was counted"
            assert_same_memory(before, session.sealed(), label)
        model.zero_grad()
        square_loss(model, worker.rank, 3).backward()
        results[method] = flat(p.grad for p in model.parameters())
        assert results[method].isfinite().all(), f"{method}: does not recover"
        session.detach()
    return results


def test_every_method_under_ddp() -> None:
    assert_same_everywhere(run_local(one_bad_number, 2, timeout=400))


def one_bad_number_in_a_loop(worker: Worker) -> dict[str, torch.Tensor]:
    named = {name: torch.zeros_like(p) for name, p in mlp().named_parameters()}
    results = {}
    for method in PROMPT:
        session = thinwire.Session(named.items(), method)
        rng = torch.Generator().manual_seed(worker.rank)
        gradient = {name: torch.randn(p.shape, generator=rng) for name, p in named.items()}
        session.average(gradient)
        for value in VALUES:
            before, count = session.sealed(), session.step
            bad = {name: tensor.clone() for name, tensor in gradient.items()}
            if worker.rank == 0:
                bad["2.weight"].view(-1)[PLACE] = value
            mean = session.average(bad)
            label = f"{method}, {value}"
            assert_nothing_to_step_on(session, mean, "2.weight", label)
            assert session.step == count or not session.engine.remembers, f"{label}: the step was counted"
            assert_same_memory(before, session.sealed(), label)
        results[method] = flat(session.average(gradient).values())
        assert results[method].isfinite().all(), f"{method}: does not recover"
        session.detach()
    return results


@pytest.mark.slow
def test_every_method_with_average() -> None:
    assert_same_everywhere(run_local(one_bad_number_in_a_loop, 2, timeout=400))
